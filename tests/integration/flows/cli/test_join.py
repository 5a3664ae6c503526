"""`join`, and the commands that join because their rank is not 0."""

import json
import threading
import time

import pytest
import yaml

from infini_llama.flows.cli.main import main
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt
from infini_llama.tasks.train import nodes


@pytest.fixture
def home(tmp_path, monkeypatch):
    """With a run, `mine`, that its supervisor has left."""
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(tmp_path))
    monkeypatch.setattr(nodes.join, "__defaults__", (None, 0.1))
    monkeypatch.setattr(nodes, "POLL_SECONDS", 0.02)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    return tmp_path


def end(home, code: int) -> None:
    kind = "done" if code == 0 else "failed"
    append_attempt(
        RunFolder(home / "runs" / "mine"),
        AttemptRecord(attempt=1, kind=kind, code=code),
    )


@pytest.mark.parametrize("code", [0, 64, 75])
def test_join_ends_as_the_run_has(home, capsys, code):
    end(home, code)
    for name in ("mine", str(home / "runs" / "mine")):
        assert main(["join", name, "--json"]) == code
        answer = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert answer == {"run": str(home / "runs" / "mine"), "exit_code": code}


def test_join_waits_while_the_supervisor_may_retry(home, capsys):
    """The supervisor holds no lease between a failure that may pass and its next attempt."""
    run = RunFolder(home / "runs" / "mine")
    (run.path / "lease").touch()
    end(home, 70)

    def retry() -> None:
        (run.path / "lease").unlink()
        time.sleep(0.3)  # the delay
        append_attempt(run, AttemptRecord(attempt=2, kind="done", code=0))

    supervisor = threading.Timer(0.2, retry)
    supervisor.start()
    assert nodes.join(run, timeout=10) == 0
    supervisor.join()


def test_a_run_without_a_supervisor_is_refused(home, capsys):
    assert main(["join", "mine"]) == 70
    assert "no command has supervised the run" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run", "--no-prefect"], ["train"]])
@pytest.mark.parametrize(
    "variables",
    [
        {"JOB_COMPLETION_INDEX": "1"},
        {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "head",
            "PET_MASTER_PORT": "29500",
        },
        {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"},
    ],
)
def test_a_later_node_joins(home, capsys, monkeypatch, command, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    end(home, 0)
    config = home / "mine.yaml"
    config.write_text(
        yaml.safe_dump(
            {"data": {"source": "python-stdlib"}, "runtime": {"name": "mine"}}
        )
    )
    name, *options = command
    assert main([name, str(config), "environment.nnodes=2", *options]) == 0
    assert (
        f"joined      {home / 'runs' / 'mine'}: it has ended" in capsys.readouterr().out
    )
    assert not (home / "datasets").exists()
