"""Where the probe's raw readings come from: files, commands and system calls of this machine, or of one that a test lays out."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infini_llama.tasks.patch_environment.probe.gpu_questions import QUESTIONS


@dataclass(frozen=True)
class Machine:
    """A machine as files below `root`, commands on `environ`'s PATH, and what the operating system answers.

    questions: the program by which a child process asks torch about GPUs. free_bytes: of a path's file system. clock: seconds since
    1970, as this machine's programs see them.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    questions: str = QUESTIONS
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    clock: Callable[[], float] = time.time

    def path(self, name: str) -> Path:
        """Where the file lies that the machine itself calls `name`."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """What is in the file, "" where it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def find(self, command: str) -> str | None:
        """The command's path, None where it is not installed."""
        return shutil.which(command, path=self.environ.get("PATH", os.defpath))

    def run(self, *command: str, seconds: float = 10.0) -> str | None:
        """What the command prints; None where it is not there, fails or takes too long."""
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
        """Runs a program in an interpreter of its own, so that nothing of it stays in this process."""
        return subprocess.run(
            [sys.executable, "-c", program],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
