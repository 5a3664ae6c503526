"""One attempt: from the choice of a checkpoint, through one torchrun, to the record of its end."""

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.errors import ExitCode, PipelineError, TrainFailed, no_space
from infini_llama.configs.reading import changed
from infini_llama.tasks.formatting import best_effort, in_bytes
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
from infini_llama.tasks.runs.signals import DeferredSignals
from infini_llama.tasks.runs.status import read_statuses
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.locks import Busy, Lock
from infini_llama.tasks.storage.record_files import unreadable
from infini_llama.tasks.train.hangs import HangDetector, Hung
from infini_llama.tasks.train.launch import TorchrunWorkers, start
from infini_llama.tasks.train.outcome import Evidence, Outcome, exception_of, outcome_of
from infini_llama.tasks.train.progress import Progress
from infini_llama.tasks.train.stopping import stop_workers

log = logging.getLogger("infini_llama.train")
POLL_SECONDS = 0.2
# A file that is kept in the attempt's folder for the record of its end, which a full disk would
# refuse otherwise.
RESERVE = "reserve"
RESERVE_BYTES = 2**16


def new_invocation() -> str:
    """Unique ID of one command; all its attempts share it."""
    return f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"


@dataclass(frozen=True)
class LockedRun:
    """A run that no other command trains meanwhile.

    Attributes:
        locks: of the run and of its GPUs; torchrun holds them as long as it runs.
        poll: called a few times per second; an Exception that it raises is a failure, anything else
            a request to stop.
    """

    locks: tuple[Lock, ...]
    poll: Callable[[], None]


def run_attempt(attempt: AttemptPlan, locked: LockedRun) -> Outcome:
    """One torchrun, from its start to its end.

    Raises:
        Preempted: this process was asked to stop, and the workers with it.
        Busy: another process has taken the run; the workers were ended at once.
        Exception: what watching the workers raised; they have ended, and a failure is recorded.
    """
    run = RunFolder(attempt.run_dir)
    plan = attempt.plan
    settings = attempt.config.environment
    lock_fds = [lock.fd for lock in locked.locks]
    # A request to stop is handled while the workers are watched; before and after, it would leave
    # the attempt without a record.
    with DeferredSignals() as signals:
        attempt_dir = prepare(attempt)
        try:
            workers = start(attempt_dir, plan, settings, attempt.grace_period, lock_fds)
        except Exception as fault:
            is_refused = isinstance(fault, PipelineError)
            code = fault.exit_code if is_refused else ExitCode.UNEXPECTED
            message = str(fault) if is_refused else f"starting the workers failed: {fault!r}"
            outcome = Outcome("failed", code, message)
            record_attempt(attempt, attempt_dir, outcome, checkpoints.latest_step(run.checkpoints))
            if is_refused:
                return outcome
            raise
        if plan.nnodes > 1 and settings.has_local_workers:
            log.info(
                "%d nodes train: start `infini-llama join %s` on each other machine",
                plan.nnodes,
                run.path,
            )
        evidence = supervise(attempt, workers, attempt_dir, locked, signals)
        if evidence.stop_request is not None:
            # Another signal is the same request: the command ends.
            signals.noted.clear()
        outcome = outcome_of(evidence)
        step = checkpoints.latest_step(run.checkpoints)
        record_attempt(attempt, attempt_dir, outcome, step)
    ended = exception_of(outcome, evidence, run.path.name, step)
    if ended is not None:
        raise ended
    return outcome


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
    cut_metrics(run, attempt.from_step)
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
    source = f"from {attempt.resume_from.name}" if attempt.resume_from else "from step 0"
    log.info("attempt %d starts %s with %d worker(s)", number, source, attempt.plan.world_size)
    return attempt_dir


def _require_disk_space(attempt: AttemptPlan) -> None:
    """Refuse an attempt whose steps would be lost at its first save.

    Only after that is an older checkpoint removed.
    """
    if attempt.resume_from is None or attempt.from_step >= attempt.max_steps:
        return
    free = shutil.disk_usage(attempt.run_dir).free
    size = size_of(attempt.resume_from)
    if free < size:
        raise TrainFailed(
            f"no space for another checkpoint in {attempt.run_dir} ({in_bytes(free)} free, "
            f"and {attempt.resume_from.name} takes {in_bytes(size)}); "
            "free space and run the same command again."
        )


def record_killed_attempts(run: RunFolder) -> int:
    """Record attempts that have a folder but no record.

    They were killed together with the command that watched them. A record without a folder is one
    whose logs were removed, or not brought along to this machine.

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
    return max(begun | recorded, default=0)


def record_attempt(attempt: AttemptPlan, attempt_dir: Path, outcome: Outcome, step: int) -> None:
    """Add the end of an attempt to attempts.jsonl.

    Args:
        step: of the newest checkpoint.
    """
    run = RunFolder(attempt.run_dir)
    record = AttemptRecord(
        attempt=number_of(attempt_dir),
        invocation=attempt.invocation,
        from_step=attempt.from_step,
        checkpoint_step=step,
        seconds=time.monotonic() - attempt.started.monotonic,
        kind=outcome.kind,
        code=outcome.code,
        message=outcome.message,
        step=outcome.step,
        error=changed(outcome.error, message="", traceback="") if outcome.error else None,
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


def supervise(
    attempt: AttemptPlan,
    workers: TorchrunWorkers,
    attempt_dir: Path,
    locked: LockedRun,
    signals: DeferredSignals,
) -> Evidence:
    """Watch the workers to their end, and leave no rank running; inside, signals are handled."""
    hang: str | None = None
    fault: Exception | None = None
    stop_request: BaseException | None = None
    try:
        signals.release()
        watch(attempt, workers, attempt_dir, locked)
    except Hung as hung:
        hang = f"{hung}; the stacks of all ranks are in {attempt_dir}"
    except Busy:
        # Another process writes what these workers would still write.
        raise
    except Exception as raised:
        log.error("supervising the workers failed (%r); they save a checkpoint and exit", raised)
        fault = raised
        stop_request = stop_workers(attempt, workers)
    except BaseException as raised:
        stop_request = stop_workers(attempt, workers, raised)
    finally:
        signals.hold()
        workers.end()
    code = workers.poll()
    # It has ended.
    assert code is not None
    statuses = read_statuses(attempt_dir, attempt.plan.world_size)
    return Evidence(
        returncode=code,
        statuses=statuses,
        log_folder=str(attempt_dir),
        hint=workers.hint(),
        hang=hang,
        fault=fault,
        stop_request=stop_request,
    )


def watch(
    attempt: AttemptPlan, workers: TorchrunWorkers, attempt_dir: Path, locked: LockedRun
) -> None:
    """Wait for the end, reporting progress a few times per second; raises Hung if a rank hangs."""
    config = attempt.config
    environment = attempt.plan
    progress = Progress(
        RunFolder(attempt.run_dir),
        attempt_dir,
        attempt.max_steps,
        config.train.logging_steps,
        environment.nproc_per_node,
    )
    # Nodes, and the allocation of srun, may take any time before the first rank starts.
    waits = environment.nnodes > 1 or not config.environment.has_local_workers
    hangs = HangDetector(
        attempt_dir,
        environment.world_size,
        config.runtime.hang_timeout,
        after_rendezvous=waits,
        stage_ends=attempt.lineage.curriculum_ends,
    )
    ended = False
    while not ended:
        ended = workers.poll() is not None
        # OSError: the filesystem does not answer just now.
        with best_effort("the display of progress", repeated=True), suppress(OSError):
            progress.poll()
        try:
            # Else a rank that was killed would count as silent.
            if not ended:
                hangs.poll()
        except Hung:
            hangs.dump_stacks()
            raise
        locked.poll()
        if not ended:
            time.sleep(POLL_SECONDS)
