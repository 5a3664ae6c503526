"""Whether failed training is tried again, and when: one policy for Prefect's task retries and for the plain loop."""

import logging
from collections.abc import Callable

from infini_llama.configs.errors import PipelineError, TrainFailed
from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.runs.checkpoints import latest_step

LONGEST_DELAY = 600.0
log = logging.getLogger("infini_llama.train")


class Retries:
    """A budget of `limit` failures at one checkpoint step; a checkpoint newer than at the last failure renews it.

    Args:
        limit: retries without progress, as `runtime.retries`.
        first_delay: seconds before the first of them, doubled for each further one, at most ten minutes.
        newest_step: step of the newest committed checkpoint, asked after each failure.
    """

    def __init__(self, limit: int, first_delay: float, newest_step: Callable[[], int]) -> None:
        self.limit, self.first_delay, self.newest_step = limit, first_delay, newest_step
        self.failed_at, self.failures = -1, 0

    def delay_after(self, error: BaseException) -> float | None:
        """Seconds to wait before the next attempt, None where `error` or the budget forbids one."""
        if not _may_pass(error):
            return None
        step = self.newest_step()
        self.failures = self.failures + 1 if step == self.failed_at else 1
        self.failed_at = step
        if self.failures > self.limit:
            log.error(
                "training failed %d time(s) at step %d without a new checkpoint (runtime.retries=%d) and is not "
                "retried; the errors are in attempts.jsonl of the run.",
                self.failures,
                step,
                self.limit,
            )
            return None
        delay = min(self.first_delay * 2 ** (self.failures - 1), max(LONGEST_DELAY, self.first_delay))
        log.warning(
            "training failed: %s; retrying in %g s from step %d (retry %d of %d)",
            str(error).rstrip(".") if isinstance(error, PipelineError) else repr(error),
            delay,
            step,
            self.failures,
            self.limit,
        )
        return delay


def _may_pass(error: BaseException) -> bool:
    """Failed workers and the unexpected may pass; what a person must change, a full lock or a request to stop do not."""
    if isinstance(error, PipelineError):
        return isinstance(error, TrainFailed) and error.retryable
    return isinstance(error, Exception)


def retries_for(runtime: RuntimeConfig) -> Retries:
    """The policy of a run's configuration."""
    folder = runtime.home / "runs" / runtime.name / "checkpoints"
    return Retries(runtime.retries, runtime.retry_delay, lambda: latest_step(folder))
