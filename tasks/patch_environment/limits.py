"""Cores and memory that this process may really use: the machine's, within its affinity and its control groups."""

import os
from pathlib import Path
from typing import Any

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Cores by affinity, and by the tightest CPU quota of the control groups rounded down; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups("cpu", root, membership):
        limit = _words(folder / "cpu.max")
        limit = limit or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(limit) == 2 and limit[0] not in ("max", "-1"):
            cores = min(cores, int(limit[0]) // int(limit[1]))
    return max(1, cores)


def memory(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> dict[str, Any]:
    """Bytes of memory in all and available, both within the tightest limit of the control groups."""
    total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):  # not on macOS: there what is installed is all that is known
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for folder in _groups("memory", root, membership):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0] != "max":
            total = min(total, int(limit[0]))
            available = min(available, max(0, int(limit[0]) - int(used[0])))
    return {"total": total, "available": available}


def _groups(controller: str, root: Path, membership: Path) -> list[Path]:
    """The folders of this process's groups for `controller`, version 2 and 1, each with those above it, whose limits hold too."""
    folders: list[Path] = []
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        inside = base / path.lstrip("/")
        # In a container the path may be the host's, which does not exist here: then the group is the root that is seen.
        while inside != base:
            folders.append(inside)
            inside = inside.parent
        folders.append(base)
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()
