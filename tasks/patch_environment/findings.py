"""What the facts of a machine mean for training, in sentences for people."""

from typing import Any

GIB = 1024**3


def finding(name: str, value: Any, severity: str = "ok", sentence: str = "") -> dict[str, Any]:
    """{"name", "value", "severity": ok | note | warning | error, "sentence" with the cure}."""
    return {"name": name, "value": value, "severity": severity, "sentence": sentence}


def judge(facts: dict) -> list[dict[str, Any]]:
    """A finding for each fact of `probe`."""
    return [
        finding("python", facts["python"]),
        finding("processor", facts["cpu"]["model"]),
        finding("cores", facts["cores"]),
        _memory(facts["memory"]),
        *_gpus(facts),
        _disk(facts["disk"]),
        _shared_memory(facts),
        _ports(facts["port"]),
        *(finding(name, installed) for name, installed in facts["versions"].items()),
    ]


def _memory(memory: dict) -> dict[str, Any]:
    value = f"{memory['available'] / GIB:.1f} of {memory['total'] / GIB:.1f} GiB"
    if memory["available"] >= 2 * GIB:
        return finding("memory available", value)
    return finding(
        "memory available",
        value,
        "warning",
        "Each worker needs about 1 GiB before the model; stop other programs, raise the container's limit or use fewer workers.",
    )


def _gpus(facts: dict) -> list[dict[str, Any]]:
    if fault := facts.get("gpu_fault"):
        cure = (
            f"A driver is there, but torch cannot use it ({fault}); update the driver or install a torch built for it."
        )
        return [finding("GPUs", "unusable", "warning", cure)]
    if not facts["gpus"]:
        return [finding("GPUs", "none", "note", "Training runs on the CPU.")]
    names = ", ".join(f"{gpu['name']} ({gpu['free'] / GIB:.0f} GiB free)" for gpu in facts["gpus"])
    found = [finding("GPUs", names)]
    if not facts["nccl"]:
        sentence = (
            "This torch is built without NCCL, so several GPUs talk through gloo, which is slow; install a CUDA build."
        )
        found.append(finding("nccl", "missing", "warning", sentence))
    if facts["flash_attn"]:
        return [*found, finding("flash-attn", "works")]
    error = facts.get("flash_attn_error", "it is not installed")
    return [*found, finding("flash-attn", "no", "note", f"Not usable ({error}); torch's own attention is used.")]


def _disk(disk: dict) -> dict[str, Any]:
    if not disk["works"]:
        cure = f"Writing, syncing or renaming fails there ({disk['fault']}); choose another runtime.home."
        return finding("disk", disk["path"], "error", cure)
    free = disk["free"]
    value = f"{free / GIB:.1f} GiB free at {disk['path']}" if free is not None else disk["path"]
    if free is not None and free < 2 * GIB:
        return finding(
            "disk", value, "warning", "Checkpoints may not fit; free space or set runtime.home to a larger disk."
        )
    return finding("disk", value)


def _shared_memory(facts: dict) -> dict[str, Any]:
    shared = facts["shared_memory"]
    value = "not there" if shared is None else f"{shared / GIB:.2f} GiB free"
    if (shared or 0) < 512 * 1024**2 and len(facts["gpus"]) > 1:
        cure = "NCCL between several GPUs may fail for want of it; in a container start with --shm-size=8g."
        return finding("/dev/shm", value, "warning", cure)
    return finding("/dev/shm", value)


def _ports(free: bool) -> dict[str, Any]:
    if free:
        return finding("local ports", "free")
    cure = "No port of 127.0.0.1 can be had, and torchrun needs one; bring up the loopback interface."
    return finding("local ports", "none", "error", cure)
