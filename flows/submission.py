"""`infini-llama submit`: a run of a deployment, started from here and worked off by whoever serves its work pool."""

import logging
import time
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import LogSort
from prefect.exceptions import ObjectNotFound
from prefect.utilities.urls import url_for

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows.deployments import parameters_of
from infini_llama.flows.pipeline import run_name
from infini_llama.flows.pretrain import pretrain

POLL_SECONDS = 2.0
log = logging.getLogger("infini_llama.submit")


def submit(config: PipelineConfig, deployment: str, file: str) -> dict[str, Any]:
    """Creates a run; returns its "id", "name", "state", "deployment" and, where a UI is known, "url".

    Raises:
        ConfigError: the server has no such deployment, or the configuration is not one of its flow.
    """
    name = f"{pretrain.name}/{deployment}"
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(name)
        except ObjectNotFound:
            known = ", ".join(sorted(one.name for one in client.read_deployments())) or "none"
            raise ConfigError(
                f"the server at {client.api_url} has no deployment {name}; 'infini-llama deploy {file}' makes it, or name one with "
                f"--deployment (there: {known})."
            ) from None
        made = client.create_flow_run_from_deployment(
            found.id, parameters=parameters_of(config), name=run_name(config.runtime.name)
        )
        return _record(made) | {"deployment": name}


def watch(run: str) -> dict[str, Any]:
    """Follows a run's log until it ends; returns its record, with "exit_code" 70 or 75 where it did not complete."""
    run_id, told = UUID(run), 0
    with get_client(sync_client=True) as client:
        while True:
            flow_run = client.read_flow_run(run_id)  # before its log, so that the last lines are not missed
            told = _tell(client, run_id, told)
            state = flow_run.state
            if state is not None and (state.is_final() or state.is_paused()):
                stopped = state.is_cancelled() or state.is_paused()
                ended = {} if state.is_completed() else {"message": state.message, "exit_code": 75 if stopped else 70}
                return _record(flow_run) | ended
            time.sleep(POLL_SECONDS)


def _tell(client: SyncPrefectClient, run: UUID, told: int) -> int:
    of_the_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
    lines = client.read_logs(of_the_run, offset=told, sort=LogSort.TIMESTAMP_ASC)
    for line in lines:
        log.log(line.level, "%s", line.message)
    return told + len(lines)


def _record(flow_run: FlowRun) -> dict[str, Any]:
    state = flow_run.state.name if flow_run.state else "Scheduled"
    return {"id": str(flow_run.id), "name": flow_run.name, "state": state, "url": url_for(flow_run)}
