"""train as a Prefect task, which Prefect retries after failures.

Each retry starts from the newest good checkpoint. Call it directly, never with .submit(): only the
main thread gets the signals that request a checkpoint.
"""

import contextlib
import logging
from collections.abc import Generator
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect import Task, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, Pause, TerminationSignal
from prefect.types._datetime import now  # private to Prefect 3.9.1

from infini_llama.configs.errors import ConfigError, Preempted
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.progress import Live
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.plan import PlannedEnvironment
from infini_llama.tasks.records.summary import RunSummary
from infini_llama.tasks.report.artifact_keys import ArtifactKeys
from infini_llama.tasks.train import stage
from infini_llama.tasks.train.locking import local_gpus
from infini_llama.tasks.train.retries import Retries

log = logging.getLogger("infini_llama.train")
# Prefect counts all retries together; `Retries` limits those without progress.
MOST_RETRIES = 1000
# A global concurrency limit, in force where `deploy --gpus` has made it.
GPU_LIMIT = "infini-llama-gpu"
SUSPENDED = timedelta(days=30)  # that a suspended run can be resumed
# Seconds for which slots are leased. Their process renews them, and one that cannot goes on
# training. Nothing but the lease's end frees the GPUs of a process that was killed.
GPU_LEASE = 60.0
# The slot of a crashed run is freed by the server, so that this lease only has to outlast an
# outage: it is renewed after three quarters of it, and the client then tries for 8 minutes to reach
# the server.
RUN_LEASE = 3600.0


@task(
    name="train",
    task_run_name="train-{page.run}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def train(
    config: PipelineConfig,
    dataset: DatasetRef,
    environment: PlannedEnvironment,
    invocation: str,
    verify_on_read: bool,
    page: ArtifactKeys,
) -> RunSummary:
    """Run `stage.train`, with its progress on the run's page.

    A request to stop reaches Prefect as the exception that it was. By intent, Prefect then marks
    the run as crashed, cancelled or suspended; after any other exception, it is failed.
    """
    try:
        gpus = local_gpus(config.environment, environment.plan)
        with _gpu_slots(len(gpus)), _progress(page):
            return stage.train(
                config,
                dataset,
                environment,
                invocation,
                verify_on_read,
                _raise_if_suspended,
            )
    except Preempted as stopped:
        if isinstance(stopped.__cause__, TerminationSignal):
            raise TerminationSignal(signal=stopped.__cause__.signal) from stopped
        if isinstance(stopped.__cause__, Pause):
            raise Pause(state=stopped.__cause__.state) from stopped
        if isinstance(stopped.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from stopped
        raise


def with_retries(retries: Retries) -> Task[..., RunSummary]:
    """The task under this policy.

    Prefect 3.9.1 has no delay that depends on the error. It reads `retry_delay_seconds` after the
    condition has returned, which therefore sets it. No issue upstream is known.
    """

    def set_delay_if_retried(task: Task[..., RunSummary], run: Any, state: Any) -> bool:
        delay = retries.delay_after(state.data)
        if delay is not None:
            task.retry_delay_seconds = delay
        return delay is not None

    return train.with_options(
        retries=MOST_RETRIES, retry_condition_fn=set_delay_if_retried
    )


@contextlib.contextmanager
def lasting_suspension() -> Generator[None]:
    """Extend the time-out of a suspension that ends the block.

    After the 300 s of the page of Prefect 3.9.1, the run would fail. PrefectHQ/prefect#11587 asked
    for no time-out of `suspend_flow_run`, not of the page.
    """
    try:
        yield
    except Pause:
        try:
            _extend_suspension()
        except Exception as fault:
            log.warning(
                "the time-out of the suspension cannot be extended (%r); "
                "resume the run before it ends.",
                fault,
            )
        raise


def _extend_suspension() -> None:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(context.flow_run.id).state
        if state is None or not state.is_paused():
            return
        ends = state.state_details.pause_timeout
        if ends is None:
            return
        until = now("UTC") + SUSPENDED
        # It is extended already, and a person may resume it at any time.
        if until - ends < timedelta(hours=1):
            return
        details = state.state_details.model_copy(update={"pause_timeout": until})
        extended = state.model_copy(update={"state_details": details})
        client.set_flow_run_state(context.flow_run.id, extended, force=True)


def _raise_if_suspended() -> None:
    """Raise Pause if Suspend was pressed.

    Prefect 3.9.1 would only notice it between two tasks (PrefectHQ/prefect#20388, open). Its
    `flow_run_suspension_request` is of a private module.
    """
    context = FlowRunContext.get()
    if context is None:
        return
    # Before the checkpoint is saved: while it ends, a person may have resumed it.
    with lasting_suspension():
        context.flow_run_suspension_request.raise_if_requested()


@contextlib.contextmanager
def _progress(page: ArtifactKeys) -> Generator[None]:
    """Show a bar on the run's page."""
    artifact: list[UUID] = []

    def show(percent: float, words: str) -> None:
        update_progress_artifact(
            artifact[0], progress=percent, description=f"Run {page.run}: {words}"
        )

    with best_effort("the progress of training"):
        made = create_progress_artifact(
            0.0, key=page.key("progress"), description=f"Run {page.run} is starting"
        )
        # Called from a coroutine, this function would return an awaitable instead of the ID.
        assert isinstance(made, UUID)
        artifact.append(made)
    with Live("infini_llama.train", show) if artifact else contextlib.nullcontext():
        yield
    # Also for a run that had already finished, or stopped early.
    if artifact:
        with best_effort("the progress of training"):
            show(100.0, "finished")


@contextlib.contextmanager
def _gpu_slots(slots: int) -> Generator[None]:
    """Occupy a slot of the server's limit for each GPU, where it has one.

    The GPU's own lock decides whether it is free.
    """
    limit = _gpu_limit() if slots else None
    if limit is None:
        yield
        return
    if slots > limit:
        raise ConfigError(
            f"the run needs {slots} GPUs, but the server's limit {GPU_LIMIT} is {limit}; "
            f"raise it by 'infini-llama deploy --gpus {slots}', "
            "or set environment.nproc_per_node."
        )
    # A lease that cannot be renewed is no reason to end healthy training. The argument for that is
    # documented.
    with concurrency(
        GPU_LIMIT,
        occupy=slots,
        lease_duration=GPU_LEASE,
        raise_on_lease_renewal_failure=False,
    ):
        yield


def _gpu_limit() -> int | None:
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(GPU_LIMIT).limit
        except ObjectNotFound:
            return None
