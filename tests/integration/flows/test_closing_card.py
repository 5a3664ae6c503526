"""The closing card, from what stands in a run's folder: of a finished run, and of one that never came far."""

import base64
import re

import pytest

from infini_llama.configs.reading import changed
from infini_llama.flows.closing_card import card
from infini_llama.tasks.records.metrics import TrainLine, ValidationLine
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt
from support.made_up_runs import add_checkpoint, add_result
from support.records import make_lineage


@pytest.fixture
def run(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "one")
    run.path.mkdir(parents=True)
    return run


def train_to(run: RunFolder, steps: int) -> None:
    run.write(run.lineage, make_lineage(max_steps=steps))
    taken = [
        TrainLine(step=step, loss=6 - step / steps, tokens=100 * step, step_time=0.1)
        for step in range(1, steps + 1)
    ]
    measured = ValidationLine(step=steps, loss=5.25, bits_per_byte=3.5)
    run.metrics.write_text(
        "".join(line.model_dump_json() + "\n" for line in [*taken, measured])
    )
    for step, loss in ((steps // 2, None), (steps, 5.25)):
        add_checkpoint(run.checkpoints, step, loss)
    failed = AttemptRecord(
        attempt=1, kind="failed", code=70, message="rank 1 died | killed", seconds=30.0
    )
    append_attempt(run, changed(failed, from_step=0, checkpoint_step=steps // 2))
    done = AttemptRecord(
        attempt=2, kind="done", code=0, message="finished", seconds=30.0
    )
    append_attempt(run, changed(done, from_step=steps // 2, checkpoint_step=steps))


def test_the_card_of_a_finished_run_has_its_curve_and_tables(run):
    train_to(run, 20)
    add_result(
        run,
        20,
        parameters=1234567,
        weights_sha256="ab" * 32,
        samples=["def ```f():", "2"],
    )
    (run.path / "tensorboard").mkdir()
    text = card(run.path, "Training finished: 20 steps.")
    picture = re.search(r"!\[[^\]]+\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", text)
    assert picture and base64.b64decode(picture[1]).startswith(b"\x89PNG")
    for words in (
        "Training finished: 20 steps.",
        "step 20 of 20;",
        "| validation loss, nats per token | 5.2500 |",
        "| best validation loss | 5.2500 |",
        "| parameters | 1,234,567 |",
        "| latest best |",
        "| step-00000010 | not evaluated there |",
        "| 2 | 10 | 20 | 30 s | done (0) |",
        "- attempt 1: rank 1 died \\| killed",
        "````text\ndef ```f():",
        f"`tensorboard --logdir {run.path / 'tensorboard'}`",
    ):
        assert words in text, words
    assert not set("{}") & set(text), "a raw dict"
    assert "- attempt 2" not in text


def test_a_text_of_the_model_can_be_stored_by_every_database(run):
    train_to(run, 20)
    add_result(
        run, 20, parameters=1, weights_sha256="ab" * 32, samples=["a\0b", "\x1b[2Jc"]
    )
    text = card(run.path, "x")
    assert "\0" not in text and "\x1b" not in text
    assert "a\\x00b" in text


def test_a_long_run_has_no_larger_card(run):
    train_to(run, 20_000)
    assert len(card(run.path, "x")) < 200_000


def test_a_run_that_was_refused_before_it_began_has_a_card_too(run):
    text = card(run.path, "Training failed: data.files is | gone.")
    assert text == "# Run one\n\nTraining failed: data.files is \\| gone.\n"
