"""Runs of this machine that the server calls Running although no process executes them; on a real server: tests/integration/prefect."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from itertools import count
from unittest.mock import Mock
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import (
    AwaitingRetry,
    Cancelling,
    Completed,
    Paused,
    Pending,
    Running,
    Scheduled,
)

from infini_llama.flows import executions
from infini_llama.flows.executions import Execution, register
from infini_llama.flows.lost_runs import LostRuns, flow_processes
from infini_llama.tasks.storage.locks import Lock, lock_holder

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
SECONDS = count()
UNPRIVILEGED = [
    "setpriv",
    "--bounding-set",
    "-dac_override,-dac_read_search,-fowner,-chown",
]
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"),
    reason="as root alone, files of two users can be made",
)
FORGET = """
import sys
from pathlib import Path
from unittest.mock import Mock
from uuid import UUID, uuid4
from prefect.client.schemas.objects import FlowRun
from prefect.states import Completed
from infini_llama.flows.lost_runs import LostRuns

runs = [FlowRun(id=UUID(run), flow_id=uuid4(), state=Completed()) for run in sys.argv[2:]]
client = Mock(read_flow_runs=lambda **_: runs, read_task_runs=lambda **_: [])
LostRuns(Path(sys.argv[1])).mark(client, at_once=True)
"""


def aged(state: State) -> State:
    """A state of long ago, after those that were made so before."""
    return state.model_copy(
        update={"timestamp": LONG_AGO + timedelta(seconds=next(SECONDS))}
    )


class Records:
    """What a server has of flow runs, and what is set there."""

    def __init__(self) -> None:
        self.states: dict[UUID, list[State]] = {}
        self.forced: dict[UUID, str] = {}
        self.client = Mock(
            read_flow_runs=self.read,
            read_flow_run=self.read_one,
            read_flow_run_states=self.states.__getitem__,
            set_flow_run_state=self.set,
            read_task_runs=Mock(return_value=[]),
        )

    def add(self, *states: State) -> UUID:
        run = uuid4()
        self.states[run] = list(states)
        return run

    def read(self, flow_run_filter) -> list[FlowRun]:
        return [
            self.read_one(run) for run in flow_run_filter.id.any_ if run in self.states
        ]

    def read_one(self, run: UUID) -> FlowRun:
        state = self.states[run][-1]
        return FlowRun(
            id=run, flow_id=uuid4(), name=str(run), state=state, state_id=state.id
        )

    def set(self, run: UUID, state: State, force: bool) -> None:
        assert force
        self.forced[run] = state.name or ""


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def lost(tmp_path) -> LostRuns:
    return LostRuns(tmp_path)


def test_runs_of_the_folder_without_a_process_are_marked_and_no_others(
    records, lost, tmp_path
):
    running = records.add(aged(Running()))
    cancelling = records.add(aged(Running()), aged(Cancelling()))
    pending = records.add(aged(Pending()))
    starting = records.add(Pending())
    held = records.add(aged(Running()))
    records.add(aged(Running()))  # of another program: not in the folder
    for run in (running, cancelling, pending, starting, held):
        register(str(run), tmp_path, "")
    with Lock(tmp_path / str(held)):
        lost.mark(records.client, at_once=True)
    assert records.forced == {
        running: "Crashed",
        cancelling: "Cancelled",
        pending: "Crashed",
    }


def test_a_run_is_lost_if_two_looks_find_no_process(records, lost, tmp_path):
    run = records.add(aged(Running()))
    register(str(run), tmp_path, "")
    lost.mark(records.client)
    assert not records.forced
    lost.mark(records.client)
    assert records.forced == {run: "Crashed"}


def test_a_run_that_ends_while_it_is_looked_at_is_not_marked(records, lost, tmp_path):
    run = records.add(aged(Running()))
    register(str(run), tmp_path, "")
    before = records.read_one(run)
    records.states[run].append(Completed())
    records.client.read_flow_runs = Mock(return_value=[before])
    lost.mark(records.client, at_once=True)
    assert not records.forced


def test_a_run_that_is_deleted_while_it_is_executed_is_logged(
    records, lost, tmp_path, caplog
):
    run = records.add(aged(Running()))
    with Lock(tmp_path / str(run)):
        register(str(run), tmp_path, "")
        lost.mark(records.client)
        del records.states[run]
        lost.mark(records.client)
        lost.mark(records.client)
    assert caplog.text.count(f"{run} was deleted on the server") == 1


def test_a_run_that_is_over_or_suspended_is_forgotten(records, lost, tmp_path):
    for state in (Completed(), Paused(), AwaitingRetry()):
        register(str(records.add(aged(Running()), state)), tmp_path, "")
    lost.mark(records.client, at_once=True)
    assert not records.forced and not list(tmp_path.iterdir())


def test_tasks_of_a_run_that_is_over_or_suspended_are_ended(records, lost, tmp_path):
    """A suspended run may be cancelled next, with nothing to execute it again."""
    tasks = [Mock(), Mock()]
    records.client.read_task_runs = Mock(side_effect=[[task] for task in tasks])
    for state in (Completed(), Paused()):
        register(str(records.add(aged(Running()), state)), tmp_path, "")
    lost.mark(records.client, at_once=True)
    ended = {call.args[0] for call in records.client.set_task_run_state.call_args_list}
    assert ended == {task.id for task in tasks}


@as_root
def test_a_run_of_the_hidden_home_folder_of_another_user_is_left_alone_in_a_copy(
    tmp_path,
):
    run, home = str(uuid4()), tmp_path / "home"
    register(run, home, "")
    copy = shutil.copytree(home, tmp_path / "copy")
    os.chown(home, 1000, 1000)
    home.chmod(0o700)
    is_of = (
        "import sys; from infini_llama.flows.executions import *; file = Path(sys.argv[1]); "
        "print(Execution.model_validate_json(file.read_bytes()).is_of(file))"
    )
    command = [*UNPRIVILEGED, sys.executable, "-c", is_of, str(copy / run)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_run_that_is_over_in_the_folder_of_another_user_keeps_its_file(
    tmp_path, mode
):
    folder = tmp_path / "flow-runs"
    runs = [str(uuid4()), str(uuid4())]
    for run in runs:
        register(run, folder, "")
        os.chown(folder / run, 1000, 1000)
    os.chown(folder, 1000, 1000)
    folder.chmod(mode)
    done = subprocess.run(
        [*UNPRIVILEGED, sys.executable, "-c", FORGET, str(folder), *runs],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == set(runs)


def test_a_run_that_another_machine_executes_is_left_alone(records, lost, tmp_path):
    """It is executed again there, or in a home folder that both machines share."""
    here = records.add(
        aged(Scheduled()), aged(Running()), aged(AwaitingRetry()), aged(Pending())
    )
    elsewhere = records.add(
        aged(Scheduled()), aged(Running()), AwaitingRetry(), aged(Pending())
    )
    register(str(here), tmp_path, str(records.states[here][2].id))
    register(str(elsewhere), tmp_path, str(records.states[elsewhere][0].id))
    shared = records.add(aged(Running()))
    file = tmp_path / str(shared)
    other = Execution(
        host=f"not-{socket.gethostname()}", kernel="another", file=str(file)
    )
    file.write_text(other.model_dump_json())
    lost.mark(records.client, at_once=True)
    assert records.forced == {here: "Crashed"}
    assert (
        not (tmp_path / str(elsewhere)).exists() and (tmp_path / str(shared)).exists()
    )


def test_a_run_of_a_container_that_had_another_host_name_is_marked(
    records, lost, tmp_path
):
    run = records.add(aged(Running()))
    register(str(run), tmp_path, "")
    file = tmp_path / str(run)
    record = Execution.model_validate_json(file.read_bytes())
    file.write_text(
        record.model_copy(update={"host": "0123456789ab"}).model_dump_json()
    )
    lost.mark(records.client, at_once=True)
    assert records.forced == {run: "Crashed"}


def test_a_run_of_the_home_folder_that_this_one_is_a_copy_of_is_left_alone(
    records, tmp_path
):
    run = records.add(aged(Running()))
    home = tmp_path / "home"
    register(str(run), home, "")
    copy = LostRuns(shutil.copytree(home, tmp_path / "copy"))
    copy.mark(records.client, at_once=True)
    assert not records.forced and (copy.folder / str(run)).exists()
    LostRuns(home.rename(tmp_path / "moved")).mark(records.client, at_once=True)
    assert records.forced == {run: "Crashed"}


def test_a_run_that_is_killed_before_its_flow_function_is_marked(
    records, lost, tmp_path
):
    """Its process has the lock since its start, and its worker has registered it before."""
    run = records.add(aged(Scheduled()), aged(Pending()))
    register(str(run), tmp_path, str(records.states[run][0].id))
    killed = f"from infini_llama.flows.executions import *; hold({str(run)!r}, Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", killed], check=True)
    lost.mark(records.client, at_once=True)
    assert records.forced == {run: "Crashed"}


def test_a_run_that_waits_for_the_process_before_it_holds_the_lock_that_others_see(
    tmp_path, monkeypatch
):
    """A process that ends for a suspension removes the file."""
    monkeypatch.setattr(executions, "_locked_runs", {})
    file = tmp_path / "run"
    before = Lock(file).__enter__()
    following = threading.Thread(target=executions.hold, args=("run", tmp_path))
    following.start()
    time.sleep(0.3)  # it waits for the lock
    file.unlink()
    before.__exit__()
    following.join()
    assert lock_holder(file) is not None
    executions._locked_runs["run"].__exit__()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_the_process_of_a_run_is_found_until_it_ends():
    run, environment = uuid4(), {"MARK": "a"}
    environment |= os.environ | {"PREFECT__FLOW_RUN_ID": str(run)}
    with subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"  # its environment is complete
        assert flow_processes("MARK=a") == {process.pid: run}
        assert run in flow_processes().values()
        assert run not in flow_processes("MARK=b").values()
    assert run not in flow_processes().values()
