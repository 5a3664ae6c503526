"""What the training stage changes after an attempt that ran out of memory or diverged; kept in lineage.json."""

import logging
from collections.abc import Sequence
from pathlib import Path

from infini_llama.tasks.records.lineage import SampleRange
from infini_llama.tasks.records.status import RankError
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.run_context import RunContext

log = logging.getLogger("infini_llama.train")


def halve_micro_batch(context: RunContext) -> bool:
    """Set half the micro-batch (or the next smaller size that divides a rank's share) for all further attempts of the run.

    Global batch and order of samples stay.

    Returns:
        False if the micro-batch is one sequence already.
    """
    lineage = context.run.require_lineage()
    now = context.micro_batch_size(lineage)
    share = context.config.train.global_batch_size // context.train.groups(context.plan.world_size)
    smaller = next((size for size in range(now // 2, 0, -1) if share % size == 0), None)
    if smaller is None:
        log.warning("the micro-batch is already one sequence; use a smaller model, shorter sequences or more memory")
        return False
    context.run.write_lineage(lineage.model_copy(update={"micro_batch_size": smaller}))
    log.warning(
        "retrying with micro-batches of %d instead of %d: the global batches and their order stay the same, but sums "
        "are rounded differently, so the run is no longer bitwise identical to one with the larger micro-batch.",
        smaller,
        now,
    )
    return True


def roll_back(run: RunFolder, error: RankError, limit: int, spare: int | None = None) -> bool:
    """Go back to the newest checkpoint from before the first skipped update, and skip the samples since.

    If the last rollback went to the same checkpoint, that one may itself be the cause: the run goes back to the next older one, or
    to the start, and the skipped range grows. These count as one rollback, and end where nothing older exists.

    Args:
        error: of the diverged run: its `first_skip`, and the samples consumed when it gave up.
        limit: how many times a run may do so.
        spare: samples that may be skipped in all, as the rest is needed; None: as many as it takes (`train.repeat_data`).

    Returns:
        False beyond the limit, where nothing older exists, or where too few samples would be left.
    """
    assert error.first_skip is not None and error.samples is not None  # every diverged rank reports both
    lineage = run.require_lineage()
    before = lineage.skipped_samples
    good, first = _newest_until(run, error.first_skip - 1)
    if limit and before and before[-1].first == first:  # diverged again after a rollback to this checkpoint
        if good is None:
            log.warning("the run diverged again from its start; nothing older exists to roll back to")
            return False
        log.warning("%s was rolled back to before; an older checkpoint is used", good.name)
        good, first = _newest_until(run, checkpoints.step_of(good) - 1)
        before = before[:-1]
    elif len(before) >= limit:
        log.warning("the run has already been rolled back %d time(s) (runtime.max_rollbacks=%d)", len(before), limit)
        return False
    skipped = SampleRange(first=first, end=error.samples)
    every = (*before, skipped)
    if spare is not None and _count(every) > spare:
        log.warning(
            "the run cannot be rolled back: without samples %d to %d, others would be seen twice, and train.repeat_data is false",
            skipped.first,
            skipped.end - 1,
        )
        return False
    run.write_lineage(lineage.model_copy(update={"skipped_samples": every}))
    log.warning(
        "rolling back to %s; samples %d to %d are skipped",
        good.name if good else "the start",
        skipped.first,
        skipped.end - 1,
    )
    return True


def _newest_until(run: RunFolder, step: int) -> tuple[Path | None, int]:
    """The newest valid checkpoint up to a step, None without one, and the samples consumed there; newer ones are moved aside."""
    checkpoints.abandon_newer(run.checkpoints, step)
    good = checkpoints.newest_good(run.checkpoints)
    return good, checkpoints.read_state(good).samples if good else 0


def _count(ranges: Sequence[SampleRange]) -> int:
    """How many samples are in any of the ranges."""
    count = reached = 0
    for one in sorted(ranges, key=lambda one: one.first):
        count += max(0, one.end - max(one.first, reached))
        reached = max(reached, one.end)
    return count
