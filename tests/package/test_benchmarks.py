"""A benchmark that compares programs ends with an error and stores nothing where their results differ."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest

from support.benchmarks import program

# Stands in for training_peer.py: turns with the times and losses of the order, the losses of one program made wrong on request.
PEER = """
import json, os, sys
program, order = sys.argv[1], json.loads(sys.argv[2])
wrong = float(os.environ.get("WRONG_" + program.upper(), 0))
for turn in range(order["turns"]):
    sys.stdin.readline()
    wall = {"ours": 1.0, "trainer": 1.5, "litgpt": 1.25}[program] * (2 if order["compiled"] else 3)
    losses = [9.0 - turn * order["steps"] - step + wrong * turn for step in range(order["steps"])]
    more = {"profile": {}} if program == "ours" and turn == order["turns"] - 1 else {}
    print(json.dumps({"wall": wall, "cpu": wall, "losses": losses, "matmul_flops": 1e11} | more), flush=True)
"""


@pytest.mark.parametrize(
    "wrong",
    [[9.0, 8.1], [9.0, 8.0, 7.0], [9.0], [9.0, float("nan")], [9.0, float("inf")]],
    ids=str,
)
def test_numbers_that_differ_are_refused(wrong):
    agreement = program("agreement")
    assert (
        agreement.require_close("losses", {"a": [9.0, 8.0], "b": [9.0, 8.001]}) < 2e-4
    )
    with pytest.raises(SystemExit, match="of c "):
        agreement.require_close(
            "losses", {"a": [9.0, 8.0], "b": [9.0, 8.001], "c": wrong}
        )
    with pytest.raises(SystemExit):  # also where the first one is wrong
        agreement.require_close("losses", {"a": wrong, "b": [9.0, 8.0]})


@pytest.fixture
def training(tmp_path, monkeypatch) -> ModuleType:
    module = program("training")
    (tmp_path / "peer.py").write_text(PEER)
    monkeypatch.setattr(module, "PEER", tmp_path / "peer.py")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "training.json")
    command = [
        "training.py",
        "--sizes",
        "s",
        "--vocabularies",
        "8192",
        "--rounds",
        "2",
        "--starts",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", [*command, "--litgpt", str(tmp_path)])
    return module


@pytest.mark.parametrize("program", ["ours", "trainer", "litgpt"])
def test_training_stores_nothing_where_a_lane_learns_otherwise(
    training, monkeypatch, program
):
    """As ours once did, with a learning rate of 0."""
    monkeypatch.setenv(f"WRONG_{program.upper()}", "0.01")
    with pytest.raises(SystemExit, match="losses"):
        training.main()
    assert not training.RESULTS.exists()


def test_training_compares_eager_with_eager_and_compiled_with_compiled(
    training, capsys
):
    training.main()
    (row,) = json.loads(training.RESULTS.read_text())["rows"]
    assert len(row["starts"]) == 2
    for start in row["starts"]:
        assert (
            len(start["lanes"]) == 10
            and start["losses_differ_relatively_by_at_most"] == 0
        )
        assert set(training.SETTINGS) <= set(start["settings"]["ours, compiled"])
        assert start["settings"]["ours, compiled"]["compile"] == "whole"
        assert start["settings"]["ours, eager"]["compile"] == "off"
        assert all(
            not settings["allocator variables"]
            for lane, settings in start["settings"].items()
            if "shipped" in lane
        )
    for lane in training.lanes_of(["trainer", "litgpt"], ["eager", "compiled"]):
        assert training.ratio(row, lane) == pytest.approx(
            [{"trainer": 1.5, "litgpt": 1.25}[lane.program]] * 3
        )
    assert capsys.readouterr().out.count("1.50 (1.50 to 1.50)") == 4


def test_preparation_refuses_other_ids_and_lost_text():
    check = program("preparation").require_same_tokens
    same = {
        "ours": [{"ids": 5, "tokens": 100}] * 2,
        "megatron-fast": [{"ids": 5, "tokens": 100}],
        "encode": [{"ids": 0, "tokens": 98}],
    }
    check(same)
    with pytest.raises(SystemExit, match="ids of megatron-fast, round 1"):
        check(same | {"megatron-fast": [{"ids": 6, "tokens": 100}]})
    with pytest.raises(SystemExit, match="tokens of encode"):
        check(same | {"encode": [{"ids": 0, "tokens": 50}]})


def test_reader_refuses_other_tokens():
    check = program("reader").require_same_rows
    tokens = np.arange(40).reshape(10, 4)
    reads = {
        "ours": lambda rows: tokens[rows],
        "theirs": lambda rows: tokens[rows].astype(np.uint16),
    }
    check(reads, [np.array([1, 3]), np.array([9, 0])])
    with pytest.raises(SystemExit, match="batch 1 of theirs"):
        check(
            reads | {"theirs": lambda rows: tokens[np.sort(rows)]},
            [np.array([1, 3]), np.array([9, 0])],
        )


def test_orchestration_refuses_other_losses():
    rounds_of = program("orchestration").rounds_of
    cases = {
        "torchrun": lambda name: {"total": 1.0, "losses": [3.0, 2.0]},
        "run": lambda name: {"total": 2.0, "losses": [3.0, 2.0]},
    }
    assert rounds_of(cases, 2) == {
        "torchrun": [{"total": 1.0}] * 2,
        "run": [{"total": 2.0}] * 2,
    }
    with pytest.raises(SystemExit, match="losses of run"):
        rounds_of(cases | {"run": lambda name: {"total": 2.0, "losses": [3.0, 2.5]}}, 1)


def test_context_parallel_stores_nothing_where_losses_differ(tmp_path, monkeypatch):
    context = program("context_parallel")
    monkeypatch.setattr(context, "RESULT", tmp_path / "context.json")
    monkeypatch.setattr(sys, "argv", ["context_parallel.py", "--rounds", "1"])
    monkeypatch.setattr(
        context, "measure", lambda update, length, size: (1.0, 1.0, 5.0)
    )
    context.main()
    assert json.loads(context.RESULT.read_text())["rows"][0]["loss"] == 5.0
    context.RESULT.unlink()
    monkeypatch.setattr(
        context,
        "measure",
        lambda update, length, size: (1.0, 1.0, 5.0 + 0.1 * (size == 4)),
    )
    with pytest.raises(SystemExit, match=r"losses \(linear\) of 4 workers"):
        context.main()
    assert not context.RESULT.exists()
