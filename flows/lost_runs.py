"""Mark flow runs and task runs that have lost their process.

The server calls them Pending, Running or Cancelling although no process executes them.
"""

import logging
import re
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled, Crashed
from prefect.types._datetime import now

# States of a flow run that should have a process.
ACTIVE = ["PENDING", "RUNNING", "CANCELLING"]
# States of a task run; one that awaits its retry is scheduled.
UNFINISHED = ["RUNNING", "PENDING", "SCHEDULED"]
# That a busy machine may need to start the process of a pending run.
STARTING = timedelta(minutes=1)
log = logging.getLogger("infini_llama.serve")


def crash_tasks(client: SyncPrefectClient, flow_runs: dict[str, object]) -> None:
    """Mark unfinished task runs of these flow runs as crashed: no process executes them.

    Args:
        flow_runs: a filter of Prefect's API.
    """
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate(flow_runs),
        task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": UNFINISHED}}}),
    )
    for task in tasks:
        client.set_task_run_state(
            task.id, Crashed(message="The process of the flow run was killed."), force=True
        )


class LostRuns:
    """Finds lost runs on a server all of whose runs are executed on this machine."""

    def __init__(self) -> None:
        self.suspects: set[UUID] = set()

    def mark(self, client: SyncPrefectClient) -> None:
        """Mark runs as crashed that have had no process in this call and the one before.

        One call is not enough: it may have come too early.
        """
        active = {"state": {"type": {"any_": ACTIVE}}, "deployment_id": {"is_null_": False}}
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(active))
        executed = set(flow_processes().values())
        lost = {run.id: run for run in runs if run.id not in executed and not _is_starting(run)}
        for suspect in self.suspects & lost.keys():
            run = lost[suspect]
            log.warning("run %s has lost its process and is marked as crashed", run.name)
            client.set_flow_run_state(run.id, _end_of(run), force=True)
        self.suspects = set(lost)
        crash_tasks(client, {"state": {"type": {"any_": ["CRASHED", "CANCELLED", "FAILED"]}}})


def _is_starting(run: FlowRun) -> bool:
    return (
        run.state is not None
        and run.state.is_pending()
        and now("UTC") - run.state.timestamp < STARTING
    )


def _end_of(run: FlowRun) -> State:
    if run.state is not None and run.state.is_cancelling():
        return Cancelled(
            message="The process of the run was killed. Retry resumes from the newest checkpoint."
        )
    if run.state is not None and run.state.is_pending():
        return Crashed(
            message="The process of the run was killed before it began. Retry starts the run."
        )
    return Crashed(
        message="The process of the run was killed. Retry resumes from the newest checkpoint."
    )


def flow_processes(variable: str = "") -> dict[int, UUID]:
    """Processes of this machine that execute a flow run for a worker, each with the ID of its run.

    Args:
        variable: NAME=VALUE that the environment of the process contains.
    """
    runs = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
        run = re.search(
            rb"PREFECT__FLOW_RUN_ID=([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", environment
        )
        if run and variable.encode() in environment:
            runs[int(process.name)] = UUID(run[1].decode())
    return runs
