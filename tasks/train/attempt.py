"""One attempt: from the choice of a checkpoint, through one torchrun, to the record of its end."""

import json
import logging
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from infini_llama.configs.errors import ConfigError, ExitCode, Preempted, no_space
from infini_llama.configs.secrets import masked, without_secrets
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.goodput import StartTime
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.status import AttemptRecord, RankError
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.goodput import goodput
from infini_llama.tasks.runs.outcome import Outcome, classify
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    attempt_folders,
    attempts,
    cut_metrics,
    lacking_steps,
    number_of,
    remove_staging,
)
from infini_llama.tasks.runs.signals import ONE_REQUEST_SECONDS
from infini_llama.tasks.runs.status import read_statuses
from infini_llama.tasks.storage.artifacts import Busy, write_atomic
from infini_llama.tasks.storage.json_lines import unreadable
from infini_llama.tasks.storage.lease import this_machine
from infini_llama.tasks.train.grace import grace_period, request_time_to_stop
from infini_llama.tasks.train.launcher import HUNG, Launched, Launcher
from infini_llama.tasks.train.lineage import source_weights
from infini_llama.tasks.train.progress import Progress
from infini_llama.tasks.train.run_context import RunContext
from infini_llama.tasks.train.supervisor import Hung, Watch

log = logging.getLogger("infini_llama.train")
POLL_SECONDS = 0.2
# Kept free in the attempt's folder for the record of its end, which a full disk would refuse.
RESERVE, RESERVE_BYTES = "reserve", 2**16


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
    running = running_job(run, context.launcher)
    if running:
        attempt_dir, launched = running
        log.info("the workers of %s continued without the command that started them; watching them", attempt_dir.name)
    else:
        grace = grace_period(run, context.config.runtime)
        attempt_dir = prepare(context, grace)
        try:
            launched = context.launcher.start(attempt_dir, context.plan, grace, [lock.fd for lock in context.locks])
        except ConfigError as refused:  # by the cluster; after other faults a job may be there all the same
            outcome = Outcome("failed", refused.exit_code, str(refused))
            record_attempt(run, attempt_dir, context.invocation, outcome)
            raise
    order = run.read(attempt_dir / "order.json")  # of a detached job, perhaps an earlier command's
    world_size = order["plan"]["nproc_per_node"] * order["plan"]["nnodes"]
    code, interrupted, hang = supervise(context, launched, attempt_dir, world_size)
    if hang:
        outcome = Outcome("failed", ExitCode.HUNG, hang)
    elif refused := launched.refusal():
        outcome = Outcome("failed", refused.exit_code, str(refused))
    else:
        outcome = classify(code, read_statuses(attempt_dir, world_size), str(attempt_dir))
    fault = interrupted if isinstance(interrupted, Exception) and outcome.kind != "done" else None
    if fault is not None:
        outcome = Outcome("failed", ExitCode.UNEXPECTED, f"watching the workers failed: {fault!r}", outcome.step)
    step = record_attempt(run, attempt_dir, context.invocation, outcome)
    if fault is not None:
        raise fault
    if interrupted is not None and outcome.kind != "done":
        raise Preempted(
            f"run {run.path.name} was stopped; the newest checkpoint is at step {step}. Run the same command to resume."
        ) from interrupted
    if (why := launched.cancelled()) and outcome.kind != "done":
        raise Preempted(f"{why}; the newest checkpoint is at step {step}. Run the same command to resume.")
    if outcome.kind == "done" and order["config"]["train"]["max_steps"] != context.max_steps:
        return Outcome(
            "preempted", ExitCode.PREEMPTED, "finished with the settings of the command before this one", outcome.step
        )
    return outcome


def record_attempt(run: RunFolder, attempt_dir: Path, invocation: str, outcome: Outcome) -> int:
    """Add the end of an attempt to attempts.jsonl; returns the step of the newest checkpoint."""
    order = run.read(attempt_dir / "order.json")  # as it is now: a job that started again has renewed it
    step = checkpoints.latest_step(run.checkpoints)
    record = AttemptRecord(
        attempt=number_of(attempt_dir),
        invocation=invocation,
        from_step=order["from_step"],
        checkpoint_step=step,
        seconds=time.time() - order["began"]["wall"],
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


def running_job(run: RunFolder, launcher: Launcher) -> tuple[Path, Launched] | None:
    """The newest attempt and its workers, if an earlier command left it to a job of a cluster and no command recorded its end."""
    folders = attempt_folders(run)
    if not folders or number_of(folders[-1]) in {record.attempt for record in attempts(run)}:
        return None
    launched = launcher.attach(folders[-1])
    return (folders[-1], launched) if launched else None


def prepare(context: RunContext, grace: float) -> Path:
    """The folder of a new attempt, with its order."""
    run = context.run
    remove_staging(run)
    chosen, first_step = choose_checkpoint(context)
    number = record_killed_attempts(run) + 1
    cut_metrics(run, first_step)
    if lacking := lacking_steps(run, first_step):
        log.warning(
            "%s has no line for %d of the steps up to the checkpoint's %d (the first is step %d): they are missing "
            "from curves and totals.",
            run.metrics,
            len(lacking),
            first_step,
            lacking[0],
        )
    attempt_dir = run.path / "logs" / f"attempt-{number:02d}"
    attempt_dir.mkdir(parents=True)
    try:
        write_order(attempt_dir, context, chosen, first_step, grace)
        (attempt_dir / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))  # not zeros, which some filesystems do not store
    except OSError:
        shutil.rmtree(attempt_dir, ignore_errors=True)  # nothing was started, so there is no attempt to record
        raise
    source = f"from {chosen.name}" if chosen else "from step 0"
    log.info("attempt %d starts %s with %d worker(s)", number, source, context.plan.world_size)
    return attempt_dir


def supervise(
    context: RunContext, launched: Launched, attempt_dir: Path, world_size: int
) -> tuple[int, BaseException | None, str | None]:
    """Watch the workers to their end, and leave no rank behind.

    Returns:
        the exit code; what asked this process to stop (Ctrl-C, SIGTERM, Prefect's cancellation: no Exception) or what went wrong
        here (an Exception), if anything did; which rank hung, if one did.
    """
    interrupted, hang, leave_running = None, None, False
    try:
        watch(context, launched, attempt_dir, world_size)
    except Hung as hung:
        hang = f"{hung}; the stacks of all ranks are in {attempt_dir}"
    except (
        Busy
    ):  # another process has the run: it watches its job, or writes what workers of this machine would still write
        leave_running = launched.detached
        raise
    except BaseException as raised:
        if isinstance(raised, Exception):
            log.error("supervising the workers failed (%r); they save a checkpoint and exit", raised)
        stop(context, launched)
        interrupted = raised
    finally:
        if not leave_running:
            launched.end()
    if (path := attempt_dir / HUNG).exists():
        hang = f"{path.read_text(encoding='utf-8')}; the stacks of all ranks are in {attempt_dir}"
    code = launched.poll()
    assert code is not None  # it has ended
    return code, interrupted, hang


def watch(context: RunContext, launched: Launched, attempt_dir: Path, world_size: int) -> None:
    """Wait for the end, reporting progress a few times per second; raises Hung if a rank hangs."""
    config = context.config
    progress = Progress(context.run, context.max_steps, config.train.log_every)
    several = config.environment.nnodes > 1
    ranks = Watch(attempt_dir, world_size, config.runtime.hang_after, launched.heartbeats, nodes_meet=several)
    notices: list[str] = []
    ended = False
    while not ended:
        ended = launched.poll() is not None
        with suppress(OSError):  # the filesystem does not answer just now
            progress.poll()
        if (newest := launched.notices()) != notices:
            notices = newest
            for line in notices:
                log.warning(line)
        try:
            if not launched.detached:  # else its own supervisor does that, beside the ranks
                ranks.poll()
        except Hung:
            ranks.dump_stacks()
            raise
        context.each_poll()
        if not ended:
            time.sleep(POLL_SECONDS)


def stop(context: RunContext, launched: Launched) -> None:
    """Let the workers save and end within the grace period; a second request ends them at once (by the caller).

    What interrupts this within a second is the same request: Prefect and Ctrl-C have signal handlers of their own, which raise it
    as often as it comes.
    """
    requested = time.monotonic()
    while True:
        try:
            return request_stop(context, launched)
        except Exception:
            raise
        except BaseException:
            if time.monotonic() - requested > ONE_REQUEST_SECONDS:
                log.warning("second signal received: exiting now; the newest valid checkpoint remains")
                return


def request_stop(context: RunContext, launched: Launched) -> None:
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
    launched.stop(grace)


def choose_checkpoint(context: RunContext) -> tuple[Path | None, int]:
    """The checkpoint to start from and its step, None and 0 for a fresh start.

    A rule other than auto holds for the first attempt of a command; a path until the run has a checkpoint of its own since.
    """
    run, resume = context.run, context.config.runtime.resume
    lineage = run.require_lineage()
    is_retry = any(record.invocation == context.invocation for record in attempts(run))
    if resume in ("must", "never", "best") and is_retry:
        resume = "auto"
    chosen = checkpoints.choose(run.checkpoints, resume, lineage.resumed_from)
    first_step = refuse_other_model(chosen, context.model, context.plan) if chosen else 0
    if resume not in ("auto", "must", "never", "best"):
        run.write_lineage(lineage.model_copy(update={"resumed_from": resume}))
    return chosen, first_step


def write_order(attempt_dir: Path, context: RunContext, chosen: Path | None, from_step: int, grace: float) -> None:
    """order.json: everything that the workers of this attempt are given."""
    config = context.config.model_dump(mode="json", exclude={"deployment"})
    lineage = context.run.require_lineage()
    train = context.train | {"micro_batch_size": context.micro_batch_size(lineage)}
    stages = [stage.to_json() for stage in context.curriculum]
    plan = context.plan.to_json()
    started = StartTime(wall=time.time(), monotonic=time.monotonic(), machine=this_machine())
    order = {
        "began": started.to_json(),
        "spent": goodput(context.run, from_step, started.wall).to_json(),
        "from_step": from_step,
        "grace_period": grace,
        "lineage": lineage.model_dump(mode="json", exclude_unset=True),  # a copy, should the file be damaged
        "run_dir": str(context.run.path),
        "dataset": str(context.dataset_path),
        "dataset_digest": context.dataset.digest,
        "chunks": context.dataset.chunks,
        "sequence_length": context.dataset.sequence_length,
        "weights": source_weights(context.config.data),
        "verify_on_read": context.verify_on_read,
        "resume_from": str(chosen) if chosen else None,
        "init_from": lineage.init_from.path if lineage.init_from and not chosen else None,
        "left_out": [skipped.to_json() for skipped in lineage.skipped_samples],
        "config": without_secrets(config) | {"train": train, "data": config["data"] | {"curriculum": stages}},
        "model": context.model.to_dict(),
        "plan": plan | {"env": masked(plan["env"])},  # the workers have the real ones in their environment
    }
    write_atomic(attempt_dir / "order.json", json.dumps(order, indent=1))


def refuse_other_model(chosen: Path, model: LlamaConfig, plan: EnvironmentPlan) -> int:
    """Step of the checkpoint, once it is known to be of this architecture."""
    state, here = checkpoints.read_state(chosen), model.to_dict()
    there = state.model
    if differing := [key for key in there if key in here and there[key] != here[key]]:
        lines = [f"model.{key}: {there[key]} there, {here[key]} here" for key in differing]
        raise ConfigError(f"checkpoint {chosen} has another architecture:\n  " + "\n  ".join(lines))
    if state.world_size != plan.world_size:
        log.warning(
            "the checkpoint was written by %d worker(s) and is resumed by %d: the samples and their order stay the "
            "same, but sums are rounded differently, so the run is no longer bitwise identical to an "
            "uninterrupted one.",
            state.world_size,
            plan.world_size,
        )
    return state.step


def record_killed_attempts(run: RunFolder) -> int:
    """Record attempts that have a folder but no record: they were killed together with the command that watched them.

    A record without a folder is one whose logs were removed, or not brought along to this machine.

    Returns:
        number of the newest attempt.
    """
    begun = set(map(number_of, attempt_folders(run)))
    recorded = {record.attempt for record in attempts(run)}
    message = "the command was killed"
    if fault := unreadable(run.attempts, AttemptRecord):
        log.warning("%s; its contents are skipped.", fault)
        message = "the command was killed, or the line of its end cannot be read"
    for missing in sorted(begun - recorded):
        killed = AttemptRecord(
            attempt=missing, invocation=None, kind="failed", code=ExitCode.UNEXPECTED, message=message
        )
        append_attempt(run, killed)
    return max(begun | recorded, default=0)
