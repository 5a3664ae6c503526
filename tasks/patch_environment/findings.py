"""What the facts of a machine mean for training, in sentences for people: a finding a fact, with the cure where it matters."""

from typing import Any

from infini_llama.tasks.patch_environment.finding import GIB, finding
from infini_llama.tasks.patch_environment.findings_gpu import gpu_findings

MIB = 1024**2
SKEW = 5.0  # seconds between two clocks that leases and logs bear
FEW_FILES = 1024


def judge(facts: dict) -> list[dict[str, Any]]:
    """A finding for each fact of `probe`."""
    return [
        finding("python", facts["python"]),
        _processor(facts["cpu"]),
        _cores(facts),
        _memory(facts["memory"]),
        *gpu_findings(facts),
        _disk(facts["disk"]),
        _file_system(facts["disk"]),
        _clock(facts["disk"]["skew"]),
        _shared_memory(facts),
        *_limits(facts["limits"]),
        _ports(facts["port"]),
        _compilers(facts),
        _allocators(facts),
        _others(facts),
        *_hub(facts["hub"]),
        *(finding(name, installed) for name, installed in facts["versions"].items()),
    ]


def _processor(cpu: dict) -> dict[str, Any]:
    how = "AMX" if cpu["amx"] else "vector units" if cpu["bf16"] else "emulated"
    return finding("processor", f"{cpu['model']}, bf16 by {how}" if cpu["bf16"] else f"{cpu['model']}, without bf16")


def _cores(facts: dict) -> dict[str, Any]:
    cores, load = facts["cores"], facts["load"]
    value = f"{cores} usable, load {load:.1f}"
    if load < cores + 1:
        return finding("cores", value)
    return finding(
        "cores",
        value,
        "note",
        "Other programs want these cores too: threads of one worker then wait for each other. More workers of one thread each "
        "bear that better (environment.nproc_per_node, environment.threads); environment.tune=quick chooses them.",
    )


def _memory(memory: dict) -> dict[str, Any]:
    value = f"{memory['available'] / GIB:.1f} of {memory['total'] / GIB:.1f} GiB"
    limited = memory["limit"] == "control group"
    value += " of this control group" if limited else ""
    if memory["available"] >= 2 * GIB:
        return finding("memory available", value)
    cure = "raise the container's limit or use fewer workers" if limited else "stop other programs or use fewer workers"
    return finding("memory available", value, "warning", f"Each worker needs about 1 GiB before the model; {cure}.")


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


def _file_system(disk: dict) -> dict[str, Any]:
    if not disk["network"]:
        return finding("file system", disk["kind"] or "unknown")
    cure = (
        "Locks may not reach other machines there: start each run from one machine only, or set runtime.home to a local disk, "
        "where checkpoints are also written faster."
    )
    return finding("file system", disk["kind"], "warning", cure)


def _clock(skew: float) -> dict[str, Any]:
    if abs(skew) <= SKEW:
        return finding("clock", f"{skew:+.1f} s from the disk's")
    cure = "Times in logs and leases will not agree; set the clock of this machine or of the file server (NTP)."
    return finding("clock", f"{skew:+.1f} s from the disk's", "warning", cure)


def _shared_memory(facts: dict) -> dict[str, Any]:
    shared = facts["shared_memory"]
    value = "not there" if shared is None else f"{shared / GIB:.2f} GiB free"
    if (shared or 0) < 512 * MIB and len(facts["gpus"]) > 1:
        cure = "NCCL between several GPUs may fail for want of it; in a container start with --shm-size=8g."
        return finding("/dev/shm", value, "warning", cure)
    return finding("/dev/shm", value)


def _limits(limits: dict) -> list[dict[str, Any]]:
    found = []
    if (files := limits.get("files")) is not None and files < FEW_FILES:
        cure = f"Datasets of many shards and several workers open more; raise it with `ulimit -n {FEW_FILES * 16}`."
        found.append(finding("open files", files, "warning", cure))
    if (size := limits.get("file_size")) is not None:
        cure = "A checkpoint's files may be larger, and saving then fails; raise it with `ulimit -f unlimited`."
        found.append(finding("largest file", f"{size / GIB:.1f} GiB", "warning" if size < 8 * GIB else "note", cure))
    if (processes := limits.get("processes")) is not None and processes < 512:
        cure = "Every thread of every worker counts; raise it with `ulimit -u 4096` or the container's pids limit."
        found.append(finding("processes and threads", processes, "warning", cure))
    return found


def _ports(free: bool) -> dict[str, Any]:
    if free:
        return finding("local ports", "free")
    cure = "No port of 127.0.0.1 can be had, and torchrun needs one; bring up the loopback interface."
    return finding("local ports", "none", "error", cure)


def _compilers(facts: dict) -> dict[str, Any]:
    cxx, cc = facts["compilers"]["cxx"], facts["compilers"]["cc"]
    if facts["gpus"]:
        if cc and "triton" in facts["versions"]:
            return finding("compiler", f"{cc}, triton {facts['versions']['triton']}")
        missing = "triton" if cc else "a C compiler"
        return finding("compiler", "none", "note", f"train.compile needs {missing}; install it for faster steps.")
    if cxx:
        return finding("compiler", cxx)
    cure = (
        "train.compile needs one on a CPU; install it (for example apt install g++) for steps about 1.5 times as fast."
    )
    return finding("compiler", "none", "note", cure)


def _allocators(facts: dict) -> dict[str, Any]:
    if facts["allocators"]:
        return finding("allocators", ", ".join(facts["allocators"]))
    if facts["gpus"]:
        return finding("allocators", "the system's")
    cure = "Training on a CPU is faster with tcmalloc or jemalloc (apt install libtcmalloc-minimal4); see docs/environment.md."
    return finding("allocators", "the system's", "note", cure)


def _others(facts: dict) -> dict[str, Any]:
    if not facts["others"]:
        return finding("other runs", "none")
    runs = sorted({other["run"] for other in facts["others"]})
    sentence = (
        "They share this machine's cores or GPUs with a run that starts now; wait for them, or give each its own GPUs."
    )
    return finding("other runs", f"{', '.join(runs)} ({len(facts['others'])} worker(s))", "note", sentence)


def _hub(answers: bool | None) -> list[dict[str, Any]]:
    if answers is None:
        return []
    if answers:
        return [finding("Hugging Face hub", "answers")]
    cure = (
        "Datasets and models cannot be fetched by name (files and folders of this machine can); set HF_HUB_OFFLINE=1 to spare "
        "waiting for it, or HTTPS_PROXY where one is needed."
    )
    return [finding("Hugging Face hub", "no answer", "note", cure)]
