"""Decision whether and when the caller of the stage enters it again.

The caller is Prefect or `pipeline.train_with_retries`.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from infini_llama.configs.errors import PipelineError, TrainFailed, error_message
from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder, mark_not_retried
from infini_llama.tasks.storage.locks import Busy
from infini_llama.tasks.train.attempt import what_follows

LONGEST_DELAY = 600.0
log = logging.getLogger("infini_llama.train")


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
        if not _is_retried(error):
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
            error_message(error).rstrip("."),
            delay,
            step,
            self.failures,
            self.limit,
        )
        return delay


def _is_retried(error: BaseException) -> bool:
    """Whether another attempt may succeed after this error."""
    if isinstance(error, TrainFailed):
        return what_follows(error.exit_code).is_retried
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
