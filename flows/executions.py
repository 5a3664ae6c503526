"""One execution of a flow run by this process, from its registration to its end.

The process that executes a flow run holds a lock on `<home>/prefect/flow-runs/<ID of the run>`, so
that `lost_runs` sees whether a run of this machine still has its process.
"""

import contextlib
import contextvars
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, Pause, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed

from infini_llama.flows.workarounds.suspension import confirm
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.runs.lost_requests import stop_requested
from infini_llama.tasks.storage.locks import Busy, Lock, running_kernel
from infini_llama.tasks.train.task import lasting_suspension

# Environment variable with the folder of `folder_of`. `serve` sets it for its workers and their
# runs, since the home of a run may be another folder than that of `serve`.
FOLDER = "INFINI_LLAMA_FLOW_RUNS"
# States of a task run; one that awaits its retry is scheduled.
UNFINISHED = ["RUNNING", "PENDING", "SCHEDULED"]
# Seconds that the process before may take to end, when a run is resumed.
ENDING = 600.0
POLL_SECONDS = 10.0
# Answers in a row that a run was deleted: a single one may be of a proxy, or of a server that
# starts. This is caution; no fault of Prefect is known.
MISSING = 2
# Answers in a row that a run is cancelled. By the last one, a worker that is there has sent its own
# stop request, and a second one would break off the checkpoint.
CANCELLED = 3
_locked_runs: dict[str, Lock] = {}  # by the ID of a run that this process executes
log = logging.getLogger("infini_llama.prefect")


class Execution(Record):
    """What a machine has begun to execute.

    Attributes:
        kernel: see `running_kernel`; containers of a machine share it, and their locks.
        file: absolute path of the record.
        scheduled: see `newest_scheduled`.
    """

    host: str
    kernel: str
    file: str
    scheduled: str = ""

    def is_of(self, file: Path) -> bool:
        """Whether this machine executes the run, and locks `file`, which the record was read from.

        Not on another machine, whose locks are not seen on some filesystems, and not in the copy
        of a home folder that is still there.
        """
        if self.host != socket.gethostname() and self.kernel != running_kernel():
            return False
        try:
            return file.samefile(self.file)
        except (FileNotFoundError, NotADirectoryError):  # the folder was moved
            return True
        except OSError:  # it may still be there, where this user may not look
            return False


def folder_of(home: Path) -> Path:
    """The folder with a file for each flow run that this machine executes."""
    return Path(os.environ.get(FOLDER) or home / "prefect" / "flow-runs")


def register(run: str, folder: Path, scheduled: str) -> None:
    """Note that this machine executes the flow run, or is about to start a process for it.

    Args:
        scheduled: see `newest_scheduled`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.absolute() / run
    record = Execution(
        host=socket.gethostname(),
        kernel=running_kernel(),
        file=str(file),
        scheduled=scheduled,
    )
    file.write_text(record.model_dump_json())


def hold(run: str, folder: Path) -> None:
    """Lock the file of a flow run that this process executes, until this process ends.

    With Prefect 3.9.1, a run whose process and worker are killed stays Running
    (PrefectHQ/prefect#16746, open). The lock shows that it still has a process.

    Raises:
        Busy: another process executes it, and does not end.
    """
    if run in _locked_runs:
        return
    file = folder / run
    registered = file.read_bytes() if file.exists() else b""
    # The lock is never released here: Prefect reports the end after the flow function returns.
    _locked_runs[run] = _locked(file)
    file.write_bytes(registered)  # in place of the lock's own record


def _locked(file: Path) -> Lock:
    """The lock of a file that its holder may remove when it ends."""
    while True:
        lock = Lock(file, wait=ENDING).__enter__()
        try:
            lock.check()
        except Busy:
            lock.__exit__()
        else:
            return lock


@contextlib.contextmanager
def execution(home: Path) -> Iterator[None]:
    """Inside, the flow function is executed; it is stopped if its run is deleted or cancelled.

    Raises:
        Busy: as `hold`.
    """
    run = str(flow_run.id)
    folder = folder_of(home)
    with get_client(sync_client=True) as client:
        scheduled = newest_scheduled(client, UUID(run))
        end_tasks(client, UUID(run))
    hold(run, folder)
    register(run, folder, scheduled)
    is_cancelled = threading.Event()
    try:
        with _stopped_by_server(UUID(run), is_cancelled), lasting_suspension():
            yield
    except TerminationSignal:
        if is_cancelled.is_set():
            _end_as_cancelled(UUID(run))
        raise
    except Pause:
        # The server has suspended the run before this process heard of it. Another machine may
        # resume it.
        (folder / run).unlink(missing_ok=True)
        try:
            # See workarounds/suspension.py (Prefect 3.9.1, PrefectHQ/prefect#18653, open).
            with get_client(sync_client=True) as client:
                # The run may be cancelled, and not executed again.
                end_tasks(client, UUID(run))
                confirm(client, client.read_flow_run(UUID(run)))
        except Exception as fault:
            log.warning(
                "the suspension cannot be confirmed (%r); 'infini-llama serve' confirms it as well",
                fault,
            )
        raise


def newest_scheduled(client: SyncPrefectClient, run: UUID) -> str:
    """ID of the newest state by which the run was scheduled; "" if it never was.

    Each execution of a deployment's run has another: also after Retry, and after Resume, which the
    run's `run_count` does not count in Prefect 3.9.1. No issue upstream is known.
    """
    scheduled = [
        state for state in client.read_flow_run_states(run) if state.is_scheduled()
    ]
    if not scheduled:
        return ""
    return str(max(scheduled, key=lambda state: state.timestamp).id)


def end_tasks(client: SyncPrefectClient, run: UUID) -> None:
    """Mark unfinished task runs of a flow run as crashed: no process executes them.

    A flow run that is executed again has new task runs; Prefect 3.9.1 leaves the old ones Running.
    Upstream: PrefectHQ/prefect#19600 would have ended them, and was closed.
    """
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run]}}),
        task_run_filter=TaskRunFilter.model_validate(
            {"state": {"type": {"any_": UNFINISHED}}}
        ),
    )
    for task in tasks:
        message = "This execution is over: the flow run was suspended, or its process was killed."
        client.set_task_run_state(task.id, Crashed(message=message), force=True)


def free_slot_of_deleted_deployment(client: SyncPrefectClient, run: FlowRun) -> None:
    """Free the slot of a limit that a run holds, if its deployment was deleted.

    The server of Prefect 3.9.1 would answer 500 to each further state of the run. No issue upstream
    is known; PrefectHQ/prefect#19845 is about runs that wait for a slot.
    """
    lease = run.state and run.state.state_details.deployment_concurrency_lease_id
    if not lease or run.deployment_id is None:
        return
    try:
        client.read_deployment(run.deployment_id)
    except ObjectNotFound:
        client.release_concurrency_slots_with_lease(lease)


@contextlib.contextmanager
def _stopped_by_server(run: UUID, is_cancelled: threading.Event) -> Iterator[None]:
    """Inside, this process is stopped once its flow run is deleted or cancelled on the server.

    The slot of a deleted run is free at once, another run may start beside it, and nothing on the
    server can stop it any more. Upstream: PrefectHQ/prefect#7753 reports it of Prefect 2; 3.9.1
    does the same.

    A run is cancelled by the worker that has started it. There may be none: a person has started
    the run, or its worker was killed and another one is there, which leaves it alone. Upstream:
    PrefectHQ/prefect#17482, open.

    The stop is a SIGTERM, which Prefect handles in the main thread only.

    Args:
        is_cancelled: set before the stop of a cancelled run.
    """
    ended = threading.Event()
    if threading.current_thread() is threading.main_thread():
        # With Prefect's settings, which name the server.
        watch = contextvars.copy_context().run
        arguments = (_watch, run, ended, is_cancelled)
        threading.Thread(
            target=watch, args=arguments, name="flow-run-state", daemon=True
        ).start()
    try:
        yield
    finally:
        ended.set()


def _watch(run: UUID, ended: threading.Event, is_cancelled: threading.Event) -> None:
    missing = 0
    cancelled = 0
    while missing < MISSING and cancelled < CANCELLED:
        if ended.wait(POLL_SECONDS):
            return
        try:
            with get_client(sync_client=True) as client:
                current = client.read_flow_run(run)
                free_slot_of_deleted_deployment(client, current)
        except ObjectNotFound:
            missing += 1
            continue
        except Exception as fault:  # the server is down, and training goes on
            log.debug("the flow run cannot be read (%r)", fault)
            missing = 0
            continue
        missing = 0
        # A suspended run ends by itself, with a checkpoint.
        if current.state is not None and current.state.is_paused():
            return
        if _is_cancelled(current):
            cancelled += 1
        else:
            cancelled = 0
    # The process ends already, and a second request would break off the checkpoint.
    if stop_requested.is_set():
        return
    if missing:
        log.warning(
            "the flow run %s was deleted on the server; the run is stopped as by a cancellation. "
            "The same command resumes it.",
            run,
        )
    else:
        log.warning(
            "the flow run %s is cancelled on the server, and no worker has stopped it; the run is "
            "stopped. The same command resumes it.",
            run,
        )
        is_cancelled.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _is_cancelled(run: FlowRun) -> bool:
    if run.state is None:
        return False
    return run.state.is_cancelling() or run.state.is_cancelled()


def _end_as_cancelled(run: UUID) -> None:
    """Mark a flow run that this process has stopped as cancelled, as its worker would.

    Without a worker's request, the engine of Prefect 3.9.1 marks a run that ends by SIGTERM as
    crashed, unless it knows it to be final. No issue upstream is known.
    """
    cancelled = Cancelled(message="The run was stopped by its own process.")
    try:
        with get_client(sync_client=True) as client:
            current = client.read_flow_run(run)
            if current.state is not None and current.state.is_cancelling():
                free_slot_of_deleted_deployment(client, current)
                client.set_flow_run_state(run, cancelled)
    except Exception as fault:
        log.warning("the flow run cannot be marked as cancelled (%r)", fault)
        return
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        context.flow_run.state = cancelled
