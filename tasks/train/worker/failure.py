"""What a rank knows when it fails: where it was, on which samples, and with how much memory."""

import traceback
from pathlib import Path
from typing import Any

import torch

from infini_llama.tasks.runs.heartbeat import Heartbeat

ON_SAMPLES = ("data", "compute")  # phases in which the samples of the step may be the cause


def describe(error: BaseException, heart: Heartbeat) -> dict[str, Any]:
    """The structured error of a status file.

    Returns:
        {"type", "message", "traceback", "phase", "sample_rows": row numbers of the global batch, None outside of a step, "memory":
        bytes by name} and the error's own `details`.
    """
    rows = heart.sample_rows() if heart.sample_rows is not None and heart.phase in ON_SAMPLES else None
    return getattr(error, "details", {}) | {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "phase": heart.phase,
        "sample_rows": rows,
        "memory": memory(),
    }


def memory_peak() -> int:
    """Most bytes that this process has held: on a GPU torch's there, else what was resident."""
    found = memory()
    return found.get("gpu_most_allocated", found.get("most_resident", 0))


def dump_gpu_memory(path: Path) -> None:
    """What torch holds on the GPU, block by block, for pytorch.org/memory_viz; nothing where there is no GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.memory._dump_snapshot(str(path))


def memory() -> dict[str, int]:
    """Bytes of this process: resident and at most so (Linux); on a GPU also what torch holds there, at most held, and what is free."""
    found = {}
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found["resident" if name == "VmRSS" else "most_resident"] = int(value.split()[0]) * 1024
    except OSError:
        pass  # not Linux
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found |= {
            "gpu_allocated": torch.cuda.memory_allocated(),
            "gpu_most_allocated": torch.cuda.max_memory_allocated(),
            "gpu_reserved": torch.cuda.memory_reserved(),
            "gpu_free": free,
            "gpu_total": total,
        }
    return found
