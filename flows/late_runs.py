"""Scheduled runs that no worker has taken in time, as after an outage: by default only the newest of each schedule is executed."""

import logging
import os
from uuid import UUID

from prefect import State
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.runtime import flow_run
from prefect.states import Cancelled
from prefect.types._datetime import now

POLICY_VARIABLE = "INFINI_LLAMA_LATE_RUNS"  # set in the job variables of a deployment from deployment.late_runs
log = logging.getLogger("infini_llama.prefect")


def superseded() -> State | None:
    """The final state of this flow run if a later run of its schedule is due as well; None if it is to be executed.

    The other late runs of the schedule are cancelled at once, so that no process is started for them.
    """
    if os.environ.get(POLICY_VARIABLE) != "newest" or not flow_run.id:
        return None
    with get_client(sync_client=True) as client:
        this = client.read_flow_run(UUID(flow_run.id))
        if _schedule(this) is None or this.run_count > 1:  # a person started it, or started it again
            return None
        due = [run for run in _waiting(client, this) if run.expected_start_time and run.id != this.id]
        if not due:
            return None
        *older, newest = sorted(due, key=lambda run: run.expected_start_time or now("UTC"))
        state = Cancelled(
            message=f"Skipped: the run of the same schedule for {newest.expected_start_time} is due as well."
        )
        for run in older:
            client.set_flow_run_state(run.id, state)
    log.warning("%d late run(s) of this schedule are skipped; only the newest is executed", 1 + len(older))
    return state


def _waiting(client: SyncPrefectClient, this: FlowRun) -> list[FlowRun]:
    """Runs of the schedule of `this` that are due after it and have not started."""
    wanted = FlowRunFilter.model_validate(
        {
            "deployment_id": {"any_": [this.deployment_id]},
            "state": {"type": {"any_": ["SCHEDULED"]}},
            "expected_start_time": {"after_": this.expected_start_time, "before_": now("UTC")},
        }
    )
    found = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_DESC)
    return [run for run in found if _schedule(run) == _schedule(this)]


def _schedule(run: FlowRun) -> UUID | None:
    return run.created_by.id if run.created_by and run.created_by.type == "SCHEDULE" else None
