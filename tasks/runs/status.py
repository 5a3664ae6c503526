"""The status of each rank, and how an attempt ended by them: files that remain, since torchrun reduces every exit code to 1."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.errors import ExitCode, no_space
from infini_llama.configs.reading import changed
from infini_llama.tasks.records.status import EndKind, RankError, RankState, RankStatus
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.locks import this_machine
from infini_llama.tasks.storage.record_files import read_record, record_text, write_record

NODE = "GROUP_RANK"  # rank of the node, set by torchrun


def status_path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"status-{rank}.json"


def write_status(
    attempt_dir: Path, rank: int, state: RankState, code: int, step: int | None = None, error: RankError | None = None
) -> None:
    """Replace a rank's status file.

    Args:
        code: an ExitCode; step: last completed one.
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
    """A rank's status; None before its first one, or if the filesystem does not answer."""
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


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt.

    Attributes:
        code: an ExitCode.
        step: last completed one, if known.
        culprit: the rank whose failure ended the attempt, if one reported it.
        error: of the culprit.
    """

    kind: EndKind
    code: int
    message: str
    step: int | None = None
    culprit: int | None = None
    error: RankError | None = None


def classify(returncode: int, statuses: Sequence[RankStatus | None], log_folder: str, hint: str = "") -> Outcome:
    """The end of one attempt.

    Args:
        returncode: torchrun's; 1 for anything that went wrong in a worker, negative for a signal to torchrun itself.
        statuses: of each rank, None if it wrote none.
        log_folder: named in the message, for people.
        hint: why no worker may have started.
    """
    written = [status for status in statuses if status]
    if len(written) == len(statuses) and all(status.state == "done" for status in written):
        return Outcome("done", ExitCode.FINISHED, "finished", written[0].step)
    failed = sorted((status for status in written if status.state == "failed"), key=lambda status: status.time)
    causes = [status for status in failed if not (status.error and status.error.peer_lost)]
    if causes:
        return _failed(causes[0], log_folder)
    silent = [rank for rank, status in enumerate(statuses) if status is None or status.state == "running"]
    preempted = [status for status in written if status.state == "preempted"]
    if preempted and not failed and not silent:
        return Outcome(
            "preempted",
            ExitCode.PREEMPTED,
            f"saved a checkpoint and stopped at step {preempted[0].step}",
            preempted[0].step,
        )
    if silent and returncode < 0:
        return Outcome(
            "failed", ExitCode.UNEXPECTED, f"torchrun was killed by signal {-returncode}; logs are in {log_folder}."
        )
    if silent and all(status is None for status in statuses):
        return Outcome(
            "failed",
            ExitCode.UNEXPECTED,
            f"no worker started (torchrun exited with {returncode}){hint and f': {hint}'}; see {log_folder}/torchrun.log.",
        )
    if silent:
        ranks = ", ".join(str(rank) for rank in silent)
        return Outcome(
            "failed",
            ExitCode.UNEXPECTED,
            f"rank {ranks} ended without an error report (killed from outside, perhaps by the kernel for lack of memory); logs are in "
            f"{log_folder}.",
        )
    if failed:
        return _failed(failed[0], log_folder)
    return Outcome(
        "failed",
        ExitCode.UNEXPECTED,
        f"torchrun exited with {returncode} although its workers had finished; see {log_folder}/torchrun.log.",
    )


def _failed(status: RankStatus, log_folder: str) -> Outcome:
    error = status.error or RankError(type="unknown")
    log = f"{log_folder}/rank-{status.rank}.log"
    message = f"rank {status.rank}: {error.type}: {error.message} (log: {log})"
    return Outcome("failed", status.code, message, status.step, status.rank, status.error)
