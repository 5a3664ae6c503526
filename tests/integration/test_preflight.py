"""Ranks that do not come, or do not answer, are named within a short time."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
# A rank whose number is given as an argument sleeps through the preflight; one behind "dumb" comes, and then exchanges nothing.
PROGRAM = """
import os, sys, time
from infini_llama.tasks.train.worker import preflight
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
rank = os.environ["RANK"]
if rank in sys.argv[1:]:
    time.sleep(20)
    sys.exit()
if f"dumb{rank}" in sys.argv[1:]:
    preflight.dist.monitored_barrier = lambda **words: time.sleep(20)
try:
    store = preflight.connect(int(rank), 3, 5.0)
    preflight.sum_over_ranks(store, int(rank), 3, 5.0)
    ranks = Ranks("cpu", "gloo", 60.0, store)
    sys.stdout.write(f"{rank}: sum {ranks.sum(1.0)[0]:g}\\n")
    ranks.leave()
except Exception as error:
    sys.stdout.write(f"{rank}: {type(error).__name__}: {error}\\n".replace("\\n", " ") + "\\n")
    time.sleep(8)  # whoever ends first takes the others with it
"""


def words(tmp_path, *arguments: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        str(program),
    ]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=200, check=False
    ).stdout


def test_the_sum_over_all_ranks(tmp_path):
    output = words(tmp_path)
    assert all(f"{rank}: sum 3" in output for rank in range(3))


def test_a_missing_rank_is_named_by_the_others(tmp_path):
    output = words(tmp_path, "1")
    for rank in (0, 2):
        assert f"{rank}: PipelineError: rank 1 has not responded within 5 s" in output


def test_a_rank_that_stops_answering_is_named_by_the_first(tmp_path):
    output = words(tmp_path, "dumb2")
    assert (
        "0: PipelineError: rank 0 on" in output
        and "Ranks 2 failed to pass monitoredBarrier" in output
    )
