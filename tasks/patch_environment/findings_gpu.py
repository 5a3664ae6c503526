"""What the facts about GPUs, their driver and the functions that need them mean."""

from typing import Any

from infini_llama.tasks.patch_environment.finding import GIB, finding

BUSY_SHARE = 0.2  # of the last second
LITTLE_FREE = 0.8  # of a GPU's memory; an idle driver and desktop take less than the rest


def is_busy(gpu: dict) -> bool:
    """Whether somebody else computes on this GPU or holds much of its memory."""
    return (
        bool(gpu.get("processes")) or (gpu.get("busy") or 0.0) > BUSY_SHARE or gpu["free"] < LITTLE_FREE * gpu["memory"]
    )


def gpu_findings(facts: dict) -> list[dict[str, Any]]:
    """Findings about GPUs; on a machine without, one."""
    found = [*_driver(facts)]
    if fault := facts.get("gpu_fault"):
        cure = (
            f"A driver is there, but torch cannot use it ({fault}); update the driver or install a torch built for it."
        )
        return [*found, finding("GPUs", "unusable", "warning", cure)]
    if not facts["gpus"]:
        return [finding("GPUs", "none", "note", "Training runs on the CPU.")]
    for number, gpu in enumerate(facts["gpus"]):
        found.append(_gpu(number, gpu))
    if len(facts["gpus"]) > 1 and facts["driver"]:
        links = "NVLink" if facts["driver"]["nvlink"] else "PCI Express"
        slow = "" if facts["driver"]["nvlink"] else "Gradients pass between the GPUs more slowly than over NVLink."
        found.append(finding("between GPUs", links, "note" if slow else "ok", slow))
    if not facts["nccl"]:
        sentence = (
            "This torch is built without NCCL, so several GPUs talk through gloo, which is slow; install a CUDA build."
        )
        found.append(finding("nccl", "missing", "warning", sentence))
    return [*found, *_attention(facts["attention"])]


def _gpu(number: int, gpu: dict) -> dict[str, Any]:
    name = f"GPU {number}"
    kinds = [kind for kind in ("bf16", "fp8") if gpu.get(kind)]
    value = f"{gpu['name']}, {gpu['free'] / GIB:.0f} of {gpu['memory'] / GIB:.0f} GiB free, {' and '.join(kinds) or 'no bf16'}"
    value += ", a MIG slice" if gpu.get("mig") else ""
    if gpu.get("processes"):
        pids = ", ".join(str(process["pid"]) for process in gpu["processes"])
        sentence = (
            f"Process(es) {pids} compute on it; environment.gpus=auto leaves it to them while other GPUs are free."
        )
        return finding(name, value, "warning", sentence)
    if is_busy(gpu):
        sentence = "Somebody uses it; environment.gpus=auto leaves it to them while other GPUs are free."
        return finding(name, value, "warning", sentence)
    if gpu.get("mig"):
        return finding(name, value, "note", "NCCL does not work between MIG slices of one card: use one worker a card.")
    return finding(name, value)


def _driver(facts: dict) -> list[dict[str, Any]]:
    driver, built = facts["driver"], facts["torch_cuda"]
    if driver is None:
        return []
    value = f"{driver['version']}, CUDA up to {driver['cuda']}"
    if built is None:
        cure = "This torch is built without CUDA, so the GPUs stay unused; install a CUDA build of torch."
        return [finding("driver", value, "warning", cure)]
    # Within a major version of CUDA any driver runs what is built for any minor one.
    if driver["cuda"] and int(driver["cuda"].split(".")[0]) < int(built.split(".")[0]):
        cure = f"It is too old for this torch, which is built for CUDA {built}; update the driver, "
        cure += f"or install a torch for CUDA {driver['cuda']}."
        return [finding("driver", value, "error" if not facts["gpus"] else "warning", cure)]
    return [finding("driver", value)]


def _attention(errors: dict[str, str]) -> list[dict[str, Any]]:
    packages = {"flash2": "flash-attn", "flash4": "flash-attn-4", "varlen": "torch's attention for packed rows"}
    found = []
    for backend, error in errors.items():
        missing = error.startswith("No module named")
        why = f"{packages[backend]} is not installed" if missing else error
        sentence = f"Not usable ({why}); attention_backend={backend} is refused and torch's own attention is used."
        severity = "ok" if not error else "note" if missing else "warning"
        value = "no" if error else "can be imported"
        found.append(finding(f"attention by {backend}", value, severity, sentence if error else ""))
    return found
