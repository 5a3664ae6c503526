"""Memory of this process."""

from pathlib import Path

import torch


def memory_peak() -> int:
    """Most bytes that this process has used: of torch on a GPU, else resident."""
    found = memory()
    return found.get("gpu_most_allocated", found.get("most_resident", 0))


def dump_gpu_memory(path: Path) -> None:
    """Write torch's allocations on the GPU, block by block, for pytorch.org/memory_viz; nothing without a GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.memory._dump_snapshot(str(path))  # pyright: ignore[reportPrivateUsage]  (documented under this name)


def memory() -> dict[str, int]:
    """Bytes of this process: resident now and at most (Linux); on a GPU also what torch has allocated and reserved, and what is free."""
    found = dict[str, int]()
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
