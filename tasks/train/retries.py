"""The next attempt after one that did not finish.

It follows from the exit code (`ENDINGS` in configs/errors.py).

`next_attempt`: another one at once, which the end has changed (71, 72) or did not cause (75).
`Retries`: whether and when the caller, Prefect or `pipeline.run`, enters the stage again after the
exception of another end.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from infini_llama.configs.errors import ENDINGS, ExitCode, PipelineError, TrainFailed
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.lineage import Lineage, SampleRange
from infini_llama.tasks.records.status import RankError
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder, mark_not_retried
from infini_llama.tasks.storage.locks import Busy
from infini_llama.tasks.train.outcome import Outcome
from infini_llama.tasks.train.planning import plan_next_attempt

LONGEST_DELAY = 600.0
log = logging.getLogger("infini_llama.train")


def next_attempt(attempt: AttemptPlan, outcome: Outcome) -> AttemptPlan | None:
    """The attempt that this stage makes after one that did not finish; None: it makes none.

    A preempted attempt resumes, one that ran out of memory with smaller micro-batches, and a
    diverged one from an older checkpoint, without the samples since.
    """
    if ENDINGS[ExitCode(outcome.code)].follows != "attempt":
        return None
    if outcome.code == ExitCode.PREEMPTED:
        log.warning(
            "the workers received a stop signal and %s; resuming immediately", outcome.message
        )
        return plan_next_attempt(attempt)
    if outcome.code == ExitCode.OUT_OF_MEMORY:
        log.warning("out of memory: %s", outcome.message)
        lineage = _with_smaller_micro_batch(attempt)
    elif outcome.code == ExitCode.DIVERGED and outcome.error is not None:
        log.warning("diverged: %s", outcome.message)
        lineage = _rolled_back(attempt, outcome.error)
    else:
        lineage = None
    return None if lineage is None else plan_next_attempt(attempt, lineage)


def _with_smaller_micro_batch(attempt: AttemptPlan) -> Lineage | None:
    """The run's lineage with half the micro-batch, for all its further attempts.

    Where half does not divide a rank's share, the next smaller size that does is taken. Global
    batch and order of samples stay.

    Returns:
        None if the micro-batch is one sequence already.
    """
    train = attempt.config.train
    now = attempt.micro_batch_size
    share = train.global_batch_size // train.groups(attempt.plan.world_size)
    smaller = next((size for size in range(now // 2, 0, -1) if share % size == 0), None)
    if smaller is None:
        log.warning(
            "the micro-batch is already one sequence; "
            "use a smaller model, shorter sequences or more memory"
        )
        return None
    log.warning(
        "retrying with micro-batches of %d instead of %d: the global batches and their order "
        "stay the same, but sums are rounded differently, "
        "so the run is no longer bitwise identical to one with the larger micro-batch.",
        smaller,
        now,
    )
    return changed(attempt.lineage, micro_batch_limit=smaller)


def _rolled_back(attempt: AttemptPlan, error: RankError) -> Lineage | None:
    """The run's lineage back at the newest checkpoint from before the first skipped update.

    The samples since then are skipped.

    If the last rollback went to the same checkpoint, that one may itself be the cause: the run goes
    back to the next older one, or to the start, and the skipped range grows. All these together
    count as one rollback; without an older checkpoint, the run fails.

    Args:
        error: of the diverged run: its `first_skip`, and the samples consumed when it gave up.

    Returns:
        None beyond `runtime.max_rollbacks`, or where nothing older exists.
    """
    # Every diverged rank reports both.
    assert error.first_skip is not None and error.samples is not None
    run = RunFolder(attempt.run_dir)
    limit = attempt.config.runtime.max_rollbacks
    before = attempt.lineage.skipped_samples
    # Newer ones stay until it is certain that the run goes back.
    good, first = _newest_until(attempt, error.first_skip - 1)
    # It diverged again after a rollback to this checkpoint.
    if limit and before and before[-1].first == first:
        if good is None:
            log.warning(
                "the run diverged again from its start; nothing older exists to roll back to"
            )
            return None
        log.warning("%s was rolled back to before; an older checkpoint is used", good.name)
        good, first = _newest_until(attempt, checkpoints.step_of(good) - 1)
        before = before[:-1]
    elif len(before) >= limit:
        log.warning(
            "the run has already been rolled back %d time(s) (runtime.max_rollbacks=%d)",
            len(before),
            limit,
        )
        return None
    skipped = SampleRange(first=first, end=error.samples)
    checkpoints.abandon_newer(run.checkpoints, checkpoints.step_of(good) if good else 0)
    log.warning(
        "rolling back to %s; samples %d to %d are skipped",
        good.name if good else "the start",
        skipped.first,
        skipped.end - 1,
    )
    return changed(attempt.lineage, skipped_samples=(*before, skipped))


def _newest_until(attempt: AttemptPlan, step: int) -> tuple[Path | None, int]:
    """The newest valid checkpoint of the run up to a step, and the samples consumed there.

    Without one, it is None, and the run starts from scratch, or from the checkpoint of another run
    that `runtime.resume` names.
    """
    own = RunFolder(attempt.run_dir).checkpoints
    resume = attempt.config.runtime.resume
    good = checkpoints.newest_with_damaged_moved_aside(own, step)
    is_of_another = (
        resume not in checkpoints.RULES and Path(resume).parent.resolve() != own.resolve()
    )
    start = good or (Path(resume) if is_of_another else None)
    samples = checkpoints.read_state(start).samples if start else 0
    return good, samples


class Retries:
    """A budget of `limit` failures at one checkpoint step.

    A checkpoint newer than at the last failure renews it.

    Args:
        limit: retries without progress, as `runtime.retries`.
        first_delay: seconds before the first of them, doubled for each further one, at most ten
            minutes.
        newest_step: step of the newest committed checkpoint, asked after each failure.
        on_end: called when the attempts have ended after a failure, see `until_end`.
    """

    def __init__(
        self,
        limit: int,
        first_delay: float,
        newest_step: Callable[[], int],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.limit = limit
        self.first_delay = first_delay
        self.newest_step = newest_step
        self.on_end = on_end
        self.failed_at = -1
        self.failures = 0

    @contextmanager
    def until_end(self) -> Generator[None]:
        """Call `on_end` if the attempts that a command makes inside end after a failure.

        A request to stop during a delay ends them, too.
        """
        try:
            yield
        except BaseException as error:
            # After Busy, the newest attempt is another command's.
            if self.failures and not isinstance(error, Busy):
                self.on_end()
            raise

    def delay_after(self, error: BaseException) -> float | None:
        """Seconds to wait before the next attempt, None where `error` or the budget forbids one."""
        if not _should_retry(error):
            return None
        step = self.newest_step()
        self.failures = 1 if step > self.failed_at else self.failures + 1
        self.failed_at = step
        if self.failures > self.limit:
            log.error(
                "training failed %d time(s) at step %d without a new checkpoint "
                "(runtime.retries=%d) and is not retried; "
                "the errors are in attempts.jsonl of the run.",
                self.failures,
                step,
                self.limit,
            )
            return None
        longest = max(LONGEST_DELAY, self.first_delay)
        delay = min(self.first_delay * 2 ** (self.failures - 1), longest)
        log.warning(
            "training failed: %s; retrying in %g s; newest checkpoint: step %d (retry %d of %d)",
            str(error).rstrip(".") if isinstance(error, PipelineError) else repr(error),
            delay,
            step,
            self.failures,
            self.limit,
        )
        return delay


def _should_retry(error: BaseException) -> bool:
    """Whether another attempt may succeed after this error."""
    if isinstance(error, TrainFailed):
        return ENDINGS[ExitCode(error.exit_code)].follows == "retry"
    # Any other exception is a defect or a fault of this machine, and the rest are requests to stop.
    return isinstance(error, Exception) and not isinstance(error, PipelineError)


def retries_for(runtime: RuntimeConfig) -> Retries:
    """The policy of a run's configuration."""
    run = RunFolder.of(runtime)
    return Retries(
        runtime.retries,
        runtime.retry_delay,
        newest_step=lambda: checkpoints.latest_step(run.checkpoints),
        on_end=lambda: mark_not_retried(run),
    )
