"""One attempt: from the choice of a checkpoint, through one torchrun, to the record of its end."""

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.errors import ExitCode, PipelineError, Preempted, no_space
from infini_llama.configs.reading import changed
from infini_llama.tasks.formatting import best_effort
from infini_llama.tasks.records.resolved_run import ResolvedRun
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    attempt_folders,
    cut_metrics,
    number_of,
    read_attempts,
    read_resolved,
    remove_staging,
    write_resolved,
)
from infini_llama.tasks.runs.status import Outcome, classify, read_statuses
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.locks import Busy, Lock
from infini_llama.tasks.storage.record_files import unreadable
from infini_llama.tasks.train.hangs import HangDetector, Hung
from infini_llama.tasks.train.launch import Workers, start
from infini_llama.tasks.train.progress import Progress
from infini_llama.tasks.train.stopping import stop_workers

log = logging.getLogger("infini_llama.train")
POLL_SECONDS = 0.2
# Kept free in the attempt's folder for the record of its end, which a full disk would refuse.
RESERVE, RESERVE_BYTES = "reserve", 2**16


def new_invocation() -> str:
    """Unique ID of one command; all its attempts share it."""
    return f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"


def run_attempt(resolved: ResolvedRun, locks: Sequence[Lock], each_poll: Callable[[], None]) -> Outcome:
    """One torchrun, from its start to its end.

    Args:
        locks: of the run and of its GPUs; torchrun holds them as long as it runs.
        each_poll: called a few times per second; an Exception that it raises is a failure, anything else a request to stop.

    Raises:
        Preempted: this process was asked to stop, and the workers with it.
        Busy: another process has taken the run; the workers were ended at once.
        Exception: what watching the workers raised; they have ended, and a failure is recorded.
    """
    run, plan, settings = RunFolder(resolved.run_dir), resolved.plan, resolved.config.environment
    attempt_dir = prepare(resolved)
    try:
        workers = start(attempt_dir, plan, settings, resolved.grace_period, [lock.fd for lock in locks])
    except PipelineError as refused:
        outcome = Outcome("failed", refused.exit_code, str(refused))
        record_attempt(resolved, attempt_dir, outcome)
        return outcome
    if plan.nnodes > 1 and settings.launcher == "local":
        log.info("%d nodes train: start `infini-llama join %s` on each other machine", plan.nnodes, run.path)
    watched = supervise(resolved, workers, attempt_dir, each_poll)
    reported = classify(watched.code, read_statuses(attempt_dir, plan.world_size), str(attempt_dir), workers.hint())
    outcome = decide(reported, watched)
    step = record_attempt(resolved, attempt_dir, outcome)
    if watched.fault is not None and outcome.kind == "failed" and outcome.culprit is None:
        raise watched.fault
    # Where a rank refused its settings or data, the same command would not resume: that is what is reported.
    if watched.stop_request is not None and outcome.code not in (ExitCode.INVALID_CONFIG, ExitCode.INVALID_DATA):
        if outcome.kind == "failed":
            log.error("the attempt failed while it was stopped: %s", outcome.message)
        newest = f"the newest checkpoint is at step {step}" if step else "it has no checkpoint yet"
        where = "it has done its last step" if outcome.kind == "done" else newest
        stopped = Preempted(f"run {run.path.name} was stopped; {where}. Run the same command to resume.")
        raise stopped from watched.stop_request
    return outcome


@dataclass(frozen=True)
class Watched:
    """How the watch over the workers ended.

    Attributes:
        code: torchrun's exit code.
        hang: which rank hung, if one did.
        fault: what went wrong in this process while it watched.
        stop_request: what asked this process to stop (Ctrl-C, SIGTERM, Prefect's cancellation).
    """

    code: int
    hang: str | None = None
    fault: Exception | None = None
    stop_request: BaseException | None = None


def decide(reported: Outcome, watched: Watched) -> Outcome:
    """The end of an attempt, by the first of these that holds:

    1. The ranks have finished, or one of them reported a failure of its own: what else was seen only followed from it.
    2. A rank hung, and the others did not save: HUNG.
    3. This process failed while it watched: UNEXPECTED.
    4. A stop was requested before any rank could save or report: PREEMPTED.
    5. What the ranks and torchrun's exit code say.
    """
    if reported.kind == "done" or reported.culprit is not None:
        return reported
    if watched.hang and reported.kind == "failed":
        return Outcome("failed", ExitCode.HUNG, watched.hang)
    if watched.fault is not None:
        message = f"watching the workers failed: {watched.fault!r}"
        return Outcome("failed", ExitCode.UNEXPECTED, message, reported.step)
    if watched.stop_request is not None and reported.code == ExitCode.UNEXPECTED:
        return Outcome("preempted", ExitCode.PREEMPTED, "stopped on request, without a checkpoint", reported.step)
    return reported


def prepare(resolved: ResolvedRun) -> Path:
    """Create the folder of a new attempt, with all that its workers are given, and bring the run's files to its first step."""
    run = RunFolder(resolved.run_dir)
    remove_staging(run)
    # What the last attempt's end has changed (a smaller micro-batch, skipped samples) is durable from here on: a command that is
    # killed before only repeats the attempt that fails, and decides again.
    run.write(run.lineage, resolved.lineage)
    number = record_killed_attempts(run) + 1
    cut_metrics(run, resolved.from_step)
    attempt_dir = run.path / "logs" / f"attempt-{number:02d}"
    attempt_dir.mkdir(parents=True)
    try:
        write_resolved(attempt_dir, resolved)
        (attempt_dir / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))  # not zeros, which some filesystems do not store
    except OSError:
        shutil.rmtree(attempt_dir, ignore_errors=True)  # nothing was started, so there is no attempt to record
        raise
    source = f"from {resolved.resume_from.name}" if resolved.resume_from else "from step 0"
    log.info("attempt %d starts %s with %d worker(s)", number, source, resolved.plan.world_size)
    return attempt_dir


def record_killed_attempts(run: RunFolder) -> int:
    """Record attempts that have a folder but no record: they were killed together with the command that watched them.

    A record without a folder is one whose logs were removed, or not brought along to this machine.

    Returns:
        number of the newest attempt.
    """
    begun = set(map(number_of, attempt_folders(run)))
    recorded = {record.attempt for record in read_attempts(run)}
    message = "the command was killed"
    if fault := unreadable(run.attempts, AttemptRecord, run.id):
        log.warning("%s; its contents are skipped.", fault)
        message = "the command was killed, or the line of its end cannot be read"
    for folder in attempt_folders(run):
        if number_of(folder) in recorded:
            continue
        from_step: int | None = None
        with suppress(Damaged):
            from_step = read_resolved(folder).from_step
        killed = AttemptRecord(
            attempt=number_of(folder),
            invocation=None,
            from_step=from_step,
            kind="failed",
            code=ExitCode.UNEXPECTED,
            message=message,
        )
        append_attempt(run, killed)
    return max(begun | recorded, default=0)


def record_attempt(resolved: ResolvedRun, attempt_dir: Path, outcome: Outcome) -> int:
    """Add the end of an attempt to attempts.jsonl; returns the step of the newest checkpoint."""
    run = RunFolder(resolved.run_dir)
    step = checkpoints.latest_step(run.checkpoints)
    record = AttemptRecord(
        attempt=number_of(attempt_dir),
        invocation=resolved.invocation,
        from_step=resolved.from_step,
        checkpoint_step=step,
        seconds=time.time() - resolved.started.wall,
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
    return step


def supervise(resolved: ResolvedRun, workers: Workers, attempt_dir: Path, each_poll: Callable[[], None]) -> Watched:
    """Watch the workers to their end, and leave no rank behind."""
    hang: str | None = None
    fault: Exception | None = None
    stop_request: BaseException | None = None
    try:
        watch(resolved, workers, attempt_dir, each_poll)
    except Hung as hung:
        hang = f"{hung}; the stacks of all ranks are in {attempt_dir}"
    except Busy:  # another process writes what these workers would still write
        raise
    except Exception as raised:
        log.error("supervising the workers failed (%r); they save a checkpoint and exit", raised)
        stop_workers(resolved, workers)
        fault = raised
    except BaseException as raised:
        stop_workers(resolved, workers)
        stop_request = raised
    finally:
        workers.end()
    code = workers.poll()
    assert code is not None  # it has ended
    return Watched(code, hang, fault, stop_request)


def watch(resolved: ResolvedRun, workers: Workers, attempt_dir: Path, each_poll: Callable[[], None]) -> None:
    """Wait for the end, reporting progress a few times per second; raises Hung if a rank hangs."""
    config, plan = resolved.config, resolved.plan
    progress = Progress(RunFolder(resolved.run_dir), resolved.max_steps, config.train.logging_steps)
    # Nodes, and the allocation of srun, may take any time before the first rank starts.
    waits = plan.nnodes > 1 or config.environment.launcher == "srun"
    hangs = HangDetector(attempt_dir, plan.world_size, config.runtime.hang_timeout, after_rendezvous=waits)
    ended = False
    while not ended:
        ended = workers.poll() is not None
        with best_effort("the display of progress", repeated=True), suppress(OSError):  # it does not answer just now
            progress.poll()
        try:
            if not ended:  # else a rank that was killed would count as silent
                hangs.poll()
        except Hung:
            hangs.dump_stacks()
            raise
        each_poll()
        if not ended:
            time.sleep(POLL_SECONDS)
