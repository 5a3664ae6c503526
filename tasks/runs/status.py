"""The last word of a rank: an atomic file that outlives it, since torchrun flattens every exit code to 1."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import no_space
from infini_llama.tasks.storage.artifacts import write_atomic
from infini_llama.tasks.storage.lease import this_machine

NODE = "INFINI_LLAMA_NODE"  # tells a worker the number of its node


def status_path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"status-{rank}.json"


def write_status(
    attempt_dir: Path, rank: int, state: str, code: int, step: int | None = None, error: dict[str, Any] | None = None
) -> None:
    """state: running | done | preempted | failed; code: an exit code of docs/resume.md; step: last completed step; error: of `failure`."""
    record = {"rank": rank, "pid": os.getpid(), "state": state, "code": code, "step": step, "time": time.time()}
    record |= {"node": int(os.environ.get(NODE, "0")), "host": socket.gethostname(), "machine": this_machine()}
    if error is not None:
        record["error"] = error
    path = status_path(attempt_dir, rank)
    try:
        write_atomic(path, json.dumps(record, indent=1))
    except OSError as full:
        if error is None or not no_space(full):
            raise
        # The status "running" has a block of the disk already; a short text fits into it.
        short = {"traceback": "", "sample_rows": None}
        with path.open("r+", encoding="utf-8") as file:
            file.write(json.dumps(record | {"error": error | short}))
            file.truncate()


def read_status(attempt_dir: Path, rank: int) -> dict | None:
    """A rank's last word; None before its first, or where the filesystem does not answer just now."""
    try:
        return json.loads(status_path(attempt_dir, rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_statuses(attempt_dir: Path, processes: int) -> list[dict | None]:
    """Each rank's last word; None for a rank that never wrote one."""
    return [read_status(attempt_dir, rank) for rank in range(processes)]


def is_here(status: dict) -> bool:
    """Whether the process number in a status is one of this machine."""
    return status["machine"] == this_machine()
