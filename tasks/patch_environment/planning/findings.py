"""What the facts of a machine mean for training, its GPUs and its disk: one finding per fact, with the fix where something is wrong."""

from infini_llama.tasks.formatting import in_bytes
from infini_llama.tasks.records.machine import Cpu, Disk, Gpu, Limits, MachineFacts, Memory
from infini_llama.tasks.records.plan import Finding, Severity, finding

MIB, GIB = 1024**2, 1024**3
MOST_SKEW = 5.0  # seconds between two clocks that leases and logs tolerate
FEW_FILES = 1024
BUSY_SHARE = 0.2  # of the last second
LITTLE_FREE = 0.8  # of a GPU's memory; an idle driver and desktop take less than the rest


def assess(facts: MachineFacts) -> list[Finding]:
    """One finding per fact of `probe`."""
    return [
        finding("python", facts.python),
        _processor(facts.cpu),
        _cores(facts),
        _memory(facts.memory),
        *gpu_findings(facts),
        _disk(facts.disk),
        _file_system(facts.disk),
        _clock(facts.disk.skew),
        _shared_memory(facts),
        *_limits(facts.limits),
        _ports(facts.port),
        _compilers(facts),
        _allocators(facts),
        _other_runs(facts),
        *_hub(facts.hub),
        *(finding(name, installed) for name, installed in facts.versions.items()),
    ]


def _processor(cpu: Cpu) -> Finding:
    how = "AMX" if cpu.amx else "vector units"
    return finding("processor", f"{cpu.model}, bf16 by {how}" if cpu.bf16 else f"{cpu.model}, without bf16")


def _cores(facts: MachineFacts) -> Finding:
    cores, load = facts.cores, facts.load
    value = f"{cores} usable, load {load:.1f}"
    if load < cores + 1:
        return finding("cores", value)
    return finding(
        "cores",
        value,
        "note",
        "Other programs use these cores too, so threads of one worker wait for each other. More workers with one "
        "thread each are faster (environment.nproc_per_node, environment.threads).",
    )


def _memory(memory: Memory) -> Finding:
    value = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB"
    limited = memory.limit == "control group"
    value += " of this control group" if limited else ""
    if memory.available >= 2 * GIB:
        return finding("memory available", value)
    fix = "raise the container's limit or use fewer workers" if limited else "stop other programs or use fewer workers"
    return finding("memory available", value, "warning", f"Each worker needs about 1 GiB before the model; {fix}.")


def _disk(disk: Disk) -> Finding:
    if not disk.works:
        fix = f"Writing, syncing or renaming fails there ({disk.fault}); choose another runtime.home."
        return finding("disk", disk.path, "error", fix)
    free = disk.free
    value = f"{in_bytes(free)} free at {disk.path}" if free is not None else disk.path
    if free is not None and free < 2 * GIB:
        return finding(
            "disk", value, "warning", "Checkpoints may not fit; free disk space, or set runtime.home to a larger disk."
        )
    return finding("disk", value)


def _file_system(disk: Disk) -> Finding:
    if not disk.network:
        return finding("file system", disk.kind or "unknown")
    fix = (
        "File locks may not work across machines there: start each run from one machine only, or set runtime.home to "
        "a local disk, which is also faster for checkpoints."
    )
    return finding("file system", disk.kind, "warning", fix)


def _clock(skew: float) -> Finding:
    value = (
        f"{abs(skew):.1f} s {'behind' if skew > 0 else 'ahead of'} the disk's clock"
        if abs(skew) >= 0.05
        else "in sync with the disk"
    )
    if abs(skew) <= MOST_SKEW:
        return finding("clock", value)
    fix = "Times in logs and leases will differ; synchronize the clock of this machine or of the file server (NTP)."
    return finding("clock", value, "warning", fix)


def _shared_memory(facts: MachineFacts) -> Finding:
    shared = facts.shared_memory
    value = "not there" if shared is None else f"{in_bytes(shared)} free"
    if (shared or 0) < 512 * MIB and len(facts.gpus) > 1:
        fix = "NCCL between several GPUs may fail without it; start a container with --shm-size=8g."
        return finding("/dev/shm", value, "warning", fix)
    return finding("/dev/shm", value)


def _limits(limits: Limits) -> list[Finding]:
    found = []
    if (files := limits.files) is not None and files < FEW_FILES:
        fix = f"Datasets with many shards and several workers open more files; raise it with `ulimit -n {FEW_FILES * 16}`."
        found.append(finding("open files", files, "warning", fix))
    if (size := limits.file_size) is not None:
        fix = "Saving fails if a checkpoint file is larger; raise it with `ulimit -f unlimited`."
        found.append(finding("largest file", in_bytes(size), "warning" if size < 8 * GIB else "note", fix))
    if (processes := limits.processes) is not None and processes < 512:
        fix = "Every thread of every worker counts towards it; raise it with `ulimit -u 4096` or the container's pids limit."
        found.append(finding("processes and threads", processes, "warning", fix))
    return found


def _ports(free: bool) -> Finding:
    if free:
        return finding("local ports", "free")
    fix = "No port of 127.0.0.1 is available, and torchrun needs one; bring up the loopback interface."
    return finding("local ports", "none", "error", fix)


def _compilers(facts: MachineFacts) -> Finding:
    cxx, cc = facts.compilers.cxx, facts.compilers.cc
    if facts.gpus:
        if cc and "triton" in facts.versions:
            return finding("compiler", f"{cc}, triton {facts.versions['triton']}")
        missing = "triton" if cc else "a C compiler"
        return finding("compiler", "none", "note", f"train.compile needs {missing}; install it for faster steps.")
    if cxx:
        return finding("compiler", cxx)
    fix = (
        "train.compile needs one on a CPU; install it (for example apt install g++) for steps about 1.5 times as fast."
    )
    return finding("compiler", "none", "note", fix)


def _allocators(facts: MachineFacts) -> Finding:
    if facts.allocators:
        return finding("allocators", ", ".join(facts.allocators))
    if facts.gpus:
        return finding("allocators", "the system's")
    fix = "Training on a CPU is faster with tcmalloc or jemalloc (apt install libtcmalloc-minimal4); see docs/environment.md."
    return finding("allocators", "the system's", "note", fix)


def _other_runs(facts: MachineFacts) -> Finding:
    if not facts.others:
        return finding("other runs", "none")
    runs = sorted({other.run for other in facts.others})
    sentence = "They would share cores or GPUs with a new run; wait for them, or give each run its own GPUs."
    return finding("other runs", f"{', '.join(runs)} ({len(facts.others)} worker(s))", "note", sentence)


def _hub(reachable: bool | None) -> list[Finding]:
    if reachable is None:
        return []
    if reachable:
        return [finding("Hugging Face Hub", "reachable")]
    fix = (
        "Datasets and models cannot be downloaded by name; local files and folders work. Set HF_HUB_OFFLINE=1 to "
        "avoid waiting for it, or HTTPS_PROXY if you need a proxy."
    )
    return [finding("Hugging Face Hub", "not reachable", "note", fix)]


def is_busy(gpu: Gpu) -> bool:
    """Whether another program computes on this GPU or has much of its memory."""
    return bool(gpu.processes) or (gpu.busy or 0.0) > BUSY_SHARE or gpu.free < LITTLE_FREE * gpu.memory


def gpu_findings(facts: MachineFacts) -> list[Finding]:
    """Findings about GPUs; one if there is none."""
    found = [*_driver(facts)]
    if fault := facts.gpu_fault:
        fix = (
            f"A driver is there, but torch cannot use it ({fault}); update the driver or install a torch built for it."
        )
        return [*found, finding("GPUs", "unusable", "warning", fix)]
    if not facts.gpus:
        return [finding("GPUs", "none", "note", "Training runs on the CPU."), *_attention(facts.attention, tried=False)]
    for number, gpu in enumerate(facts.gpus):
        found.append(_gpu(number, gpu))
    if len(facts.gpus) > 1 and facts.driver:
        links = "NVLink" if facts.driver.nvlink else "PCI Express"
        slow = "" if facts.driver.nvlink else "Gradients pass between the GPUs more slowly than over NVLink."
        found.append(finding("between GPUs", links, "note" if slow else "ok", slow))
    if not facts.nccl:
        sentence = "This torch is built without NCCL, so several GPUs communicate through gloo, which is slow; install a CUDA build."
        found.append(finding("nccl", "missing", "warning", sentence))
    return [*found, *_attention(facts.attention, tried=all(gpu.bf16 for gpu in facts.gpus[:1]))]


def _gpu(number: int, gpu: Gpu) -> Finding:
    name = f"GPU {number}"
    kinds = [kind for kind in ("bf16",) if getattr(gpu, kind)]
    value = f"{gpu.name}, {gpu.free / GIB:.0f} of {gpu.memory / GIB:.0f} GiB free, {' and '.join(kinds) or 'no bf16'}"
    value += ", a MIG slice" if gpu.mig else ""
    if gpu.processes:
        pids = ", ".join(str(process.pid) for process in gpu.processes)
        sentence = (
            f"Process(es) {pids} compute on it; environment.gpus=auto leaves it to them while other GPUs are free."
        )
        return finding(name, value, "warning", sentence)
    if is_busy(gpu):
        sentence = "Another program uses it; environment.gpus=auto leaves it to them while other GPUs are free."
        return finding(name, value, "warning", sentence)
    if gpu.mig:
        return finding(
            name, value, "note", "NCCL does not work between MIG slices of one card: use one worker per card."
        )
    return finding(name, value)


def _driver(facts: MachineFacts) -> list[Finding]:
    driver, built = facts.driver, facts.torch_cuda
    if driver is None:
        return []
    value = f"{driver.version}, CUDA up to {driver.cuda}"
    if built is None:
        fix = "This torch is built without CUDA, so the GPUs stay unused; install a CUDA build of torch."
        return [finding("driver", value, "warning", fix)]
    # Within a major version of CUDA any driver runs what is built for any minor one.
    if driver.cuda and int(driver.cuda.split(".")[0]) < int(built.split(".")[0]):
        fix = f"It is too old for this torch, which is built for CUDA {built}; update the driver, "
        fix += f"or install a torch for CUDA {driver.cuda}."
        return [finding("driver", value, "error" if not facts.gpus else "warning", fix)]
    return [finding("driver", value)]


def _attention(errors: dict[str, str], tried: bool) -> list[Finding]:
    found = []
    for backend, error in errors.items():
        missing = error.startswith("No module named")
        why = "flash-attn is not installed" if missing else error
        sentence = f"Not usable ({why}); attention_backend={backend} is refused and torch's own attention is used."
        severity: Severity = "ok" if not error else "note" if missing else "warning"
        value = "no" if error else "agrees with torch's own" if tried else "can be imported"
        found.append(finding(f"attention by {backend}", value, severity, sentence if error else ""))
    return found
