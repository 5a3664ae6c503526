"""What the training stage changes after an attempt that met the machine's or the data's limits; kept in lineage.json."""

import json
import logging

from infini_llama.configs.ranks import groups_of
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.artifacts import write_atomic

log = logging.getLogger("infini_llama.train")


def halve_micro_batch(run: RunFolder, train: dict, processes: int) -> bool:
    """Sets half the micro-batch (or the next smaller size that divides a rank's share) for all further attempts of the run.

    Global batch and order of samples stay. Returns False where the micro-batch is one sequence already.
    """
    lineage = run.read_lineage()
    now = min(train["micro_batch_size"], lineage.get("micro_batch_size", train["micro_batch_size"]))
    share = train["global_batch_size"] // groups_of(train, processes)
    smaller = next((size for size in range(now // 2, 0, -1) if share % size == 0), None)
    if smaller is None:
        log.warning("the micro-batch is one sequence already; a smaller model, shorter rows or more memory are needed")
        return False
    write_atomic(run.lineage, json.dumps(lineage | {"micro_batch_size": smaller}, indent=1))
    log.warning(
        "trying again with micro-batches of %d instead of %d: the same global batches in the same order, but sums are rounded "
        "differently, so the run is no longer bitwise that of the larger micro-batch.",
        smaller,
        now,
    )
    return True


def roll_back(run: RunFolder, details: dict, limit: int) -> bool:
    """Goes back to the newest checkpoint from before the first left-out update, and leaves out the samples since.

    Args:
        details: {"first_skip": step, "samples": consumed when the run gave up}, of the workers.
        limit: how many times a run may do so; beyond it, False.
    """
    lineage = run.read_lineage()
    left_out = lineage.get("left_out", [])
    if len(left_out) >= limit:
        log.warning("the run has gone back %d time(s) already (runtime.max_rollbacks=%d)", len(left_out), limit)
        return False
    checkpoints.abandon_newer(run.checkpoints, details["first_skip"] - 1)
    good = checkpoints.newest_good(run.checkpoints)
    first = checkpoints.read_state(good).samples if good else 0
    span = {"first": first, "end": details["samples"]}
    write_atomic(run.lineage, json.dumps(lineage | {"left_out": [*left_out, span]}, indent=1))
    log.warning(
        "going back to %s; samples %d to %d are left out",
        good.name if good else "the start",
        span["first"],
        span["end"] - 1,
    )
    return True
