"""The flow: raw text to a trained model in four stages, and its evaluation and export if requested.

The stages pass typed records.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prefect import State, task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler
from prefect.runtime import deployment, flow_run

from infini_llama.configs.errors import ConfigError, escaped
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.secrets import restored, with_blocks
from infini_llama.flows import pipeline
from infini_llama.flows.deletion import stopped_if_deleted
from infini_llama.flows.form import AsConfig, PipelineFlow, with_changes
from infini_llama.flows.lost_runs import end_tasks, executing, folder_of, newest_running
from infini_llama.flows.naming import config_of_run
from infini_llama.flows.pipeline import Stages, run_stages
from infini_llama.flows.scheduled import Changes, due, superseded, with_schedule
from infini_llama.flows.settings import TAGS
from infini_llama.flows.slot import keep_slots
from infini_llama.flows.starts import Start
from infini_llama.flows.suspension import confirmed_suspension
from infini_llama.tasks.formatting import RunPage
from infini_llama.tasks.patch_environment.task import patch_environment
from infini_llama.tasks.preprocess.stage import Preparation
from infini_llama.tasks.preprocess.task import preprocess
from infini_llama.tasks.records.dataset import DatasetRef, VerifyReport
from infini_llama.tasks.records.plan import PlannedEnvironment
from infini_llama.tasks.records.summary import RunSummary
from infini_llama.tasks.report.task import closing_card
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.retries import retries_for
from infini_llama.tasks.train.task import lasting_suspension, with_retries
from infini_llama.tasks.verify_data.task import verify_data

# Between two lines of progress: ten thousand lines delay the end of a process by most of a minute.
PROGRESS_SECONDS = 1.0
log = logging.getLogger("infini_llama.prefect")
# In each process that executes the flow: a worker of Prefect's loads no other module of this
# program.
keep_slots()


def _name() -> str:
    config = flow_run.parameters["config"]
    try:
        config = with_schedule(config, flow_run.parameters.get("schedules") or {})
        config = with_changes(config, flow_run.parameters.get("changes") or {})
        start = _start(config)
        return start.preview(config, config_of_run(config, start.due)).runtime.name
    except ConfigError:  # the flow itself fails with it; Prefect would show no reason here
        return str(flow_run.name)


def _start(config: PipelineConfig) -> Start:
    """The start that this flow run is: all its executions belong to it."""
    return Start(id=str(flow_run.id), due=due(config.runtime.name))


def _show_name(name: str) -> None:
    """Rename this flow run if another start has taken the name that it was to have."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.name == name:
        return
    with get_client(sync_client=True) as client:
        client.update_flow_run(context.flow_run.id, name=name)


def tags_of(config: PipelineConfig) -> list[str]:
    """Tags of a run, for filters and automations.

    A deployment's runs have those of the deployment.
    """
    sources = {source.source for source in config.data.sources} or {config.data.source}
    from_sources = [f"data:{name}" for name in sorted(sources)]
    return [*TAGS, f"attention:{config.model.attention}", *from_sources]


@partial(
    PipelineFlow,
    name="pretrain",
    flow_run_name=_name,
    persist_result=True,
    result_serializer="json",
    retries=0,
)
def pretrain(
    config: Annotated[PipelineConfig, AsConfig()],
    changes: dict[str, Any] | None = None,
    schedules: dict[str, Changes] | None = None,
    not_text: dict[str, str] | None = None,
) -> dict[str, Any] | State:
    """Preprocess, verify-data, patch-environment, train; then evaluate and export if requested.

    Called again with the same configuration, it resumes: what is complete on disk is not built
    again. A late scheduled run that a later one makes superfluous ends as cancelled.

    Args:
        config: replaces the deployed configuration.
        changes: what this run changes of the configuration.
        schedules: what each schedule of the deployment changes, by its name; applied to the runs
            that it creates.
        not_text: files of the deployment that are no text, see `DataConfig.leave_out`.

    Returns:
        What `run` returns.
    """
    skipped = superseded()
    if skipped is not None:
        return skipped
    config = with_schedule(config, schedules or {})
    config = with_changes(config, changes) if changes else config
    start = _start(config)
    config = start.claim(config, config_of_run(config, start.due))
    _show_name(config.runtime.name)
    config = restored(with_blocks(config, _secret))
    for place, kind in (not_text or {}).items():
        config.data.leave_out(place, kind)
    name = config.runtime.name
    page = RunPage(name, deployment.name or name)
    with (
        _execution(config.runtime.home),
        api_logs(),
        confirmed_suspension(),
        lasting_suspension(),
    ):
        # One ID for all executions of a flow run: after Resume or Retry, runtime.resume has been
        # followed already.
        return run_stages(config, _tasks(page), f"flow-run-{flow_run.id}").to_json()


evaluate = task(
    name="evaluate",
    task_run_name="evaluate-{run.name}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)(pipeline.evaluate)
export = task(
    name="export",
    task_run_name="export-{run.name}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)(pipeline.export)


def _tasks(page: RunPage) -> Stages:
    """The stages as Prefect tasks, which write their cards on the run's page."""

    def preprocess_text(preparation: Preparation) -> DatasetRef:
        return preprocess(preparation, page, return_state=True).result()

    def verify(dataset: DatasetRef, home: Path, level: str) -> VerifyReport:
        return verify_data(dataset, home, level, page)

    def patch(config: PipelineConfig, vocab_size: int) -> PlannedEnvironment:
        return patch_environment(config, vocab_size, page)

    def train(
        config: PipelineConfig,
        dataset: DatasetRef,
        environment: PlannedEnvironment,
        invocation: str,
        on_read: bool,
    ) -> RunSummary:
        retries = retries_for(config.runtime)
        with closing_card(RunFolder.of(config.runtime).path, page) as ended, retries.until_end():
            summary = with_retries(retries)(config, dataset, environment, invocation, on_read, page)
            done = "had already finished" if summary.already_finished else "finished"
            ended(f"Training {done}: {summary.steps:,} steps.")
        if not summary.already_finished:
            log.info("run %s is finished: %d steps", page.run, summary.steps)
        return summary

    return Stages(preprocess_text, verify, patch, train, evaluate, export)


@contextlib.contextmanager
def _execution(home: Path) -> Iterator[None]:
    """One execution of the flow run, the only one that goes on.

    Task runs of earlier executions end: Prefect leaves them Running. It does not count all
    executions, since one that Resume starts has the number of the one before.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    run = context.flow_run.id
    with get_client(sync_client=True) as client:
        running = newest_running(client, run)
        end_tasks(client, run)
    with executing(str(run), folder_of(home), running), stopped_if_deleted(run):
        yield


def _secret(name: str) -> str:
    try:
        return str(Secret.load(name).get())  # pyright: ignore[reportAttributeAccessIssue]
    except ValueError as missing:
        raise ConfigError(
            f"environment.env names the Secret block {name}, which Prefect's server does not have; "
            "create it under Blocks."
        ) from missing


class ThrottledAPILogHandler(APILogHandler):
    """Passes at most one progress record per `PROGRESS_SECONDS`, and every other record.

    A progress record has `extra={"progress": …}`.
    """

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.next_at = 0.0

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))  # a lone surrogate of a path could not be sent

    def emit(self, record: logging.LogRecord) -> None:
        if FlowRunContext.get() is None:  # another thread, of no run
            return
        if getattr(record, "progress", None) is not None and record.levelno < logging.WARNING:
            now = time.monotonic()
            if now < self.next_at:
                return
            self.next_at = now + PROGRESS_SECONDS
        super().emit(record)


@contextlib.contextmanager
def api_logs() -> Iterator[None]:
    """Inside, what the stages log is also sent to the Prefect API."""
    logger = logging.getLogger("infini_llama")
    handler = ThrottledAPILogHandler()
    level = logger.level
    # In a Prefect worker, no command has set the level.
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
