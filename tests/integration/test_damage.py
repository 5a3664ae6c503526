"""Damaged, missing and moved files: found before anything is trained on them, named in a sentence, and nothing is lost."""

import shutil
from pathlib import Path

import pytest

from support.damage import flip
from support.laboratory import SOFTMAX_2, Laboratory


def refused(started, code: int, *words: str) -> str:
    assert started.wait() == code, started.log.read_text()
    text = started.log.read_text()
    assert all(word in text for word in words), text
    assert "Traceback" not in text
    assert not started.processes()
    return text


@pytest.fixture
def finished(lab, calm_softmax_2):
    """A copy of a finished run that a test may break; its last checkpoint is of step 60, and 50, 40 are kept."""

    def copy(name: str) -> Path:
        return shutil.copytree(
            lab.run_dir(calm_softmax_2), lab.run_dir(name), symlinks=True
        )

    return copy


def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one(lab, finished):
    run_dir = finished("damaged-checkpoint")
    (run_dir / "result.json").unlink()
    shard = max(
        (run_dir / "checkpoints/step-00000060").glob("rank-*.bin"),
        key=lambda path: path.stat().st_size,
    )
    flip(shard)
    lab.finish("damaged-checkpoint", *SOFTMAX_2)
    assert lab.attempts("damaged-checkpoint")[-1].from_step == 50
    assert (run_dir / "checkpoints/step-00000060.damaged-1").is_dir()
    lab.assert_same("damaged-checkpoint", "calm-softmax-2")


def test_training_never_starts_on_a_flipped_bit_of_the_dataset(lab, tmp_path):
    own = Laboratory.create(tmp_path, lab.server)
    shutil.copytree(lab.home / "datasets", tmp_path / "datasets", symlinks=True)
    (dataset,) = (tmp_path / "datasets").glob("files-*")
    shard = dataset / "train/data-00000.arrow"
    flip(shard)
    refused(own.start("flipped"), 65, str(shard), "checksum")
    assert not (own.run_dir("flipped") / "attempts.jsonl").exists()
    shutil.rmtree(dataset)  # what the sentence says to do
    assert own.start("flipped", "train.max_steps=6").wait() == 0


def test_two_commands_of_one_run(lab, calm_softmax_2):
    """The second waits out the grace period, then is refused with the first one's process; the first is not disturbed."""
    first = lab.start("twice", *SOFTMAX_2)
    lab.wait_for_step("twice", 1, first)
    first.process.send_signal(19)  # SIGSTOP: it holds the lock for as long as we like
    second = lab.start("twice", *SOFTMAX_2, "runtime.grace_period=1")
    refused(second, 70, f"process {first.process.pid} on")
    first.process.send_signal(18)
    assert first.wait() == 0
    lab.assert_same("twice", calm_softmax_2)


def test_a_run_goes_back_once_to_a_checkpoint_that_lies_on_another_disk(lab, finished):
    run_dir = finished("back")
    chosen = run_dir / "checkpoints/step-00000040"
    chosen.rename(lab.home / chosen.name)
    chosen.symlink_to(lab.home / chosen.name)
    for _ in range(2):  # the same command again finds the run finished
        lab.finish("back", *SOFTMAX_2, f"runtime.resume={chosen}")
        assert len(lab.attempts("back")) == 2
    assert lab.attempts("back")[-1].from_step == 40
    assert (run_dir / "checkpoints/abandoned/step-00000060").is_dir()
    lab.assert_same("back", "calm-softmax-2")


def test_a_run_whose_folder_is_moved_ends_and_the_next_one_of_its_name_begins_anew(
    lab, calm_softmax_2
):
    first = lab.start("moved", *SOFTMAX_2)
    lab.wait_for_step("moved", 5, first)
    lab.run_dir("moved").rename(lab.run_dir("moved-away"))
    refused(first, 70, f"{lab.run_dir('moved')}/lock was moved or removed")
    assert not list(lab.run_dir("moved").glob("checkpoints/*"))
    lab.finish("moved", *SOFTMAX_2)
    assert lab.attempts("moved")[0].from_step == 0
    lab.assert_same("moved", calm_softmax_2)
    lab.finish("moved-away", *SOFTMAX_2)
    lab.assert_same("moved-away", calm_softmax_2)
