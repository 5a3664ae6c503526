"""The closing card, from what stands in a run's folder: of a finished run, and of one that never came far."""

import base64
import json
import re
from pathlib import Path

import pytest

from infini_llama.tasks.report.task import card
from infini_llama.tasks.runs.run_folder import RunFolder
from support.made_up_runs import LINEAGE, add_checkpoint, add_result

DATASET = {
    "path": "datasets/gone",
    "digest": "blake3:0",
    "chunks": "c",
    "chunks_digest": "blake3:1",
    "sequence_length": 64,
}


@pytest.fixture
def run(tmp_path) -> Path:
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    return path


def train_to(run: Path, steps: int) -> None:
    lineage = LINEAGE | {"dataset": DATASET, "max_steps": steps}
    (run / "lineage.json").write_text(json.dumps(lineage))
    taken = [
        {"kind": "train", "step": step, "loss": 6 - step / steps, "tokens": 100 * step, "step_time": 0.1}
        for step in range(1, steps + 1)
    ]
    measured = {"kind": "validation", "step": steps, "loss": 5.25, "bits_per_byte": 3.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*taken, measured]))
    folder = run / "checkpoints"
    folder.mkdir()
    for step, loss in ((steps // 2, None), (steps, 5.25)):
        add_checkpoint(folder, step, loss)
    first = {"attempt": 1, "from_step": 0, "checkpoint_step": steps // 2, "seconds": 30.0, "kind": "failed", "code": 70}
    last = first | {"attempt": 2, "from_step": steps // 2, "checkpoint_step": steps, "kind": "done", "code": 0}
    ends = (first | {"message": "rank 1 died | killed"}, last | {"message": "finished"})
    (run / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ends))


def test_the_card_of_a_finished_run_has_its_curve_and_tables(run):
    train_to(run, 20)
    add_result(RunFolder(run), 20, parameters=1234567, weights_sha256="ab" * 32, samples=["def ```f():", "2"])
    text = card(run, "Training finished: 20 steps.")
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
        f"`tensorboard --logdir {run / 'tensorboard'}`",
    ):
        assert words in text, words
    assert not set("{}") & set(text), "a raw dict"
    assert "- attempt 2" not in text


def test_a_long_run_has_no_larger_card(run):
    train_to(run, 20_000)
    assert len(card(run, "x")) < 200_000


def test_a_run_that_was_refused_before_it_began_has_a_card_too(run):
    assert (
        card(run, "Training failed: data.files is | gone.") == "# Run one\n\nTraining failed: data.files is \\| gone.\n"
    )
