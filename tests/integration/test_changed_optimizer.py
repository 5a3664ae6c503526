"""A run whose optimizer changes on the way: which state the new one finds, and what is said of it."""

import signal

import pytest

from infini_llama.tasks.runs import checkpoints
from support.laboratory import SOFTMAX_2

SETTINGS = (*SOFTMAX_2, "train.max_steps=24", "train.eval_steps=100", "train.save_steps=100")


@pytest.mark.parametrize(("before", "now"), [("sgd", "muon"), ("muon", "sgd"), ("adam", "adamw")])
def test_a_changed_optimizer_begins_at_zero_and_says_so_once(lab, before, now):
    name = f"{before}-{now}"
    started = lab.start(name, *SETTINGS, f"train.optimizer={before}")
    lab.wait_for_step(name, 12, started)
    started.process.send_signal(signal.SIGTERM)
    assert started.wait() == 75, started.log.read_text()
    folder = lab.run_dir(name) / "checkpoints"
    assert checkpoints.read_state(checkpoints.committed(folder)[0].path).optimizer == before
    started = lab.start(name, *SETTINGS, f"train.optimizer={now}")
    assert started.wait() == 0, started.log.read_text()
    text = started.log.read_text()
    assert text.count(f"has no state of train.optimizer={now}") == 1, text
    assert checkpoints.read_state(checkpoints.committed(folder)[0].path).optimizer == now
