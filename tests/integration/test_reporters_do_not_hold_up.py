"""A reporter that never returns, or a metrics hook that does not, and what becomes of the run."""

import json

import pytest

from infini_llama.tasks.runs.run_reader import RunReader
from support.laboratory import on_the_path

SETTINGS = (
    "model.attention=softmax",
    "environment.nproc_per_node=1",
    "train.max_steps=16",
    "train.eval_steps=100",
    "train.save_steps=4",
    "train.logging_steps=1",
    "runtime.hang_timeout=1",
    "runtime.retries=1",
)
# A stand-in for the package, which an installation for tests does not have.
WANDB = """
import atexit, os, time
class Error(Exception): pass
class Settings:
    def __init__(self, **settings): pass
class Table:
    def __init__(self, **settings): pass
class Run:
    summary = {{}}
    def log(self, values, step=None):
        if {log} and step == 7:
            time.sleep(10000)
    def finish(self):
        if {finish}:
            time.sleep(10000)
def init(**settings):
    if {init}:
        time.sleep(10000)
    if {exit}:
        atexit.register(time.sleep, 10000)
    return Run()
"""


@pytest.mark.parametrize("stuck", ["finish", "log", "init", "exit"])
def test_a_run_is_finished_whatever_wandb_waits_for(lab, tmp_path, stuck):
    calls = dict.fromkeys(("finish", "log", "init", "exit"), False) | {stuck: True}
    (tmp_path / "wandb.py").write_text(WANDB.format(**calls))
    name = f"wandb-{stuck}"
    reported = "train.report_to=[wandb,tensorboard]"
    started = lab.start(name, *SETTINGS, reported, on_the_path(tmp_path))
    assert started.wait() == 0, started.log.read_text()
    assert not started.processes()
    (attempt,) = lab.attempts(name)
    assert (attempt.kind, attempt.step) == ("done", 16)
    result = json.loads((lab.run_dir(name) / "result.json").read_text())
    assert result["steps"] == 16 and result["samples"]
    assert [line.step for line in RunReader(lab.run_dir(name)).trained] == [
        *range(1, 17)
    ]
    text = started.log.read_text()
    assert text.count("reporting to Weights & Biases") == (stuck != "exit"), text
    assert "reporting to TensorBoard" not in text
    logged = (lab.run_dir(name) / "logs/attempt-01/rank-0.log").read_text()
    assert "most recent call first" not in logged, (
        "the supervisor ended a rank that hung"
    )
    events = list((lab.run_dir(name) / "tensorboard").glob("events*"))
    assert events and events[0].stat().st_size > 1000


def test_a_hook_that_hangs_is_named(lab, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def hook(model, record):\n"
        "    time.sleep(10000 if record['step'] == 6 else 0)\n"
        "    return {'one': 1.0}\n"
    )
    settings = (*SETTINGS, "train.report_to=[]", "train.metrics_hook=mine:hook")
    started = lab.start("hook", *settings, on_the_path(tmp_path), "runtime.retries=0")
    assert started.wait() == 76, started.log.read_text()
    (attempt,) = lab.attempts("hook")
    assert (
        attempt.code == 76 and "in phase 'metrics_hook' after step 5" in attempt.message
    )
    assert attempt.checkpoint_step == 4
