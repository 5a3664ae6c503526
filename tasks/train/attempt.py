"""One attempt: from the choice of a checkpoint, through one torchrun, to the record of its end."""

import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from infini_llama.configs.errors import ConfigError, ExitCode, PipelineError, Preempted, no_space
from infini_llama.tasks.records.status import AttemptRecord, RankError
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.job_file import read_start
from infini_llama.tasks.runs.outcome import Outcome, classify
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt, number_of
from infini_llama.tasks.runs.signals import ONE_REQUEST_SECONDS
from infini_llama.tasks.runs.status import read_statuses
from infini_llama.tasks.storage.artifacts import Busy
from infini_llama.tasks.train.grace import grace_period, request_time_to_stop
from infini_llama.tasks.train.launch import Workers, start
from infini_llama.tasks.train.prepare import RESERVE, prepare
from infini_llama.tasks.train.progress import Progress
from infini_llama.tasks.train.run_context import RunContext
from infini_llama.tasks.train.supervisor import Hung, Watch

log = logging.getLogger("infini_llama.train")
POLL_SECONDS = 0.2


def new_invocation() -> str:
    """Unique ID of one command; all its attempts share it."""
    return f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"


def attempt(context: RunContext) -> Outcome:
    """One torchrun, from the checkpoint that `runtime.resume` names to its end.

    Raises:
        Preempted: this process was asked to stop, and the workers with it.
        Busy: another process has taken the run; the workers were ended at once.
        Exception: what watching the workers raised; they have ended, and a failure is recorded.
    """
    run = context.run
    plan, settings = context.plan, context.config.environment
    grace = grace_period(run, context.config.runtime)
    attempt_dir = prepare(context, grace)
    try:
        workers = start(attempt_dir, plan, settings, grace, [lock.fd for lock in context.locks])
    except PipelineError as refused:
        outcome = Outcome("failed", refused.exit_code, str(refused))
        record_attempt(run, attempt_dir, context.invocation, outcome)
        raise
    if plan.nnodes > 1 and settings.launcher == "local":
        log.info("%d nodes train: start `infini-llama join %s` on each other machine", plan.nnodes, run.path)
    code, interrupted, hang = supervise(context, workers, attempt_dir)
    if hang:
        outcome = Outcome("failed", ExitCode.HUNG, hang)
    else:
        outcome = classify(code, read_statuses(attempt_dir, plan.world_size), str(attempt_dir), workers.hint())
    fault = interrupted if isinstance(interrupted, Exception) and outcome.kind != "done" else None
    if fault is not None:
        outcome = Outcome("failed", ExitCode.UNEXPECTED, f"watching the workers failed: {fault!r}", outcome.step)
    elif (
        interrupted is not None and outcome.code == ExitCode.UNEXPECTED and outcome.error is None
    ):  # no rank had begun, or had time
        outcome = Outcome("preempted", ExitCode.PREEMPTED, "stopped on request, without a checkpoint", outcome.step)
    step = record_attempt(run, attempt_dir, context.invocation, outcome)
    if fault is not None:
        raise fault
    if interrupted is not None and outcome.kind != "done":
        newest = f"the newest checkpoint is at step {step}" if step else "it has no checkpoint yet"
        raise Preempted(f"run {run.path.name} was stopped; {newest}. Run the same command to resume.") from interrupted
    return outcome


def record_attempt(run: RunFolder, attempt_dir: Path, invocation: str, outcome: Outcome) -> int:
    """Add the end of an attempt to attempts.jsonl; returns the step of the newest checkpoint."""
    job = read_start(attempt_dir)  # as it is now: a job that started again has renewed it
    step = checkpoints.latest_step(run.checkpoints)
    record = AttemptRecord(
        attempt=number_of(attempt_dir),
        invocation=invocation,
        from_step=job.from_step,
        checkpoint_step=step,
        seconds=time.time() - job.started.wall,
        kind=outcome.kind,
        code=outcome.code,
        message=outcome.message,
        step=outcome.step,
    )
    if (error := outcome.error) is not None and error.phase:
        shown = RankError(type=error.type, phase=error.phase, sample_rows=error.sample_rows, memory=error.memory)
        record = record.model_copy(update={"error": shown})
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


def supervise(context: RunContext, workers: Workers, attempt_dir: Path) -> tuple[int, BaseException | None, str | None]:
    """Watch the workers to their end, and leave no rank behind.

    Returns:
        the exit code; what asked this process to stop (Ctrl-C, SIGTERM, Prefect's cancellation: no Exception) or what went wrong
        here (an Exception), if anything did; which rank hung, if one did.
    """
    interrupted, hang = None, None
    try:
        watch(context, workers, attempt_dir)
    except Hung as hung:
        hang = f"{hung}; the stacks of all ranks are in {attempt_dir}"
    except Busy:  # another process writes what these workers would still write
        raise
    except BaseException as raised:
        if isinstance(raised, Exception):
            log.error("supervising the workers failed (%r); they save a checkpoint and exit", raised)
        stop(context, workers)
        interrupted = raised
    finally:
        workers.end()
    code = workers.poll()
    assert code is not None  # it has ended
    return code, interrupted, hang


def watch(context: RunContext, workers: Workers, attempt_dir: Path) -> None:
    """Wait for the end, reporting progress a few times per second; raises Hung if a rank hangs."""
    config, plan = context.config, context.plan
    progress = Progress(context.run, context.max_steps, config.train.log_every)
    # Nodes, and the allocation of srun, may take any time before the first rank starts.
    waits = plan.nnodes > 1 or config.environment.launcher == "srun"
    ranks = Watch(attempt_dir, plan.world_size, config.runtime.hang_timeout, nodes_meet=waits)
    ended = False
    while not ended:
        ended = workers.poll() is not None
        with suppress(OSError):  # the filesystem does not answer just now
            progress.poll()
        try:
            ranks.poll()
        except Hung:
            ranks.dump_stacks()
            raise
        context.each_poll()
        if not ended:
            time.sleep(POLL_SECONDS)


def stop(context: RunContext, workers: Workers) -> None:
    """Let the workers save and end within the grace period; a second request ends them at once (by the caller).

    What interrupts this within a second is the same request: Prefect and Ctrl-C have signal handlers of their own, which raise it
    as often as it comes.
    """
    requested = time.monotonic()
    while True:
        try:
            return request_stop(context, workers)
        except Exception:
            raise
        except BaseException:
            if time.monotonic() - requested > ONE_REQUEST_SECONDS:
                log.warning("second signal received: exiting now; the newest valid checkpoint remains")
                return


def request_stop(context: RunContext, workers: Workers) -> None:
    """Stop the workers within the grace period that the run needs."""
    runtime = context.config.runtime
    try:
        grace = grace_period(context.run, runtime)
    except ConfigError as refused:  # measured meanwhile: all the time there is
        log.warning("%s", refused)
        grace = runtime.orchestrator_grace or runtime.grace_period
    except (OSError, ValueError):  # metrics.jsonl cannot be read just now
        grace = runtime.grace_period
    log.warning("stop requested; waiting up to %.0f s for a checkpoint (a second signal exits immediately)", grace)
    request_time_to_stop(grace)
    workers.stop(grace)
