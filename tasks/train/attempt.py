"""The life of an attempt, in order: plan, launch, supervise, outcome, and what follows.

`stage` locks and binds the run, makes the first plan, and calls `attempts_until_finished`. After an
exception, the caller of `stage` asks `retries` whether to call it again.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from infini_llama.configs.errors import ExitCode, PipelineError, Preempted
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder, mark_not_retried
from infini_llama.tasks.runs.signals import DeferredSignals
from infini_llama.tasks.runs.status import read_statuses
from infini_llama.tasks.storage.locks import Busy
from infini_llama.tasks.train.attempt_folder import prepare, record_attempt
from infini_llama.tasks.train.hangs import HangDetector, Hung
from infini_llama.tasks.train.launch import WORKERS, TorchrunWorkers
from infini_llama.tasks.train.lineage_changes import (
    rolled_back,
    unchanged_after_progress,
    with_smaller_micro_batch,
)
from infini_llama.tasks.train.locking import LockedRun
from infini_llama.tasks.train.outcome import (
    Evidence,
    Outcome,
    error_of,
    outcome_of,
    outcome_of_start,
)
from infini_llama.tasks.train.planning import plan_next_attempt
from infini_llama.tasks.train.progress import Progress
from infini_llama.tasks.train.stopping import stop_workers

log = logging.getLogger("infini_llama.train")
POLL_SECONDS = 0.2


def attempts_until_finished(attempt: AttemptPlan, locked: LockedRun) -> None:
    """Make attempts until the run is finished, or none follows at once.

    Raises:
        as `run_attempt`; PipelineError: an attempt failed, and `what_follows` says what its caller
            does.
    """
    outcome = run_attempt(attempt, locked)
    while outcome.kind != "done":
        following = next_attempt(attempt, outcome)
        if following is None:
            raise error_of(outcome)
        attempt = following
        outcome = run_attempt(attempt, locked)


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
            workers = WORKERS[settings.launcher].start(
                attempt_dir, plan, settings, lock_fds
            )
        except Exception as fault:
            outcome = outcome_of_start(fault)
            record_attempt(attempt, attempt_dir, outcome)
            if isinstance(fault, PipelineError):
                return outcome
            raise
        evidence = supervise(attempt, workers, attempt_dir, locked, signals)
        if evidence.stop_request is not None:
            # Another signal is the same request: the command ends.
            signals.noted.clear()
        outcome = outcome_of(evidence)
        record_attempt(attempt, attempt_dir, outcome)
    ended = exception_of(outcome, evidence, run)
    if isinstance(ended, Preempted):
        # The nodes that join wait for no other attempt.
        mark_not_retried(run)
    if ended is not None:
        raise ended
    return outcome


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
        log.error(
            "supervising the workers failed (%r); they save a checkpoint and exit",
            raised,
        )
        fault = raised
        stop_request = stop_workers(attempt, workers)
    except BaseException as raised:
        stop_request = stop_workers(attempt, workers, raised)
    finally:
        signals.hold()
        workers.end()
    return Evidence(
        returncode=workers.process.wait(),
        statuses=read_statuses(attempt_dir, attempt.plan.world_size),
        log_folder=str(attempt_dir),
        hint=workers.hint(),
        crashes=workers.crashes(),
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
    # Nodes, and their allocation, may take any time before the first rank starts.
    is_here = config.environment.started_by.has_local_workers
    waits = environment.nnodes > 1 or not is_here
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
            workers.wait(POLL_SECONDS)


def exception_of(
    outcome: Outcome, evidence: Evidence, run: RunFolder
) -> Exception | None:
    """The exception that ends the stage, whatever follows the exit code.

    It is a request to stop this process, or a fault of this process, which may be retried.
    """
    failed = outcome.kind == "failed"
    if evidence.stop_request is None:
        return evidence.fault if failed and outcome.culprit is None else None
    # Where a rank refused its settings or data, the same command would not resume: that is what is
    # reported.
    if failed and what_follows(outcome.code).is_nothing:
        return None
    if failed:
        log.error("the attempt failed while it was stopped: %s", outcome.message)
    step = checkpoints.latest_step(run.checkpoints)
    newest = (
        f"the newest checkpoint is at step {step}"
        if step
        else "it has no checkpoint yet"
    )
    where = "it has done its last step" if outcome.kind == "done" else newest
    stopped = Preempted(
        f"run {run.path.name} was stopped; {where}. Run the same command to resume."
    )
    stopped.__cause__ = evidence.stop_request
    return stopped


@dataclass(frozen=True)
class Following:
    """What follows an attempt, unless a request to stop ends the command.

    Attributes:
        change: another attempt is made at once, with the lineage that this returns. Where it
            returns None, or is None, none is.
        is_retried: where no attempt is made at once, the caller of the stage enters it again after
            a delay, as often as `Retries` allows.
    """

    change: Callable[[AttemptPlan, Outcome], Lineage | None] | None
    is_retried: bool

    @property
    def is_nothing(self) -> bool:
        """Whether no attempt follows, on any node: the same command would end the same way."""
        return self.change is None and not self.is_retried


def what_follows(code: int) -> Following:
    """What follows an attempt that ended with this exit code; for people, see `ENDINGS`."""
    ending = ExitCode(code)
    match ending:
        case ExitCode.FINISHED | ExitCode.INVALID_CONFIG | ExitCode.INVALID_DATA:
            return Following(None, is_retried=False)
        case ExitCode.UNEXPECTED | ExitCode.HUNG:
            return Following(None, is_retried=True)
        case ExitCode.OUT_OF_MEMORY:
            return Following(with_smaller_micro_batch, is_retried=False)
        case ExitCode.DIVERGED:
            return Following(rolled_back, is_retried=False)
        case ExitCode.PREEMPTED:
            return Following(unchanged_after_progress, is_retried=True)
        case _:
            assert_never(ending)


def next_attempt(attempt: AttemptPlan, outcome: Outcome) -> AttemptPlan | None:
    """The attempt that is made at once after one that did not finish; None: none is."""
    change = what_follows(outcome.code).change
    lineage = change(attempt, outcome) if change else None
    return plan_next_attempt(attempt, lineage) if lineage else None
