"""Processes of this machine by their numbers: what they are, and signals to them."""

import contextlib
import os
import signal
from pathlib import Path


def is_rank(pid: int, attempt_dir: Path) -> bool:
    """Whether `pid` is still a worker of this attempt.

    Its number may have been given to another process.
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return os.fsencode(attempt_dir) in command


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Another user's process.
        return True
    return True


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped (SIGSTOP, SIGTSTP); False where unknown.

    A process that a debugger has stopped is not: its state is "t".
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        # The name of the program, in parentheses, may contain spaces and parentheses.
        after_name = stat.rsplit(")", 1)[1]
        return after_name.split()[0] == "T"
    except (OSError, IndexError):
        return False


def waited_for_processor(pid: int) -> float:
    """Seconds in which the main thread of a process of this machine could have run, but others did.

    0 where unknown.
    """
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
        return int(fields[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
