"""The status of each rank: files that remain, since torchrun reduces every exit code to 1."""

import os
import socket
import time
from pathlib import Path

from infini_llama.configs.errors import no_space
from infini_llama.configs.reading import changed
from infini_llama.tasks.records.status import RankError, RankState, RankStatus
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.locks import this_machine
from infini_llama.tasks.storage.record_files import (
    read_record,
    record_text,
    write_record,
)

NODE = "GROUP_RANK"  # rank of the node, set by torchrun


def status_path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"status-{rank}.json"


def write_status(
    attempt_dir: Path,
    rank: int,
    state: RankState,
    code: int,
    step: int | None = None,
    error: RankError | None = None,
) -> None:
    """Replace a rank's status file.

    Args:
        code: an ExitCode.
        step: last completed one.
    """
    status = RankStatus(
        rank=rank,
        pid=os.getpid(),
        state=state,
        code=code,
        step=step,
        time=time.time(),
        node=int(os.environ.get(NODE, "0")),
        parent=os.getppid(),
        host=socket.gethostname(),
        machine=this_machine(),
        error=error,
    )
    path = status_path(attempt_dir, rank)
    try:
        write_record(path, status)
    except OSError as full:
        if error is None or not no_space(full):
            raise
        # The status "running" has a block of the disk already; a short text fits into it.
        short = changed(error, traceback="", sample_rows=None)
        with path.open("r+", encoding="utf-8") as file:
            file.write(record_text(changed(status, error=short).to_json()))
            file.truncate()


def read_status(attempt_dir: Path, rank: int) -> RankStatus | None:
    """A rank's status; None before its first one, or if the filesystem does not respond."""
    try:
        return read_record(RankStatus, status_path(attempt_dir, rank))
    except (OSError, Damaged):
        return None


def read_statuses(attempt_dir: Path, processes: int) -> list[RankStatus | None]:
    """Each rank's status; None for a rank that never wrote one."""
    return [read_status(attempt_dir, rank) for rank in range(processes)]


def is_here(status: RankStatus) -> bool:
    """Whether the process number in a status is one of this machine."""
    return status.machine == this_machine()
