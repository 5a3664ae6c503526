"""A machine as its files, commands and system calls describe it.

Also the cores and memory that a process may use there.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from infini_llama.tasks.records.machine import Memory


@dataclass(frozen=True)
class Machine:
    """A machine: files, commands, and what the operating system answers.

    Attributes:
        root: the folder below which its files are.
        environ: its environment; commands are on the PATH in it.
        gpu_probe: arguments of the Python process that reports what torch can do with the GPUs.
        free_bytes: free bytes of a path's file system.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    gpu_probe: tuple[str, ...] = (
        "-m",
        "infini_llama.tasks.patch_environment.gpu_probe",
    )
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free

    def path(self, name: str) -> Path:
        """Path of the file that the machine itself calls `name`."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Contents of the file; "" if it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def find(self, command: str) -> str | None:
        """The command's path; None if it is not installed."""
        return shutil.which(command, path=self.environ.get("PATH", os.defpath))

    def has_package(self, name: str) -> bool:
        """Whether the interpreter of `run_python` finds the package; it is not imported."""
        first = self.environ.get("PYTHONPATH", "").split(os.pathsep)
        return PathFinder.find_spec(name, [*filter(None, first), *sys.path]) is not None

    def run(self, *command: str) -> str:
        """Output of the command; "" if it is missing, fails or takes more than ten seconds."""
        program = self.find(command[0])
        if program is None:
            return ""
        try:
            ended = subprocess.run(
                [program, *command[1:]],
                env=dict(self.environ),
                capture_output=True,
                text=True,
                check=False,
                timeout=10,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return ended.stdout if ended.returncode == 0 else ""

    def run_python(
        self, *arguments: str, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a new Python interpreter: nothing of what it imports stays in this process."""
        return subprocess.run(
            # With -P, a file of the user's folder is no module.
            [sys.executable, "-P", *arguments],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )


def usable_cores(machine: Machine) -> int:
    """Cores by affinity, and by the tightest CPU quota of the control groups rounded down.

    It is at least 1.
    """
    status = machine.text("/proc/self/status")
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    cores = _count(allowed[1]) if allowed else os.cpu_count() or 1
    for folder in _control_groups("cpu", machine):
        limit = _words(folder / "cpu.max")
        if not limit:  # version 1
            limit = _words(folder / "cpu.cfs_quota_us") + _words(
                folder / "cpu.cfs_period_us"
            )
        if len(limit) == 2 and limit[0] not in ("max", "-1"):
            cores = min(cores, int(limit[0]) // int(limit[1]))
    return max(1, cores)


def _count(ranges: str) -> int:
    """The number of cores in a list of ranges: 5 for "0-3,8"."""
    ends = [part.split("-") for part in ranges.split(",")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def memory(machine: Machine) -> Memory:
    """Total and available memory within the tightest limit of the control groups."""
    fields = dict(
        re.findall(r"^(\w+):\s+(\d+) kB", machine.text("/proc/meminfo"), re.MULTILINE)
    )
    if fields:
        total = int(fields["MemTotal"]) * 1024
        # WSL 1 has no MemAvailable.
        available = int(fields.get("MemAvailable") or fields["MemFree"]) * 1024
    else:
        # macOS reports only the installed memory.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        available = total
    limit_of = "machine"
    for folder in _control_groups("memory", machine):
        limit = _words(folder / "memory.max") or _words(
            folder / "memory.limit_in_bytes"
        )
        used = _words(folder / "memory.current") or _words(
            folder / "memory.usage_in_bytes"
        )
        if not limit or not used or limit[0] == "max":
            continue
        words = _words(folder / "memory.stat")
        parts = dict(zip(words[::2], words[1::2], strict=False))
        # Of files: the kernel drops it where memory is needed. Version 1 has both, the total with
        # the groups below.
        cached = int(parts.get("total_inactive_file", parts.get("inactive_file", "0")))
        most = int(limit[0])
        if most < total:
            total = most
            limit_of = "control group"
        needed = max(0, int(used[0]) - cached)
        available = min(available, max(0, most - needed))
    return Memory(total=total, available=available, limit=limit_of)


def _control_groups(controller: str, machine: Machine) -> list[Path]:
    """The folders of this process's groups for `controller`, version 2 and 1.

    Each comes with those above it, whose limits hold too.
    """
    root = machine.path("/sys/fs/cgroup")
    folders: list[Path] = []
    for line in machine.text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        inside = base / path.lstrip("/")
        # In a container the path may be the host's, which does not exist here: then the group is
        # the root that is seen.
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
