"""The flow: raw text to a trained model in four stages, and its evaluation and export if requested.

The stages pass typed records.
"""

import logging
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from prefect import State, task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.secrets import with_blocks
from infini_llama.flows import pipeline
from infini_llama.flows.closing_card import closing_card
from infini_llama.flows.executions import execution
from infini_llama.flows.form import AS_CONFIG, with_changes
from infini_llama.flows.pipeline import Stages, run_stages
from infini_llama.flows.scheduled import Changes, due, superseded, with_schedule
from infini_llama.flows.settings import TAG
from infini_llama.flows.starts import Start
from infini_llama.flows.workarounds.api_logs import api_logs
from infini_llama.flows.workarounds.flow import PipelineFlow
from infini_llama.flows.workarounds.slot import keep_slots
from infini_llama.tasks.patch_environment.task import patch_environment
from infini_llama.tasks.preprocess.task import preprocess
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.plan import PlannedEnvironment
from infini_llama.tasks.records.summary import RunSummary
from infini_llama.tasks.report.artifact_keys import ArtifactKeys
from infini_llama.tasks.runs.lost_requests import no_request_lost
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.retries import retries_for
from infini_llama.tasks.train.task import with_retries
from infini_llama.tasks.verify_data.task import verify_data

log = logging.getLogger("infini_llama.prefect")
# In each process that executes the flow: a worker of Prefect's loads no other module of this
# program.
keep_slots()


def _show_name(name: str) -> None:
    """Give the flow run the name of its run.

    Prefect uses `flow_run_name` before it calls the flow function. The name is only known in it,
    since another start may have taken the one of the configuration.
    """
    if flow_run.name != name:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(str(flow_run.id)), name=name)


def tags_of(config: PipelineConfig) -> list[str]:
    """Tags of a run, for filters and automations.

    A deployment's runs have those of the deployment.
    """
    sources = {source.source for source in config.data.sources} or {config.data.source}
    from_sources = [f"data:{name}" for name in sorted(sources)]
    return [TAG, f"attention:{config.model.attention}", *from_sources]


@partial(
    PipelineFlow,
    name="pretrain",
    persist_result=True,
    result_serializer="json",
    retries=0,
)
def pretrain(
    config: Annotated[PipelineConfig, AS_CONFIG],
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
    base = config
    config = with_schedule(base, schedules or {})
    config = with_changes(config, changes, base) if changes else config
    # All executions of a flow run belong to one start.
    config = Start(id=str(flow_run.id), due=due(config.runtime.name)).claim(config)
    _show_name(config.runtime.name)
    config = with_blocks(config, _secret)
    for place, kind in (not_text or {}).items():
        config.data.leave_out(place, kind)
    name = config.runtime.name
    page = ArtifactKeys(name, deployment.name or name)
    with (
        no_request_lost(TerminationSignal),
        api_logs(),
        execution(config.runtime.home),
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


def _tasks(page: ArtifactKeys) -> Stages:
    """The stages as Prefect tasks, which write their cards on the run's page."""

    def train(
        config: PipelineConfig,
        dataset: DatasetRef,
        environment: PlannedEnvironment,
        invocation: str,
        on_read: bool,
    ) -> RunSummary:
        retries = retries_for(config.runtime)
        with (
            closing_card(RunFolder.of(config.runtime).path, page) as ended,
            retries.until_end(),
        ):
            summary = with_retries(retries)(
                config, dataset, environment, invocation, on_read, page
            )
            done = "had already finished" if summary.already_finished else "finished"
            ended(f"Training {done}: {summary.steps:,} steps.")
        if not summary.already_finished:
            log.info("run %s is finished: %d steps", page.run, summary.steps)
        return summary

    return Stages(
        # As documented, the state that the task returns has the result.
        preprocess=lambda preparation: preprocess(
            preparation, page, return_state=True
        ).result(),
        verify=lambda dataset, home, level: verify_data(dataset, home, level, page),
        patch_environment=lambda config, vocab_size: patch_environment(
            config, vocab_size, page
        ),
        train=train,
        evaluate=evaluate,
        export=export,
    )


def _secret(name: str) -> str:
    try:
        return str(Secret.load(name).get())  # pyright: ignore[reportAttributeAccessIssue]
    except ValueError as missing:
        raise ConfigError(
            f"environment.env names the Secret block {name}, which Prefect's server does not have; "
            "create it under Blocks."
        ) from missing
