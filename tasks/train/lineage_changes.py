"""Changes of a run's lineage by the end of an attempt, for all its further attempts."""

import logging
from pathlib import Path

from infini_llama.configs.reading import changed
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.lineage import Lineage, SampleRange
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.outcome import Outcome

log = logging.getLogger("infini_llama.train")


def unchanged_after_progress(attempt: AttemptPlan, outcome: Outcome) -> Lineage | None:
    """The run's lineage as it was, for an attempt at once after workers were stopped.

    Returns:
        None if the attempt has no newer checkpoint than it began with: whatever stops the workers
        may do so each time, so that it counts as a failure.
    """
    newest = checkpoints.latest_step(RunFolder(attempt.run_dir).checkpoints)
    if newest <= attempt.from_step:
        log.warning(
            "the workers received a stop signal before a newer checkpoint than that of step %d",
            attempt.from_step,
        )
        return None
    log.warning(
        "the workers received a stop signal and %s; resuming immediately",
        outcome.message,
    )
    return attempt.lineage


def with_smaller_micro_batch(attempt: AttemptPlan, outcome: Outcome) -> Lineage | None:
    """The run's lineage with half the micro-batch, for all its further attempts.

    Where half does not divide a rank's share, the next smaller size that does is taken. Global
    batch and order of samples stay.

    Returns:
        None if the micro-batch is one sequence already.
    """
    log.warning("out of memory: %s", outcome.message)
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


def rolled_back(attempt: AttemptPlan, outcome: Outcome) -> Lineage | None:
    """The run's lineage back at the newest checkpoint from before the first skipped update.

    The samples since then are skipped.

    If the last rollback went to the same checkpoint, that one may itself be the cause: the run goes
    back to the next older one, or to the start, and the skipped range grows. All these together
    count as one rollback; without an older checkpoint, the run fails. A run that has checkpoints
    goes back to its start only if `runtime.rollback_to_start` allows it.

    Returns:
        None beyond `runtime.max_rollbacks`, or where nothing older exists.
    """
    log.warning("diverged: %s", outcome.message)
    error = outcome.error
    # Every diverged rank reports both.
    assert (
        error is not None and error.first_skip is not None and error.samples is not None
    )
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
        log.warning(
            "%s was rolled back to before; an older checkpoint is used", good.name
        )
        good, first = _newest_until(attempt, checkpoints.step_of(good) - 1)
        before = before[:-1]
    elif len(before) >= limit:
        log.warning(
            "the run has already been rolled back %d time(s) (runtime.max_rollbacks=%d)",
            len(before),
            limit,
        )
        return None
    newest = checkpoints.latest_step(run.checkpoints)
    if good is None and newest and not attempt.config.runtime.rollback_to_start:
        _warn_of_start(error.first_skip, newest)
        return None
    skipped = SampleRange(first=first, end=error.samples)
    checkpoints.abandon_newer(run.checkpoints, checkpoints.step_of(good) if good else 0)
    log.warning(
        "rolling back to %s, from before step %d; samples %d to %d are skipped",
        good.name if good else "the start",
        error.first_skip,
        skipped.first,
        skipped.end - 1,
    )
    return changed(attempt.lineage, skipped_samples=(*before, skipped))


def _warn_of_start(first_skip: int, newest_step: int) -> None:
    """Log why a diverged run does not go back to its start."""
    log.warning(
        "the run has no checkpoint to go back to from before step %d; going back to its start "
        "would discard all %d steps of its newest checkpoint. Set runtime.rollback_to_start=true "
        "to allow that",
        first_skip,
        newest_step,
    )


def _newest_until(attempt: AttemptPlan, step: int) -> tuple[Path | None, int]:
    """The newest valid checkpoint of the run up to a step, and the samples consumed there.

    Without one, it is None, and the run starts from scratch, or from the checkpoint of another run
    that `runtime.resume` names.
    """
    own = RunFolder(attempt.run_dir).checkpoints
    resume = attempt.config.runtime.resume
    followed = attempt.lineage.resumed_checkpoint or resume
    good = checkpoints.newest_with_damaged_moved_aside(own, step)
    is_of_another = (
        resume not in checkpoints.RULES
        and Path(resume).parent.resolve() != own.resolve()
    )
    start = good or (Path(followed) if is_of_another else None)
    samples = checkpoints.read_state(start).samples if start else 0
    return good, samples
