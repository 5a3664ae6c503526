"""The end of flow runs of this machine that have lost their process.

A run in the folder of `executions` whose file is not locked has no process, although the server may
call it Pending, Running or Cancelling. Runs of other programs, machines and home folders are not in
the folder, or their file is of an execution that is over.

Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#16746, open: a run whose worker is killed
stays Running. Test: `test_a_worker_that_is_stopped_reports_nothing_of_its_runs`.
"""

import contextlib
import logging
import re
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Crashed, Scheduled
from prefect.types._datetime import now  # private to Prefect 3.9.1

from infini_llama.flows.executions import (
    Execution,
    end_tasks,
    free_slot_of_deleted_deployment,
    newest_scheduled,
)
from infini_llama.flows.workarounds.suspension import confirm_suspensions
from infini_llama.tasks.storage.locks import lock_holder

# States of a flow run that should have a process.
ACTIVE = ["PENDING", "RUNNING", "CANCELLING"]
# That a busy machine may need to start the process of a pending run.
STARTING = timedelta(minutes=1)
MOST_IDS = 100  # of a filter; as documented, the server returns at most 200 runs
log = logging.getLogger("infini_llama.serve")


def forget_if_reported(run: UUID, folder: Path) -> None:
    """Remove the file of a run whose process has ended, if the server knows of the end.

    Another machine may execute the run next. Otherwise, it is marked as lost.
    """
    with get_client(sync_client=True) as client:
        current = client.read_flow_run(run)
        if current.state is not None and current.state.type.value not in ACTIVE:
            _remove_file(client, current, folder)


def _remove_file(client: SyncPrefectClient, run: FlowRun, folder: Path) -> None:
    if run.state is not None and run.state.type.value not in ACTIVE:
        end_tasks(client, run.id)
    # The folder may be another user's, who then forgets the run.
    with contextlib.suppress(PermissionError):
        (folder / str(run.id)).unlink(missing_ok=True)


class LostRuns:
    """Finds flow runs in a folder that have lost their process.

    Args:
        folder: see `folder_of`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.suspects: set[UUID] = set()
        self.known: set[UUID] = set()

    def mark(self, client: SyncPrefectClient, *, at_once: bool = False) -> None:
        """Mark lost runs, and forget those whose end the server knows.

        A run that a worker had not begun has done nothing, and is scheduled again; others are
        crashed, or cancelled if they were to be.

        Args:
            at_once: otherwise, a run is lost if it was without a process in the call before, too:
                its worker may be about to report what has happened.
        """
        lost: set[UUID] = set()
        runs = self._runs(client)
        self._log_deleted({run.id for run in runs})
        for run in runs:
            if self._is_locked(run.id) or run.state is None:
                continue
            if run.state.is_pending() and now("UTC") - run.state.timestamp < STARTING:
                continue
            with contextlib.suppress(ObjectNotFound):  # it was deleted since
                if run.state.type.value not in ACTIVE or self._is_executed_elsewhere(
                    client, run
                ):
                    _remove_file(client, run, self.folder)
                    continue
                lost.add(run.id)
                if at_once or run.id in self.suspects:
                    self._mark(client, run)
        self.suspects = lost

    def _mark(self, client: SyncPrefectClient, run: FlowRun) -> None:
        # Its process may have ended, or another one begun, since its state was read.
        if (
            self._is_locked(run.id)
            or client.read_flow_run(run.id).state_id != run.state_id
        ):
            return
        state = _state_of_lost(run)
        log.warning(
            "run %s has lost its process and is marked as %s",
            run.name,
            state.name,
        )
        free_slot_of_deleted_deployment(client, run)
        client.set_flow_run_state(run.id, state, force=True)

    def _log_deleted(self, there: set[UUID]) -> None:
        """Log which runs are gone from the server while a process executes them.

        The process notices it, too, but its own log is on the page that was deleted.
        """
        for run in self.known - there:
            if self._is_locked(run):
                log.warning(
                    "the flow run %s was deleted on the server; its process saves a checkpoint "
                    "and ends",
                    run,
                )
        self.known = there

    def _runs(self, client: SyncPrefectClient) -> list[FlowRun]:
        """The server's runs that are in the folder, by this machine."""
        ids: list[UUID] = []
        for path in self.folder.glob("*-*-*-*-*"):
            record = _read(path)
            if record is not None and record.is_of(path):
                ids.append(UUID(path.name))
        runs: list[FlowRun] = []
        for first in range(0, len(ids), MOST_IDS):
            named = FlowRunFilter.model_validate(
                {"id": {"any_": ids[first : first + MOST_IDS]}}
            )
            runs += client.read_flow_runs(flow_run_filter=named)
        return runs

    def _is_locked(self, run: UUID) -> bool:
        return lock_holder(self.folder / str(run)) is not None

    def _is_executed_elsewhere(self, client: SyncPrefectClient, run: FlowRun) -> bool:
        """Whether another machine may execute the run: it was scheduled again since."""
        record = _read(self.folder / str(run.id))
        return record is None or record.scheduled != newest_scheduled(client, run.id)


def _state_of_lost(run: FlowRun) -> State:
    """The state of a run that has lost its process."""
    is_pending = run.state is not None and run.state.is_pending()
    if is_pending and run.deployment_id is not None:  # a worker begins it
        return Scheduled(message="The process of the run was killed before it began.")
    is_cancelling = run.state is not None and run.state.is_cancelling()
    end = Cancelled if is_cancelling else Crashed
    return end(
        message="The process of the run was killed. Retry executes the run again."
    )


def correct_states(lost: LostRuns, *, at_once: bool = False) -> None:
    """Confirm suspensions and mark lost runs, as far as the server responds."""
    try:
        # Without retries: the server may have ended, and `serve` starts it again.
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True) as client,
        ):
            confirm_suspensions(client)
            lost.mark(client, at_once=at_once)
    except (HTTPError, RuntimeError) as fault:  # the server is busy or has just ended
        log.debug("the state of the runs cannot be checked (%s)", fault)


def _read(path: Path) -> Execution | None:
    try:
        return Execution.model_validate_json(path.read_bytes())
    except (OSError, ValueError):  # it is gone, or being written
        return None


def flow_processes(variable: str = "") -> dict[int, UUID]:
    """Processes of this machine that execute a flow run for a worker, each with the ID of its run.

    Prefect 3.9.1 keeps no list of them. Its worker sets PREFECT__FLOW_RUN_ID, which is private. No
    issue upstream is known.

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
            rb"PREFECT__FLOW_RUN_ID=([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})",
            environment,
        )
        if run and variable.encode() in environment:
            runs[int(process.name)] = UUID(run[1].decode())
    return runs
