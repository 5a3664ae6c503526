"""Findings about GPUs, their driver and the functions that need them."""

from infini_llama.tasks.records.machine import Gpu, MachineFacts
from infini_llama.tasks.records.plan import Finding, Severity, finding

GIB = 1024**3

BUSY_SHARE = 0.2  # of the last second
LITTLE_FREE = 0.8  # of a GPU's memory; an idle driver and desktop take less than the rest


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
    packages = {"flash2": "flash-attn", "varlen": "torch's attention for packed rows"}
    found = []
    for backend, error in errors.items():
        missing = error.startswith("No module named")
        why = f"{packages[backend]} is not installed" if missing else error
        sentence = f"Not usable ({why}); attention_backend={backend} is refused and torch's own attention is used."
        severity: Severity = "ok" if not error else "note" if missing else "warning"
        value = "no" if error else "agrees with torch's own" if tried else "can be imported"
        found.append(finding(f"attention by {backend}", value, severity, sentence if error else ""))
    return found
