"""Where the probe's raw readings come from: files, commands and system calls of this machine, or of one that a test defines.

With the cores and the memory that this process may use of it.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from infini_llama.tasks.records.machine import Memory

# A child process asks torch about GPUs; its last line is JSON.
# Whether flash-attn can be imported, and on a GPU whether it agrees with torch's own attention.
ATTENTION = """
import json, torch
from infini_llama.model.backends import flash_attention
report = {"gpus": [], "nccl": torch.distributed.is_nccl_available(), "attention": {"flash2": ""}}
try:
    flash_attention()
except BaseException as error:
    report["attention"]["flash2"] = str(error.__cause__ or error)
"""
DEVICES = """
torch.cuda.init()
for index in range(torch.cuda.device_count()):
    with torch.cuda.device(index):
        p = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    report["gpus"].append({"name": p.name, "capability": [p.major, p.minor], "memory": total, "free": free, "bf16": bf16,
                           "uuid": str(getattr(p, "uuid", ""))})
"""
ANSWER = """
print("\\n" + json.dumps(report))
"""
TRIAL = """
from infini_llama.tasks.patch_environment.probe.attention_trial import disagreement
if report["gpus"] and report["gpus"][0]["bf16"]:
    report["attention"]["flash2"] = report["attention"]["flash2"] or disagreement("flash2", "cuda", "bf16")
"""
QUESTIONS = ATTENTION + DEVICES + TRIAL + ANSWER


@dataclass(frozen=True)
class Machine:
    """A machine as files below `root`, commands on `environ`'s PATH, and what the operating system answers.

    Attributes:
        questions: the program by which a child process asks torch about GPUs.
        free_bytes: of a path's file system.
        clock: seconds since 1970.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    questions: str = QUESTIONS
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    clock: Callable[[], float] = time.time

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
        """Whether `ask_python`'s interpreter finds the package; it is not imported."""
        first = self.environ.get("PYTHONPATH", "").split(os.pathsep)
        return PathFinder.find_spec(name, [*filter(None, first), *sys.path]) is not None

    def run(self, *command: str, seconds: float = 10.0) -> str | None:
        """What the command prints; None if it is missing, fails or takes too long."""
        found = self.find(command[0])
        if found is None:
            return None
        try:
            ended = subprocess.run(
                [found, *command[1:]],
                env=dict(self.environ),
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ended.stdout if ended.returncode == 0 else None

    def ask_python(self, program: str, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a program in an interpreter of its own, so that nothing of it stays in this process."""
        return subprocess.run(
            [sys.executable, "-c", program],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )


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
