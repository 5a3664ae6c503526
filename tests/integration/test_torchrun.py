"""What torchrun needs of a machine, and what it leaves behind."""

import os
import subprocess
from pathlib import Path

import pytest

from infini_llama.tasks.train.launch import torchrun
from infini_llama.tasks.train.rendezvous import host_rendezvous
from support.hosts import can_make_hosts, on_nameless_host
from support.records import make_plan


def start(folder: Path, command: list[str], variables: dict[str, str]) -> None:
    """Run torchrun with two workers, of which one or both write their status and fail, since their attempt has no plan."""
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=200, check=False, cwd=folder
    )
    assert any((folder / f"status-{rank}.json").exists() for rank in (0, 1)), f"no worker was started: {done.stderr}"


def command_of(folder: Path) -> list[str]:
    plan = make_plan(nproc_per_node=2)
    return torchrun(folder, plan, host_rendezvous(folder, plan), is_host=True)


def test_torchrun_leaves_nothing_in_the_folder_of_temporary_files(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    start(tmp_path, command_of(tmp_path), {"TMPDIR": str(temporary)})
    assert [path.name for path in temporary.iterdir()] == []


@pytest.mark.skipif(not can_make_hosts(), reason="needs user namespaces, iproute2 and util-linux")
def test_torchrun_does_not_look_up_the_name_of_its_host(tmp_path):
    start(tmp_path, on_nameless_host(tmp_path, command_of(tmp_path), hosts="::1 localhost\n"), {})
    assert "nosuch" not in (tmp_path / "name-server.log").read_text()
