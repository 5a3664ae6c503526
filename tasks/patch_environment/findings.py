"""Findings about a machine: one finding per fact, with the fix where something is wrong."""

from dataclasses import dataclass

from infini_llama.tasks.formatting import in_bytes
from infini_llama.tasks.records.machine import (
    Cpu,
    Disk,
    Folder,
    Gpu,
    MachineFacts,
    Memory,
)
from infini_llama.tasks.records.plan import Finding, Severity, finding

MIB = 1024**2
GIB = 1024**3
LEAST_SHARED = MIB // 4  # bytes, for the semaphores of a few processes
# Files open at the same time; torchrun and a worker together need more than 30.
FEWEST_FILES = 64
# Bytes of addresses: torch and gloo's threads take so many on a CPU.
FEWEST_ADDRESSES = 1_400_000_000


@dataclass(frozen=True)
class LibraryFolder:
    """A folder that libraries write to, with the severity and the fix where it cannot be used."""

    name: str
    severity: Severity
    fix: str


# By the variable that names the folder.
FOLDERS = {
    "HOME": LibraryFolder(
        name="home folder",
        severity="note",
        fix="downloads from the Hugging Face Hub go there; to have some, set HF_HOME",
    ),
    "PREFECT_HOME": LibraryFolder(
        name="Prefect's folder",
        severity="warning",
        fix="Prefect needs it; use --no-prefect, or set PREFECT_HOME",
    ),
    "TMPDIR": LibraryFolder(
        name="temporary folder",
        severity="error",
        fix="locks of GPUs and unpacked text are kept there; set TMPDIR",
    ),
}


def assess(facts: MachineFacts) -> list[Finding]:
    """One finding per fact of `probe`."""
    return [
        finding("python", facts.python),
        _processor(facts.cpu),
        _cores(facts),
        _memory(facts.memory),
        *limits(facts.open_files, facts.address_space),
        *_gpus(facts),
        *_flash_attention(facts),
        _disk(facts.disk),
        _file_system(facts.disk),
        *map(_folder, facts.folders),
        _shared_memory(facts),
        _loopback(facts.loopback_fault),
        _compiler(facts),
        *(finding(name, version) for name, version in facts.versions.items()),
    ]


def _processor(cpu: Cpu) -> Finding:
    units = "AMX" if cpu.amx else "vector units"
    value = (
        f"{cpu.model}, bf16 by {units}" if cpu.bf16 else f"{cpu.model}, without bf16"
    )
    return finding("processor", value)


def _cores(facts: MachineFacts) -> Finding:
    cores = facts.cores
    load = facts.load
    value = f"{cores} usable, load {load:.1f}"
    if load < cores + 1:
        return finding("cores", value)
    sentence = (
        "Other programs use these cores too, so threads of one worker wait for each other. "
        "More workers with one thread each are faster "
        "(environment.nproc_per_node, environment.threads)."
    )
    return finding("cores", value, "note", sentence)


def _memory(memory: Memory) -> Finding:
    limited = memory.limit == "control group"
    value = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB"
    value += " of this control group" if limited else ""
    if memory.available >= 2 * GIB:
        return finding("memory available", value)
    fix = (
        "raise the container's limit or use fewer workers"
        if limited
        else "stop other programs or use fewer workers"
    )
    sentence = f"Each worker needs about 1 GiB before the model; {fix}."
    return finding("memory available", value, "warning", sentence)


def limits(open_files: int | None, address_space: int | None) -> list[Finding]:
    """Limits of a process that are too tight for training, or may be; see `MachineFacts`."""
    findings: list[Finding] = []
    if open_files is not None and open_files < FEWEST_FILES:
        fix = "Too few for torchrun; raise the limit with `ulimit -n 1024`."
        findings.append(
            finding("open files", f"{open_files} per process", "error", fix)
        )
    if address_space is not None:
        few = address_space < FEWEST_ADDRESSES
        mapped = (
            "Addresses are taken for all that is mapped: datasets, checkpoints, GPUs"
        )
        fix = (
            f"{'Too few addresses for torch' if few else mapped}; "
            "raise the limit with `ulimit -v unlimited`."
        )
        severity: Severity = "error" if few else "note"
        value = f"{in_bytes(address_space)} per process"
        findings.append(finding("address space", value, severity, fix))
    return findings


def _gpus(facts: MachineFacts) -> list[Finding]:
    """One finding per GPU; one if there is none that can be used."""
    fault = facts.gpu_fault
    if fault:
        fix = (
            f"A driver is there, but torch cannot use it ({fault}); "
            "update the driver or install a torch built for it."
        )
        return [finding("GPUs", "unusable", "warning", fix)]
    if not facts.gpus:
        return [finding("GPUs", "none", "note", "Training runs on the CPU.")]
    findings = [_gpu(number, gpu) for number, gpu in enumerate(facts.gpus)]
    if not facts.nccl:
        sentence = (
            "This torch is built without NCCL, so several GPUs communicate through gloo, "
            "which is slow; install a CUDA build."
        )
        findings.append(finding("nccl", "missing", "warning", sentence))
    return findings


def _gpu(number: int, gpu: Gpu) -> Finding:
    free = f"{gpu.free / GIB:.0f} of {gpu.memory / GIB:.0f} GiB free"
    value = f"{gpu.name}, {free}, {'bf16' if gpu.bf16 else 'no bf16'}"
    value += f", driver {gpu.driver}" if gpu.driver else ""
    if not gpu.is_busy:
        return finding(f"GPU {number}", value)
    users = (
        f"Process(es) {', '.join(map(str, gpu.processes))}"
        if gpu.processes
        else "Other programs"
    )
    sentence = (
        f"{users} compute on it; "
        "environment.gpus=auto leaves it to them while other GPUs are free."
    )
    return finding(f"GPU {number}", value, "warning", sentence)


def _flash_attention(facts: MachineFacts) -> list[Finding]:
    fault = facts.flash_attention
    if fault is None:
        return []
    if not fault:
        tried = bool(facts.gpus) and facts.gpus[0].bf16
        value = "agrees with torch's own" if tried else "can be imported"
        return [finding("flash attention", value)]
    missing = fault.startswith("No module named")
    why = "flash-attn is not installed" if missing else fault
    severity: Severity = "note" if missing else "warning"
    sentence = (
        f"Not usable ({why}); "
        "attention_backend=flash2 is refused and torch's own attention is used."
    )
    return [finding("flash attention", "no", severity, sentence)]


def _disk(disk: Disk) -> Finding:
    if disk.fault:
        fix = (
            f"There, {disk.fault}; set runtime.home to a folder that you may write, "
            "on a filesystem with locks and memory maps."
        )
        return finding("disk", disk.path, "error", fix)
    if disk.free is None:
        return finding("disk", disk.path)
    value = f"{in_bytes(disk.free)} free at {disk.path}"
    if disk.free >= 2 * GIB:
        return finding("disk", value)
    fix = "Checkpoints may not fit; free disk space, or set runtime.home to a larger disk."
    return finding("disk", value, "warning", fix)


def _file_system(disk: Disk) -> Finding:
    if not disk.has_links and not disk.fault:
        sentence = (
            "It has no symbolic links, so there are no folders `latest` and `best`; "
            "commands find both checkpoints themselves."
        )
        return finding("file system", disk.kind or "unknown", "note", sentence)
    if not disk.network:
        return finding("file system", disk.kind or "unknown")
    fix = (
        "File locks may not work across machines there: start each run from one machine only, "
        "or set runtime.home to a local disk, which is also faster for checkpoints."
    )
    return finding("file system", disk.kind, "warning", fix)


def _shared_memory(facts: MachineFacts) -> Finding:
    shared = facts.shared_memory
    value = "absent" if shared is None else f"{in_bytes(shared)} free"
    if (shared or 0) < 512 * MIB and len(facts.gpus) > 1:
        fix = "NCCL between several GPUs may fail without it; start a container with --shm-size=8g."
        return finding("/dev/shm", value, "warning", fix)
    absent = shared is None and facts.platform.startswith("Linux")
    too_small = shared is not None and shared < LEAST_SHARED
    if absent or facts.shared_memory_fault or too_small:
        why = (
            f"There, {facts.shared_memory_fault}. " if facts.shared_memory_fault else ""
        )
        fix = (
            "Several processes that prepare text need it: "
            "start a container with --shm-size=1g, or set data.num_workers=1."
        )
        return finding("/dev/shm", value, "note", why + fix)
    return finding("/dev/shm", value)


def _folder(folder: Folder) -> Finding:
    library = FOLDERS[folder.setting]
    if not folder.fault:
        return finding(library.name, folder.path)
    fix = library.fix
    sentence = f"{folder.fault[0].upper()}{folder.fault[1:]}; {fix} to a folder that you may write."
    return finding(library.name, folder.path, library.severity, sentence)


def _loopback(fault: str) -> Finding:
    if not fault:
        return finding("loopback", "127.0.0.1")
    fix = (
        f"This machine does not reach itself there ({fault}), which training needs; "
        "bring its interface up (ip link set lo up)."
    )
    return finding("loopback", "127.0.0.1", "warning", fix)


def _compiler(facts: MachineFacts) -> Finding:
    cxx = facts.compilers.cxx
    cc = facts.compilers.cc
    triton = facts.versions.get("triton")
    if facts.gpus:
        if cc and triton:
            return finding("compiler", f"{cc}, triton {triton}")
        missing = "triton" if cc else "a C compiler"
        sentence = f"train.compile needs {missing}; install it for faster steps."
        return finding("compiler", "none", "note", sentence)
    if cxx:
        return finding("compiler", cxx)
    sentence = (
        "train.compile needs one on a CPU; install it (for example apt install g++)."
    )
    return finding("compiler", "none", "note", sentence)
