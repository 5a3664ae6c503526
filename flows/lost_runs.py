"""Flow runs that this machine executes, and the end of those that have lost their process.

The process that executes a flow run holds a lock on `<home>/prefect/flow-runs/<ID of the run>`. A
run in that folder whose file is not locked has no process, although the server may call it Pending,
Running or Cancelling. Runs of other programs, machines and home folders are not in the folder, or
their file is of an execution that is over.
"""

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound, Pause
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Crashed
from prefect.types._datetime import now

from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.locks import Lock, lock_holder

# Environment variable of the worker of `serve` and of its runs, whose home may be another one.
FOLDER = "INFINI_LLAMA_FLOW_RUNS"
# States of a flow run that should have a process.
ACTIVE = ["PENDING", "RUNNING", "CANCELLING"]
# States of a task run; one that awaits its retry is scheduled.
UNFINISHED = ["RUNNING", "PENDING", "SCHEDULED"]
# That a busy machine may need to start the process of a pending run.
STARTING = timedelta(minutes=1)
# Seconds that the process before may take to end, when a run is resumed.
ENDING = 600.0
MOST_IDS = 100  # of a filter; the server returns at most 200 runs
_locked_runs: dict[str, Lock] = {}  # by the ID of a run that this process executes
log = logging.getLogger("infini_llama.serve")


class Execution(Record):
    """What this machine has begun to execute.

    Attributes:
        running: ID of the state by which the run became Running; "" before that.
    """

    host: str
    running: str = ""


def folder_of(home: Path) -> Path:
    """The folder with a file for each flow run that this machine executes."""
    return Path(os.environ.get(FOLDER) or home / "prefect" / "flow-runs")


def register(run: str, folder: Path, running: str = "") -> None:
    """Note that this machine executes the flow run, or is about to start a process for it."""
    folder.mkdir(parents=True, exist_ok=True)
    record = Execution(host=socket.gethostname(), running=running)
    (folder / run).write_text(record.model_dump_json())


def hold(run: str, folder: Path) -> None:
    """Lock the file of a flow run that this process executes, until this process ends.

    Raises:
        Busy: another process executes it, and does not end.
    """
    if run not in _locked_runs:
        lock = Lock(folder / run, wait=ENDING)
        _locked_runs[run] = (
            lock.__enter__()
        )  # not left: the end of a flow is reported after its function
        register(run, folder)


@contextlib.contextmanager
def executing(run: str, folder: Path, running: str) -> Iterator[None]:
    """Inside, this process is known to execute the flow run.

    Args:
        running: see `newest_running`.

    Raises:
        Busy: as `hold`.
    """
    hold(run, folder)
    register(run, folder, running)
    try:
        yield
    except Pause:
        # The server has suspended the run before this process heard of it. Another machine may
        # resume it.
        (folder / run).unlink(missing_ok=True)
        raise


def newest_running(client: SyncPrefectClient, run: UUID) -> str:
    """ID of the newest state by which the run became Running; "" if it never did."""
    running = [state for state in client.read_flow_run_states(run) if state.is_running()]
    if not running:
        return ""
    return str(max(running, key=lambda state: state.timestamp).id)


def end_tasks(client: SyncPrefectClient, run: UUID) -> None:
    """Mark unfinished task runs of a flow run as crashed: no process executes them.

    A flow run that is executed again has new task runs; the old ones would stay Running.
    """
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run]}}),
        task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": UNFINISHED}}}),
    )
    for task in tasks:
        message = "This execution is over: the flow run was suspended, or its process was killed."
        client.set_task_run_state(task.id, Crashed(message=message), force=True)


def forget_if_reported(run: UUID, folder: Path) -> None:
    """Remove the file of a run whose process has ended, if the server knows of the end.

    Another machine may execute the run next. Otherwise, it is marked as lost.
    """
    with get_client(sync_client=True) as client:
        current = client.read_flow_run(run)
        if current.state is not None and current.state.type.value not in ACTIVE:
            _remove_file(client, current, folder)


def _remove_file(client: SyncPrefectClient, run: FlowRun, folder: Path) -> None:
    if run.state is not None and run.state.is_final():
        end_tasks(client, run.id)
    (folder / str(run.id)).unlink(missing_ok=True)


class LostRuns:
    """Finds flow runs in a folder that have lost their process.

    Args:
        folder: see `folder_of`.
        is_shared: other machines may execute runs of the server.
    """

    def __init__(self, folder: Path, *, is_shared: bool) -> None:
        self.folder = folder
        self.is_shared = is_shared
        self.suspects: set[UUID] = set()
        self.known: set[UUID] = set()

    def mark(self, client: SyncPrefectClient, *, at_once: bool = False) -> None:
        """Mark lost runs as crashed, and forget those whose end the server knows.

        Args:
            at_once: otherwise, a run is lost if it was without a process in the call before, too:
                its worker may be about to report what has happened.
        """
        lost: set[UUID] = set()
        runs = self._runs(client)
        self._log_deleted({run.id for run in runs})
        for run in runs:
            if self._is_locked(run.id) or run.state is None or _is_starting(run):
                continue
            with contextlib.suppress(ObjectNotFound):  # it was deleted since
                if run.state.type.value not in ACTIVE or self._is_executed_elsewhere(client, run):
                    _remove_file(client, run, self.folder)
                    continue
                lost.add(run.id)
                if at_once or run.id in self.suspects:
                    self._mark(client, run)
        self.suspects = lost

    def _mark(self, client: SyncPrefectClient, run: FlowRun) -> None:
        # Its process may have ended, or another one begun, since its state was read.
        if self._is_locked(run.id) or client.read_flow_run(run.id).state_id != run.state_id:
            return
        state = _end_of(run)
        log.warning(
            "run %s of an earlier execution has lost its process, and is marked as %s",
            run.name,
            state.name,
        )
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
            # Another machine's locks are not seen on some filesystems.
            if record and record.host == socket.gethostname():
                ids.append(UUID(path.name))
        runs: list[FlowRun] = []
        for first in range(0, len(ids), MOST_IDS):
            named = FlowRunFilter.model_validate({"id": {"any_": ids[first : first + MOST_IDS]}})
            runs += client.read_flow_runs(flow_run_filter=named)
        return runs

    def _is_locked(self, run: UUID) -> bool:
        return lock_holder(self.folder / str(run)) is not None

    def _is_executed_elsewhere(self, client: SyncPrefectClient, run: FlowRun) -> bool:
        """Whether another machine executes the run: it has become Running again since."""
        if not self.is_shared:
            return False
        record = _read(self.folder / str(run.id))
        return record is None or record.running != newest_running(client, run.id)


def mark_lost_runs(home: Path, *, is_shared: bool) -> None:
    """Mark the runs of this home folder that have lost their process, as far as possible."""
    try:
        # Without retries: the server has just responded.
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True) as client,
        ):
            LostRuns(folder_of(home), is_shared=is_shared).mark(client, at_once=True)
    except (HTTPError, RuntimeError) as fault:
        log.debug("the states of earlier runs cannot be corrected (%s)", fault)


def _read(path: Path) -> Execution | None:
    try:
        return Execution.model_validate_json(path.read_bytes())
    except (OSError, ValueError):  # it is gone, or being written
        return None


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
