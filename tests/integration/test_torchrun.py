"""What torchrun needs of a machine, and what it leaves behind."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from infini_llama.configs.errors import ExitCode, PipelineError
from infini_llama.tasks.records.status import Endpoint
from infini_llama.tasks.runs.status import status_path, write_status
from infini_llama.tasks.storage.record_files import read_fields, write_fields
from infini_llama.tasks.train import launch
from infini_llama.tasks.train.launch import (
    TorchrunWorkers,
    spawn,
    torchrun_command,
    torchrun_environment,
)
from infini_llama.tasks.train.rendezvous import LOOPBACK, host_rendezvous
from support.hosts import can_make_hosts, on_nameless_host
from support.records import make_plan


def start(folder: Path, command: list[str], variables: dict[str, str]) -> None:
    """Run torchrun with two workers, of which one or both write their status and fail, since their attempt has no plan."""
    done = subprocess.run(
        command,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=folder,
    )
    assert any((folder / f"status-{rank}.json").exists() for rank in (0, 1)), (
        f"no worker was started: {done.stderr}"
    )


def command_of(folder: Path) -> list[str]:
    plan = make_plan(nproc_per_node=2)
    return torchrun_command(folder, plan, host_rendezvous(folder, plan), is_host=True)


def test_torchrun_leaves_nothing_in_the_folder_of_temporary_files(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    start(tmp_path, command_of(tmp_path), {"TMPDIR": str(temporary)})
    assert [path.name for path in temporary.iterdir()] == []


def test_a_port_that_another_program_takes_is_named(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        plan = make_plan(nproc_per_node=2, port=port)
        with pytest.raises(PipelineError, match=r"environment\.master_port"):
            host_rendezvous(tmp_path, plan)
        # As if it had been free a moment before.
        endpoint = Endpoint(address=LOOPBACK, port=port, host="here")
        process = spawn(
            torchrun_command(tmp_path, plan, endpoint, is_host=True),
            tmp_path / "torchrun.log",
            torchrun_environment({}),
            [],
        )
        process.wait(100)
    assert "master_port" in TorchrunWorkers(process, tmp_path, 2, 1).hint()


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("  raise error\nValueError: \nno such log: x, see\nall, aot\n\n", "ValueError: no such log: x, see"),
        ("a.b.ChildFailedError: \n====\n traceback : Signal 4 (SIGILL)\n====\n", "traceback : Signal 4 (SIGILL)"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_cause_for_which_no_worker_started_is_what_torchrun_printed(
    tmp_path, log, cause
):
    (tmp_path / "torchrun.log").write_text(log)
    workers = TorchrunWorkers(subprocess.Popen(["true"]), tmp_path, 1, 1)
    workers.process.wait()
    assert workers.hint() == cause


def test_a_rank_that_sigkill_does_not_end_is_named_and_left(
    tmp_path, monkeypatch, caplog
):
    """As one that waits inside a driver; here, the signal is not sent."""
    workers = TorchrunWorkers(subprocess.Popen(["true"]), tmp_path, 1, 1)
    rank = subprocess.Popen(["sh", "-c", "sleep 100; :", str(tmp_path)])
    write_status(tmp_path, 0, "running", ExitCode.UNEXPECTED)
    path = status_path(tmp_path, 0)
    fields = {"pid": rank.pid, "parent": workers.process.pid}
    write_fields(path, read_fields(path) | fields)
    with monkeypatch.context() as patched:
        patched.setattr(launch, "send", lambda *_: None)
        patched.setattr(launch, "KILL_SECONDS", 0.1)
        workers.end()
    assert f"process {rank.pid}" in caplog.text and rank.poll() is None
    workers.end()
    assert rank.wait(10) == -signal.SIGKILL


@pytest.mark.skipif(
    not can_make_hosts(), reason="needs user namespaces, iproute2 and util-linux"
)
def test_torchrun_does_not_look_up_the_name_of_its_host(tmp_path):
    start(
        tmp_path,
        on_nameless_host(tmp_path, command_of(tmp_path), hosts="::1 localhost\n"),
        {},
    )
    assert "nosuch" not in (tmp_path / "name-server.log").read_text()
