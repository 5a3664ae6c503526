"""Flow runs and task runs that the server calls Running although their process has ended: they are marked as crashed."""

import logging
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.states import Cancelled, Crashed

UNFINISHED = ["RUNNING", "PENDING", "SCHEDULED"]  # of a task run: one that awaits its retry is scheduled
RUN_ID = b"PREFECT__FLOW_RUN_ID="
log = logging.getLogger("infini_llama.serve")


def crash_tasks(client: SyncPrefectClient, flow_runs: dict[str, object]) -> None:
    """Mark unfinished task runs of these flow runs (a filter of Prefect's API) as crashed: no process executes them."""
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate(flow_runs),
        task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": UNFINISHED}}}),
    )
    for task in tasks:
        client.set_task_run_state(task.id, Crashed(message="The process of the flow run was killed."), force=True)


class LostRuns:
    """Finds lost runs on a server all of whose runs are executed on this machine."""

    def __init__(self) -> None:
        self.suspects: set[UUID] = set()

    def mark(self, client: SyncPrefectClient) -> None:
        """Mark runs as crashed that have had no process in this call and the one before: the first may have come too early."""
        wanted = {"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}, "deployment_id": {"is_null_": False}}
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted))
        alive = executed_runs()
        lost = {run.id: run for run in runs if run.id not in alive}
        for run in (lost[one] for one in self.suspects & lost.keys()):
            log.warning("run %s has lost its process and is marked as crashed", run.name)
            message = "The process of the run was killed. Retry resumes from the newest checkpoint."
            was_cancelled = run.state is not None and run.state.is_cancelling()
            state = Cancelled(message=message) if was_cancelled else Crashed(message=message)
            client.set_flow_run_state(run.id, state, force=True)
        self.suspects = set(lost)
        crash_tasks(client, {"state": {"type": {"any_": ["CRASHED", "CANCELLED", "FAILED"]}}})


def executed_runs() -> set[UUID]:
    """The flow runs that processes of this machine execute for a worker."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
        _, mark, rest = environment.partition(RUN_ID)
        if mark:
            found.add(UUID(rest[:36].decode()))
    return found
