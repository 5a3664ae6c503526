"""Facts and wishes become a plan: what the workers run on, why, and with which environment variables."""

from typing import Any

from configs.errors import ConfigError

GIB = 1024**3


def resolve(config: dict, facts: dict) -> dict[str, Any]:
    """The plan of a run. What the configuration sets explicitly is taken or refused, never replaced.

    Args:
        config: PipelineConfig as a dict.
        facts: of `probe`.

    Returns:
        {"device", "nproc_per_node", "precision", "attention_backend", "threads", "distributed_backend", "accumulation_steps",
        "env": variables of the workers, "reasons": a sentence a setting}.

    Raises:
        ConfigError: every wish that this machine cannot meet, a line each.
    """
    wishes, train = config["environment"], config["train"]
    problems: list[str] = []
    reasons: dict[str, str] = {}

    device = wishes["device"]
    if device == "cuda" and not facts["gpus"]:
        fault = facts.get("gpu_fault", "no GPU answers on this machine")
        problems.append(f"environment.device=cuda, but {fault}; use device=auto or cpu, or mend the driver.")
    if device == "auto":
        device = "cuda" if facts["gpus"] else "cpu"
        reasons["device"] = f"{len(facts['gpus'])} GPU(s) found" if facts["gpus"] else "no GPU found"
    on_gpu = device == "cuda" and bool(facts["gpus"])

    processes = wishes["nproc_per_node"]
    if processes == "auto":
        processes = len(facts["gpus"]) if on_gpu else 1
        reasons["nproc_per_node"] = "one worker a GPU" if on_gpu else "one worker with all the threads"
    if on_gpu and processes > len(facts["gpus"]):
        problems.append(f"environment.nproc_per_node={processes}, but there are {len(facts['gpus'])} GPU(s).")
    batch = train["micro_batch_size"] * processes
    if train["global_batch_size"] % batch:
        problems.append(
            f"train.global_batch_size={train['global_batch_size']} is not a multiple of train.micro_batch_size="
            f"{train['micro_batch_size']} x {processes} worker(s); change one of them."
        )

    precision = wishes["precision"]
    has_bf16 = on_gpu and all(gpu["bf16"] for gpu in facts["gpus"])
    if precision == "auto":
        precision = "bf16" if has_bf16 else "fp32"
        reasons["precision"] = "every GPU has bf16" if has_bf16 else "exact and available everywhere"
    elif precision == "bf16" and on_gpu and not has_bf16:
        problems.append("environment.precision=bf16, but not every GPU has it; use fp32 or auto.")

    backend = wishes["distributed_backend"]
    if backend == "nccl" and not (on_gpu and facts["nccl"]):
        problems.append(
            "environment.distributed_backend=nccl, but it needs GPUs and a torch built with NCCL; use auto or gloo."
        )
    if backend == "auto":
        backend = "nccl" if on_gpu and facts["nccl"] else "gloo"
        reasons["distributed_backend"] = "GPUs" if backend == "nccl" else "CPU"

    threads = wishes["threads"]
    if threads == "auto":
        threads = max(1, facts["cores"] // processes)
        reasons["threads"] = f"{facts['cores']} usable core(s) over {processes} worker(s)"

    attention = "sdpa" if wishes["attention_backend"] == "auto" else wishes["attention_backend"]
    reasons["attention_backend"] = "torch's scaled_dot_product_attention chooses the kernel"
    if problems:
        raise ConfigError(
            "this machine cannot run the configuration:\n" + "\n".join(f"  {problem}" for problem in problems)
        )
    return {
        "device": device,
        "nproc_per_node": processes,
        "precision": precision,
        "attention_backend": attention,
        "threads": threads,
        "distributed_backend": backend,
        "accumulation_steps": train["global_batch_size"] // batch,
        "env": worker_environment(threads, on_gpu) | wishes["env"],
        "reasons": reasons,
    }


def worker_environment(threads: int, on_gpu: bool) -> dict[str, str]:
    """Environment variables of the workers, before the user's own."""
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if on_gpu:
        variables |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return variables


def judge(facts: dict) -> list[dict[str, Any]]:
    """Findings for people: {"name", "value", "severity": ok | note | warning | error, "sentence"}."""
    findings = []

    def found(name: str, value: Any, severity: str = "ok", sentence: str = "") -> None:
        findings.append({"name": name, "value": value, "severity": severity, "sentence": sentence})

    found("python", facts["python"])
    found("cores", facts["cores"])
    available = facts["memory"]["available"]
    scarce = available < 2 * GIB
    found(
        "memory available",
        f"{available / GIB:.1f} GiB",
        "warning" if scarce else "ok",
        "Less than 2 GiB: small models only." if scarce else "",
    )
    names = ", ".join(gpu["name"] for gpu in facts["gpus"]) or "none"
    if fault := facts.get("gpu_fault"):
        found("GPUs", names, "error", f"A driver is there, but torch cannot use it: {fault}")
    else:
        found("GPUs", names, "ok" if facts["gpus"] else "note", "" if facts["gpus"] else "Training runs on the CPU.")
    if facts["gpus"]:
        error = facts.get("flash_attn_error", "")
        found(
            "flash-attn",
            facts["flash_attn"],
            "ok" if facts["flash_attn"] else "note",
            error and f"Not usable ({error}); torch's own attention is used.",
        )
    disk = facts["disk"]
    if not disk["works"]:
        found(
            "disk",
            disk["path"],
            "error",
            f"Writing, syncing or renaming fails there ({disk['fault']}); choose another runtime.home.",
        )
    else:
        low = disk["free"] is not None and disk["free"] < 2 * GIB
        free = f"{disk['free'] / GIB:.0f} GiB free at {disk['path']}"
        found("disk", free, "warning" if low else "ok", "Less than 2 GiB: checkpoints may not fit." if low else "")
    shared = facts["shared_memory"]
    tiny = shared is not None and shared < 64 * 1024**2 and bool(facts["gpus"])
    value = "not there" if shared is None else f"{shared / GIB:.2f} GiB"
    found(
        "/dev/shm",
        value,
        "warning" if tiny else "ok",
        "NCCL needs more; in a container use --shm-size=8g." if tiny else "",
    )
    ports = "" if facts["port"] else "No port of 127.0.0.1 can be had, and torchrun needs one."
    found("local ports", "free" if facts["port"] else "none", "ok" if facts["port"] else "error", ports)
    for name, installed in facts["versions"].items():
        found(name, installed)
    return findings
