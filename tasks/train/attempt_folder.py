"""The folder of an attempt: all that its workers are given, and the records of its end."""

import logging
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from infini_llama.configs.errors import ExitCode, TrainFailed, no_space
from infini_llama.configs.reading import changed
from infini_llama.tasks.formatting import in_bytes
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    attempt_folders,
    cut_metrics,
    number_of,
    read_attempt_plan,
    read_attempts,
    remove_staging,
    size_of,
    write_attempt_plan,
)
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.record_files import unreadable
from infini_llama.tasks.train.outcome import Outcome

log = logging.getLogger("infini_llama.train")
# A file that is kept in the attempt's folder for the record of its end, which a full disk would
# refuse otherwise.
RESERVE = "reserve"
RESERVE_BYTES = 2**16


def new_invocation() -> str:
    """Unique ID of one command; all its attempts share it."""
    return f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"


def prepare(attempt: AttemptPlan) -> Path:
    """Create the folder of a new attempt, and bring the run's files to its first step.

    The folder has all that the workers are given.

    Raises:
        TrainFailed: its first save would find the disk full.
    """
    run = RunFolder(attempt.run_dir)
    remove_staging(run)
    _require_disk_space(attempt)
    # What the last attempt's end has changed (a smaller micro-batch, skipped samples) is durable
    # from here on: a command that is killed before only repeats the attempt that fails, and decides
    # again.
    run.write(run.lineage, attempt.lineage)
    number = record_killed_attempts(run) + 1
    cut_metrics(run, attempt.from_step, _is_evaluation_due(attempt))
    attempt_dir = run.logs / f"attempt-{number:02d}"
    attempt_dir.mkdir(parents=True)
    try:
        write_attempt_plan(attempt_dir, attempt)
        # Not zeros, which some filesystems do not store.
        (attempt_dir / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))
    except OSError:
        # Nothing was started, so there is no attempt to record.
        shutil.rmtree(attempt_dir, ignore_errors=True)
        raise
    source = (
        f"from {attempt.resume_from.name}" if attempt.resume_from else "from step 0"
    )
    log.info(
        "attempt %d starts %s with %d worker(s)",
        number,
        source,
        attempt.plan.world_size,
    )
    return attempt_dir


def _is_evaluation_due(attempt: AttemptPlan) -> bool:
    """Whether the attempt begins with the evaluation that the one before has given up."""
    if attempt.resume_from is None:
        return False
    return checkpoints.read_state(attempt.resume_from).evaluation_due


def _require_disk_space(attempt: AttemptPlan) -> None:
    """Refuse an attempt whose steps would be lost at its first save.

    Only after that is an older checkpoint removed.
    """
    if attempt.resume_from is None or attempt.from_step >= attempt.max_steps:
        return
    folder = RunFolder(attempt.run_dir).checkpoints  # may be a link to another disk
    free = shutil.disk_usage(folder).free
    size = size_of(attempt.resume_from)
    if free < size:
        raise TrainFailed(
            f"no space for another checkpoint in {folder} ({in_bytes(free)} free, "
            f"and {attempt.resume_from.name} takes {in_bytes(size)}); "
            "free space and run the same command again."
        )


def record_killed_attempts(run: RunFolder) -> int:
    """Record attempts that have a folder but no record.

    They were killed together with the command, or flow run, that watched them. A record without a
    folder is one whose logs were removed, or not brought along to this machine.

    Returns:
        number of the newest attempt.
    """
    begun = set(map(number_of, attempt_folders(run)))
    recorded = {record.attempt for record in read_attempts(run)}
    message = "the command was killed"
    fault = unreadable(run.attempts, AttemptRecord, run.read_id())
    if fault:
        log.warning("%s; its contents are skipped.", fault)
        message = "the command was killed, or the line of its end cannot be read"
    for folder in attempt_folders(run):
        if number_of(folder) in recorded:
            continue
        plan: AttemptPlan | None = None
        with suppress(Damaged):
            plan = read_attempt_plan(folder)
        killed = AttemptRecord(
            attempt=number_of(folder),
            invocation=plan.invocation if plan else None,
            from_step=plan.from_step if plan else None,
            kind="failed",
            code=ExitCode.UNEXPECTED,
            message=message,
        )
        append_attempt(run, killed)
        log.warning(
            "attempt %d was killed with its command, which is now recorded in attempts.jsonl",
            killed.attempt,
        )
    return max(begun | recorded, default=0)


def record_attempt(attempt: AttemptPlan, attempt_dir: Path, outcome: Outcome) -> None:
    """Add the end of an attempt to attempts.jsonl."""
    run = RunFolder(attempt.run_dir)
    record = AttemptRecord(
        attempt=number_of(attempt_dir),
        invocation=attempt.invocation,
        from_step=attempt.from_step,
        checkpoint_step=checkpoints.latest_step(run.checkpoints),
        seconds=time.monotonic() - attempt.started.monotonic,
        kind=outcome.kind,
        code=outcome.code,
        message=outcome.message,
        step=outcome.step,
        error=changed(outcome.error, message="", traceback="")
        if outcome.error
        else None,
    )
    reserve = attempt_dir / RESERVE
    try:
        append_attempt(run, record)
    except OSError as full:
        if not no_space(full):
            raise
        reserve.unlink(missing_ok=True)
        append_attempt(run, record)
    reserve.unlink(missing_ok=True)
