"""A rank that a signal such as a segmentation fault has ended."""

import subprocess
import sys
from unittest.mock import Mock

from infini_llama.configs.errors import ExitCode
from infini_llama.tasks.records.status import RankStatus
from infini_llama.tasks.train.launch import TorchrunWorkers
from infini_llama.tasks.train.outcome import Evidence, outcome_of


def running(rank: int) -> RankStatus:
    place = {"pid": 1, "node": 0, "host": "here", "machine": "here"}
    return RankStatus(rank=rank, state="running", code=0, step=5, time=1.0, **place)


def test_a_rank_that_crashed_is_not_called_killed(tmp_path):
    """Its own process is one that Python's faulthandler has seen die."""
    crash = "import ctypes; ctypes.string_at(0)"
    with (tmp_path / "rank-1.log").open("wb") as output:
        subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", crash], stderr=output
        )
    (tmp_path / "rank-0.log").write_text("Nothing of a crash.")
    workers = TorchrunWorkers(Mock(), tmp_path, world_size=3, nnodes=1)
    assert workers.crashes() == {1: "segmentation fault"}
    evidence = Evidence(
        1, [running(0), running(1), None], "logs", crashes=workers.crashes()
    )
    outcome = outcome_of(evidence)
    assert outcome.code == ExitCode.UNEXPECTED
    assert "rank 1 crashed (segmentation fault); see logs/rank-1.log" in outcome.message
