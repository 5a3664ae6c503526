"""train as a Prefect task: failed workers are tried again by Prefect's retries, each time from the newest good checkpoint.

Call it directly, never with .submit(): only the main thread gets the signals that ask for a checkpoint.
"""

from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import TerminationSignal

from configs.errors import Preempted
from tasks.train import stage
from tasks.train.retries import Retries

RENEWED_BUDGETS = 1000  # Prefect counts all retries together; how many come without progress is for `Retries` to say


@task(name="train", cache_policy=NO_CACHE, persist_result=False)
def train(config: dict, reference: dict, plan: dict) -> dict:
    """`stage.train`; a request to stop reaches Prefect as the signal that it was, so the run is crashed or cancelled, not failed."""
    try:
        return stage.train(config, reference, plan)
    except Preempted as stopped:
        if isinstance(stopped.__cause__, TerminationSignal):
            raise TerminationSignal(signal=stopped.__cause__.signal) from stopped
        if isinstance(stopped.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from stopped
        raise


def with_retries(retries: Retries) -> Task:
    """The task under this policy, which is asked after each failure whether and when to go on."""

    def may_retry(this: Task, run: Any, state: Any) -> bool:
        delay = retries.delay_after(state.data)
        if delay is not None:
            this.retry_delay_seconds = delay
        return delay is not None

    return train.with_options(retries=RENEWED_BUDGETS if retries.limit else 0, retry_condition_fn=may_retry)
