"""Facts and wishes become a plan: what the workers run on, why, and with which environment variables."""

from typing import Any

from configs.errors import ConfigError
from tasks.patch_environment.findings import finding
from tasks.patch_environment.patches.registry import needed

# torchrun gives these to each worker; a value for all of them would make every worker the same one.
OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def resolve(config: dict, facts: dict) -> dict[str, Any]:
    """The plan of a run. What the configuration sets explicitly is taken or refused, never replaced.

    Args:
        config: PipelineConfig as a dict.
        facts: of `probe`.

    Returns:
        {"device", "nproc_per_node", "precision", "attention_backend", "threads", "distributed_backend", "accumulation_steps",
        "env": variables of the workers, "reasons": a sentence a setting, "findings": what is allowed but unwise,
        "patches": names of what workers mend in their own process}.

    Raises:
        ConfigError: every wish that this machine cannot meet, a line each.
    """
    wishes, train = config["environment"], config["train"]
    problems: list[str] = []
    reasons: dict[str, str] = {}

    device = _device(wishes["device"], facts, problems, reasons)
    processes = _processes(wishes["nproc_per_node"], device, facts, train, problems, reasons)
    precision = _precision(wishes["precision"], device, facts["gpus"][:processes], problems, reasons)
    backend = _backend(wishes["distributed_backend"], device, facts["nccl"], problems, reasons)
    threads = wishes["threads"]
    if threads == "auto":
        threads = max(1, facts["cores"] // processes)
        reasons["threads"] = f"{facts['cores']} usable core(s) over {processes} worker(s)"
    reasons["attention_backend"] = "torch's scaled_dot_product_attention chooses the kernel"
    problems += [
        f"environment.env.{name}={value}, but torchrun sets {name} for each worker; remove it."
        for name, value in wishes["env"].items()
        if name in OF_TORCHRUN
    ]
    if problems:
        raise ConfigError(
            "this machine cannot run the configuration:\n" + "\n".join(f"  {problem}" for problem in problems)
        )
    plan = {
        "device": device,
        "nproc_per_node": processes,
        "precision": precision,
        "attention_backend": "sdpa" if wishes["attention_backend"] == "auto" else wishes["attention_backend"],
        "threads": threads,
        "distributed_backend": backend,
        "accumulation_steps": train["global_batch_size"] // (train["micro_batch_size"] * processes),
    }
    own = worker_environment(plan, facts["loopback"])
    findings = [*_unwise(plan, facts), *_replaced(own, wishes["env"])]
    patches = [patch.name for patch in needed(config, facts)]
    return plan | {"env": own | wishes["env"], "reasons": reasons, "findings": findings, "patches": patches}


def _device(wish: str, facts: dict, problems: list[str], reasons: dict[str, str]) -> str:
    fault = facts.get("gpu_fault")
    if wish == "auto":
        reasons["device"] = f"{len(facts['gpus'])} GPU(s) found" if facts["gpus"] else fault or "no GPU found"
        return "cuda" if facts["gpus"] else "cpu"
    if wish == "cuda" and not facts["gpus"]:
        why = f"torch cannot use the GPU here ({fault})" if fault else "no GPU answers on this machine"
        problems.append(f"environment.device=cuda, but {why}; use auto or cpu, or mend the driver.")
    return wish


def _processes(
    wish: int | str, device: str, facts: dict, train: dict, problems: list[str], reasons: dict[str, str]
) -> int:
    count, sequences, micro = len(facts["gpus"]), train["global_batch_size"], train["micro_batch_size"]
    if wish == "auto" and device == "cuda" and count:
        shared = next((n for n in range(count, 0, -1) if sequences % (micro * n) == 0), 1)
        reasons["nproc_per_node"] = "one worker a GPU"
        if shared < count:
            reasons["nproc_per_node"] = (
                f"of {count} GPUs, as many as share train.global_batch_size={sequences} "
                f"in parts of train.micro_batch_size={micro}"
            )
    elif wish == "auto":
        shared = 1
        reasons["nproc_per_node"] = "one worker with all the threads"
    else:
        shared = int(wish)
        if device == "cuda" and count and shared > count:
            problems.append(
                f"environment.nproc_per_node={shared}, but there are {count} GPU(s) and each takes one worker; "
                f"use auto or at most {count}."
            )
    if sequences % (micro * shared):
        problems.append(
            f"train.global_batch_size={sequences} is not a multiple of train.micro_batch_size={micro} "
            f"x {shared} worker(s); change one of them."
        )
    return shared


def _precision(wish: str, device: str, used: list[dict], problems: list[str], reasons: dict[str, str]) -> str:
    without = [gpu["name"] for gpu in used if not gpu["bf16"]] if device == "cuda" else []
    if wish == "auto":
        bf16 = device == "cuda" and bool(used) and not without
        reasons["precision"] = "every GPU used has bf16" if bf16 else "exact and available everywhere"
        return "bf16" if bf16 else "fp32"
    if wish == "bf16" and without:
        problems.append(f"environment.precision=bf16, but {', '.join(without)} has no bf16; use fp32 or auto.")
    return wish


def _backend(wish: str, device: str, nccl: bool, problems: list[str], reasons: dict[str, str]) -> str:
    if wish == "auto":
        chosen = "nccl" if device == "cuda" and nccl else "gloo"
        reasons["distributed_backend"] = (
            "GPUs" if chosen == "nccl" else "CPU" if device == "cpu" else "torch has no NCCL"
        )
        return chosen
    if wish == "nccl" and not (device == "cuda" and nccl):
        problems.append(
            "environment.distributed_backend=nccl, but it needs GPUs and a torch built with NCCL; use auto or gloo."
        )
    return wish


def worker_environment(plan: dict, loopback: str | None) -> dict[str, str]:
    """Environment variables of the workers, before the user's own."""
    threads, several = str(plan["threads"]), plan["nproc_per_node"] > 1
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if plan["device"] == "cuda":
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if plan["device"] == "cuda" and several:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # keeps the order of communication and computation kernels
    if plan["distributed_backend"] == "gloo" and several and loopback:
        # All workers are on this machine; gloo would else look up the host's name, which may be slow, unknown or a VPN's.
        variables["GLOO_SOCKET_IFNAME"] = loopback
    return variables


def _unwise(plan: dict, facts: dict) -> list[dict[str, Any]]:
    found = []
    busy, cores = plan["nproc_per_node"] * plan["threads"], facts["cores"]
    if busy > cores:
        sentence = f"More threads than the {cores} usable core(s) wait for each other; use fewer workers or threads."
        value = f"{plan['nproc_per_node']} worker(s) x {plan['threads']} thread(s)"
        found.append(finding("threads", value, "warning", sentence))
    if plan["device"] == "cpu" and plan["precision"] == "bf16" and not facts["cpu"]["bf16"]:
        sentence = "This processor has no bf16 arithmetic and emulates it slowly; use environment.precision=fp32."
        found.append(finding("precision", "bf16", "warning", sentence))
    if plan["device"] == "cpu" and facts["gpus"]:
        sentence = f"{len(facts['gpus'])} GPU(s) stay unused; set environment.device=cuda to use them."
        found.append(finding("device", "cpu", "note", sentence))
    if plan["device"] == "cuda" and plan["nproc_per_node"] < len(facts["gpus"]):
        sentence = f"{len(facts['gpus']) - plan['nproc_per_node']} GPU(s) stay unused."
        found.append(finding("workers", plan["nproc_per_node"], "note", sentence))
    if plan["device"] == "cuda" and plan["distributed_backend"] == "gloo" and plan["nproc_per_node"] > 1:
        sentence = "Gradients go through the CPU; environment.distributed_backend=nccl is much faster."
        found.append(finding("distributed_backend", "gloo", "warning", sentence))
    return found


def _replaced(own: dict[str, str], users: dict[str, str]) -> list[dict[str, Any]]:
    return [
        finding(f"environment.env.{name}", users[name], "note", f"It replaces the plan's {value}.")
        for name, value in own.items()
        if users.get(name, value) != value
    ]
