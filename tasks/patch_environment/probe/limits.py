"""Cores and memory that this process may use: the machine's, within its affinity and its control groups."""

import os
import re
from pathlib import Path

from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.records.machine import Memory


def usable_cores(machine: Machine) -> int:
    """Cores by affinity, and by the tightest CPU quota of the control groups rounded down; at least 1."""
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", machine.text("/proc/self/status"), re.MULTILINE)
    cores = _count(allowed[1]) if allowed else os.cpu_count() or 1
    for folder in _groups("cpu", machine):
        limit = _words(folder / "cpu.max")
        limit = limit or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(limit) == 2 and limit[0] not in ("max", "-1"):
            cores = min(cores, int(limit[0]) // int(limit[1]))
    return max(1, cores)


def memory(machine: Machine) -> Memory:
    """Total and available memory within the tightest limit of the control groups."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", machine.text("/proc/meminfo"), re.MULTILINE))
    # Not on macOS: there what is installed is all that is known.
    total = int(fields["MemTotal"]) * 1024 if fields else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available, limit_of = int(fields["MemAvailable"]) * 1024 if fields else total, "machine"
    for folder in _groups("memory", machine):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0] != "max":
            if int(limit[0]) < total:
                total, limit_of = int(limit[0]), "control group"
            available = min(available, max(0, int(limit[0]) - int(used[0])))
    return Memory(total=total, available=available, limit=limit_of)


def _count(ranges: str) -> int:
    """5 for "0-3,8"."""
    ends = [part.split("-") for part in ranges.split(",")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _groups(controller: str, machine: Machine) -> list[Path]:
    """The folders of this process's groups for `controller`, version 2 and 1, each with those above it, whose limits hold too."""
    root, folders = machine.path("/sys/fs/cgroup"), []
    for line in machine.text("/proc/self/cgroup").splitlines():
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


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []
