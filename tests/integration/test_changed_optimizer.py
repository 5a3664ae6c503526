"""A run whose optimizer changes on the way: which state the new one finds, and what is said of it."""

from importlib.util import find_spec

import pytest

from infini_llama.tasks.runs import checkpoints
from support.laboratory import SOFTMAX_2

SETTINGS = (
    *SOFTMAX_2,
    "train.max_steps=24",
    "train.eval_steps=100",
    "train.save_steps=100",
)


WITHOUT_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs the extra"
)


@pytest.mark.parametrize(
    ("before", "now", "parallel"),
    [
        ("sgd", "muon", "ddp"),
        pytest.param("sgd", "adamw", "deepspeed", marks=WITHOUT_DEEPSPEED),
        pytest.param("adam", "adamw", "deepspeed", marks=WITHOUT_DEEPSPEED),
    ],
)
def test_a_changed_optimizer_begins_at_zero_and_says_so_once(
    lab, before, now, parallel
):
    name = f"{before}-{now}-{parallel}"
    lab.stop_at(12, name, *SETTINGS, f"train.optimizer={before}")
    folder = lab.run_dir(name) / "checkpoints"
    assert (
        checkpoints.read_state(checkpoints.committed(folder)[0].path).optimizer
        == before
    )
    settings = (f"train.optimizer={now}", f"train.parallel={parallel}")
    started = lab.start(name, *SETTINGS, *settings)
    assert started.wait() == 0, started.log.read_text()
    text = started.log.read_text()
    assert text.count(f"has no state of train.optimizer={now}") == 1, text
    assert (
        checkpoints.read_state(checkpoints.committed(folder)[0].path).optimizer == now
    )
