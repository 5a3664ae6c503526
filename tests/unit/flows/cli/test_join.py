"""`join`, and the commands that join because their configuration says that this machine is another node."""

import json

import pytest
import yaml

from infini_llama.flows.cli.main import main
from infini_llama.tasks.clusters import node
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt


@pytest.fixture
def home(tmp_path, monkeypatch):
    """With a run, `mine`, that its leader has left."""
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(tmp_path))
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    return tmp_path


def leave(home, code: int) -> None:
    append_attempt(
        RunFolder(home / "runs" / "mine"), AttemptRecord(attempt=1, kind="done" if code == 0 else "failed", code=code)
    )


@pytest.mark.parametrize("code", [0, 64, 75])
def test_join_ends_as_the_run_has(home, capsys, monkeypatch, code):
    if code:  # somebody may be about to carry the run on
        monkeypatch.setattr(node.follow, "__defaults__", (0.5,))
    leave(home, code)
    for name in ("mine", str(home / "runs" / "mine")):
        assert main(["join", name, "--json"]) == code
        answer = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert answer == {"run": str(home / "runs" / "mine"), "exit_code": code}


@pytest.mark.parametrize("command", [["run", "--no-prefect"], ["train"]])
def test_a_later_node_joins(home, capsys, command):
    leave(home, 0)
    config = home / "mine.yaml"
    config.write_text(yaml.safe_dump({"data": {"source": "python-stdlib"}, "runtime": {"name": "mine"}}))
    name, *options = command
    overrides = ["environment.nnodes=2", "environment.node_rank=1"]
    assert main([name, str(config), *overrides, *options]) == 0
    assert f"joined      {home / 'runs' / 'mine'}: it has ended" in capsys.readouterr().out
    assert not (home / "datasets").exists()


def test_a_missing_path_is_refused(home, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["join", "mine", "--node-rank=0"])
    assert ended.value.code == 64 and "0 must be at least 1" in capsys.readouterr().err
