"""SIGKILL at random moments of saving: what was announced as committed is there and whole; at most the save under way is lost.

One process imports torch and forks a saver at a time, so that fifty kills take a minute.
"""

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder, remove_staging

SAVER = """
import json, os, sys
import torch
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.train.worker.checkpointer import BackgroundSave
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

def save_for_ever(folder, asynchronous, first, say):
    torch.set_num_threads(1)
    ranks = Ranks("cpu", "gloo")
    train = TrainingConfig(save_total_limit=2, async_save=asynchronous)
    saver = BackgroundSave(folder, train, ranks, lambda: None)
    step = first
    while True:
        state = {f"{part}.{layer}": torch.full((256, 512), float(step)) for layer in range(8) for part in "ab"}
        saver.save(step, state, {"step": step, "validation_loss": None})
        saver.wait()
        os.write(say, f"{step}\\n".encode())
        step += 1
"""


def in_a_fork(action: Callable[[], None]) -> int:
    """Process number of a child that does `action` and ends with 0 where it succeeds."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def strikes(tmp_path: Path, count: int, seed: int) -> None:
    """The parent only forks, kills and counts: whatever starts threads, checksums among it, happens in children."""
    sys.path.insert(0, str(tmp_path))
    (tmp_path / "saver_that_is_killed.py").write_text(SAVER)
    from saver_that_is_killed import save_for_ever

    run, rng, announced, caught = RunFolder(tmp_path / "run"), random.Random(seed), 0, 0
    run.checkpoints.mkdir(parents=True)
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for number in range(count):
        heard, say = os.pipe()
        child = in_a_fork(
            partial(
                save_for_ever, run.checkpoints, bool(number % 2), announced + 1, say
            )
        )
        os.close(say)
        with os.fdopen(heard) as lines:
            # It runs: now strike within about two saves.
            announced = int(lines.readline())
            time.sleep(rng.uniform(0, 0.08))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            announced = max([announced, *map(int, lines.read().split())])
        caught += any(run.checkpoints.glob(".step-*"))
        remove_staging(run)
        _, status = os.waitpid(in_a_fork(partial(whole_and_newest, run, announced)), 0)
        assert status == 0, f"kill {number}, after step {announced}"
        announced = max(
            checkpoints.step_of(path) for path in run.checkpoints.glob("step-*")
        )
    assert caught > count // 4, f"only {caught} kills fell into a save"


def whole_and_newest(run: RunFolder, announced: int) -> None:
    import torch

    from infini_llama.tasks.storage.tensors import load_tensors

    newest = checkpoints.newest_with_damaged_moved_aside(run.checkpoints)
    assert newest is not None and checkpoints.step_of(newest) in (
        announced,
        announced + 1,
    ), newest
    assert not list(run.checkpoints.glob("*.damaged-*")), (
        "a half-written checkpoint had a checkpoint's name"
    )
    state = {
        f"{part}.{layer}": torch.zeros(256, 512) for layer in range(8) for part in "ab"
    }
    load_tensors(newest, state)
    assert all(
        value.unique().tolist() == [float(checkpoints.step_of(newest))]
        for value in state.values()
    )


@pytest.mark.parametrize(
    ("count", "seed"), [(8, 1), pytest.param(50, 2, marks=pytest.mark.slow)]
)
def test_what_was_announced_is_whole_after_a_kill_at_any_moment(tmp_path, count, seed):
    """`strikes` forks, which wants a process without the threads of a test run."""
    code = f"from test_save_kills import *; strikes(Path({str(tmp_path)!r}), {count}, {seed})"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
