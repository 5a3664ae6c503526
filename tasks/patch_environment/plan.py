"""Facts and wishes become a plan: what the workers run on, why, and with which environment variables."""

from typing import Any

from infini_llama.configs.ranks import groups_of
from infini_llama.tasks.patch_environment import estimate, speed
from infini_llama.tasks.patch_environment.devices import choose_devices, refuse
from infini_llama.tasks.patch_environment.disk_space import room_for_checkpoints
from infini_llama.tasks.patch_environment.finding import finding
from infini_llama.tasks.patch_environment.findings_gpu import is_busy
from infini_llama.tasks.patch_environment.patches.registry import needed
from infini_llama.tasks.patch_environment.worker_env import replaced, worker_environment

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
        {"device", "gpus": numbers, "nproc_per_node", "nnodes", "rendezvous", "master_addr", "precision", "attention_backend",
        "allocator", "compile", "loss_chunk", "threads", "distributed_backend", "port", "micro_batch_size", "accumulation_steps",
        "env": variables of the workers, "reasons": a sentence a setting, "findings": what is allowed but unwise, "patches": names of
        what workers mend in their own process}.

    Raises:
        ConfigError: every wish that this machine cannot meet, a line each.
    """
    wishes, train = config["environment"], config["train"]
    problems: list[str] = []
    reasons: dict[str, str] = {}

    micro = train["micro_batch_size"]
    devices = choose_devices(config, facts, 1 if micro == "auto" else micro, problems, reasons)
    precision = speed.precision(wishes, devices, facts, problems, reasons)
    if micro == "auto":
        micro = estimate.micro_batch(config, facts, precision, devices.kind, devices.gpus, devices.processes)
        reasons["micro_batch_size"] = "the most that the estimate fits into the memory and that still helps"
    threads = wishes["threads"]
    if threads == "auto":
        threads = max(1, facts["cores"] // devices.processes)
        reasons["threads"] = f"{facts['cores']} usable core(s) over {devices.processes} worker(s)"
    tokens = micro * config["data"]["sequence_length"] // train["context_parallel"]
    vocab_size = config["data"]["tokenizer"]["vocab_size"]
    reasons["attention_backend"] = "torch's scaled_dot_product_attention chooses the kernel"
    plan = {
        "device": devices.kind,
        "gpus": devices.gpus,
        "nproc_per_node": devices.processes,
        **{name: wishes[name] for name in ("nnodes", "rendezvous", "master_addr")},
        "precision": precision,
        "attention_backend": speed.attention(config, devices, precision, facts, problems),
        "allocator": speed.allocator(wishes, devices.kind, facts, problems, reasons),
        "compile": speed.compilation(train, devices.kind, facts, problems),
        "loss_chunk": speed.loss_chunk(train["loss_chunk"], devices.kind, tokens, vocab_size, reasons),
        "threads": threads,
        "distributed_backend": speed.backend(
            wishes["distributed_backend"], devices.kind, facts["nccl"], problems, reasons
        ),
        "port": speed.port(facts["port_wished"], problems),
        "micro_batch_size": micro,
        "accumulation_steps": train["global_batch_size"]
        // (micro * groups_of(train, devices.processes * wishes["nnodes"])),
    }
    problems += [
        f"environment.env.{name}={value}, but torchrun sets {name} for each worker; remove it."
        for name, value in wishes["env"].items()
        if name in OF_TORCHRUN
    ]
    refuse(problems)
    own = worker_environment(config, plan, facts)
    findings = [*_unwise(config, plan, facts), *replaced(own, wishes["env"])]
    patches = [patch.name for patch in needed(config, facts)]
    return plan | {"env": own | wishes["env"], "reasons": reasons, "findings": findings, "patches": patches}


def _unwise(config: dict, plan: dict, facts: dict) -> list[dict[str, Any]]:
    found = []
    busy, cores = plan["nproc_per_node"] * plan["threads"], facts["cores"]
    if busy > cores:
        sentence = f"More threads than the {cores} usable core(s) wait for each other; use fewer workers or threads."
        value = f"{plan['nproc_per_node']} worker(s) x {plan['threads']} thread(s)"
        found.append(finding("threads", value, "warning", sentence))
    if plan["device"] == "cpu" and plan["precision"] == "bf16" and not facts["cpu"]["bf16"]:
        sentence = "This processor has no bf16 arithmetic and emulates it slowly; use environment.precision=fp32."
        found.append(finding("precision", "bf16", "warning", sentence))
    if plan["device"] == "cuda":
        found += _unwise_gpus(plan, facts)
    elif facts["gpus"]:
        sentence = f"{len(facts['gpus'])} GPU(s) stay unused; set environment.device=cuda to use them."
        found.append(finding("device", "cpu", "note", sentence))
    place = plan["precision"], plan["device"], plan["nproc_per_node"], plan["nnodes"]
    need = estimate.bytes_needed(config, plan["micro_batch_size"], *place)
    have = estimate.memory_of_each(facts, plan["gpus"], plan["nproc_per_node"])
    if not estimate.fits(need, have):
        sentence = (
            "A worker will probably run out of memory; set train.micro_batch_size=auto or a smaller one, "
            "train.activation_checkpointing=full, or use fewer workers."
        )
        found.append(finding("memory", estimate.describe(need, have), "warning", sentence))
    if lack := room_for_checkpoints(config, facts["disk"]):
        found.append(lack)
    return found


def _unwise_gpus(plan: dict, facts: dict) -> list[dict[str, Any]]:
    found, unused = [], len(facts["gpus"]) - plan["nproc_per_node"]
    if unused > 0:
        found.append(finding("workers", plan["nproc_per_node"], "note", f"{unused} GPU(s) stay unused."))
    if busy := [number for number in plan["gpus"] if is_busy(facts["gpus"][number])]:
        names = ", ".join(map(str, busy))
        sentence = "Somebody else uses it too, so memory and time may not suffice; choose others by environment.gpus."
        found.append(finding(f"GPU {names} in the plan", "in use", "warning", sentence))
    if plan["distributed_backend"] == "gloo" and plan["nproc_per_node"] * plan["nnodes"] > 1:
        sentence = "Gradients go through the CPU; environment.distributed_backend=nccl is much faster."
        found.append(finding("distributed_backend", "gloo", "warning", sentence))
    if (
        plan["distributed_backend"] == "nccl"
        and len([number for number in plan["gpus"] if facts["gpus"][number].get("mig")]) > 1
    ):
        sentence = "NCCL does not work between MIG slices of one card; use environment.nproc_per_node=1."
        found.append(finding("MIG", plan["nproc_per_node"], "warning", sentence))
    return found
