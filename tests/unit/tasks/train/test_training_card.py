"""The closing card, from what stands in a run's folder: of a finished run, and of one that never came far."""

import base64
import json
import re

import pytest

from tasks.artifacts import commit, staging
from tasks.train.card import card
from tasks.train.checkpoints import FORMAT_VERSION, KIND, checkpoint_path
from tasks.train.goodput import PARTS
from tasks.train.run_folder import RunFolder

REFERENCE = {"validation": {"unigram_entropy_bits": 7.5}}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "one")
    run.checkpoints.mkdir(parents=True)
    return run


def train_to(run: RunFolder, steps: int) -> None:
    lines = [
        {"kind": "train", "step": step, "loss": 6 - step / steps, "tokens": 100 * step} for step in range(1, steps + 1)
    ]
    lines.append({"kind": "validation", "step": steps, "loss": 5.25, "bits_per_byte": 3.5})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, loss in ((steps // 2, None), (steps, 5.25)):
        staged = staging(checkpoint_path(run.checkpoints, step))
        (staged / "train_state.json").write_text(json.dumps({"step": step, "validation_loss": loss}))
        commit(staged, checkpoint_path(run.checkpoints, step), KIND, FORMAT_VERSION, meta={})
    attempt = {"attempt": 1, "from_step": 0, "checkpoint_step": steps // 2, "seconds": 30.0, "kind": "failed"}
    last = attempt | {"attempt": 2, "from_step": steps // 2, "checkpoint_step": steps, "kind": "done"}
    ends = (attempt | {"message": "rank 1 died | killed"}, last | {"message": "finished"})
    run.attempts.write_text("".join(json.dumps(line) + "\n" for line in ends))


def finish(run: RunFolder) -> None:
    spent = dict.fromkeys(PARTS, 0.0) | {"training": 45.0, "start_up": 15.0, "wall": 60.0, "share": 0.75}
    summary = {"goodput": spent, "parameters": 1234567, "tokens_per_second": 999.0, "updates_left_out": 0}
    summary |= {"weights_sha256": "ab" * 32, "sample": "def ```f():", "samples": ["second"]}
    run.summary.write_text(json.dumps(summary))


def test_a_finished_run_shows_curve_metrics_checkpoints_time_attempts_samples_and_places(run):
    train_to(run, 20)
    finish(run)
    text = card(run, REFERENCE, "Training finished: 20 steps.")
    picture = re.search(r"!\[[^\]]+\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", text)
    assert picture and base64.b64decode(picture[1]).startswith(b"\x89PNG")
    for words in (
        "Training finished: 20 steps.",
        "| validation loss | 5.2500 nats = 7.574 bits a token |",
        "| goodput | 75% of the time",
        "| step-00000020 | 5.2500 nats = 7.574 bits a token | newest, best |",
        "| step-00000010 | not evaluated there |",
        "| 2 | step 10 | step 20 | 30 s |",
        "- attempt 1: rank 1 died \\| killed",
        "````text\ndef ```f():",
        f"`tensorboard --logdir {run.path / 'tensorboard'}`",
    ):
        assert words in text, words
    assert "{" not in re.sub(r"\(data:[^)]*\)", "", text), "a raw dict"


def test_a_long_run_has_no_larger_picture(run):
    train_to(run, 20_000)
    assert len(card(run, REFERENCE, "x")) < 200_000


def test_a_run_that_failed_before_its_first_step_has_a_card_too(run):
    text = card(run, REFERENCE, "Training failed: rank 0 said no.")
    assert "Training failed: rank 0 said no." in text and "None was committed." in text and "data:image" not in text
