"""Damaged, missing and foreign files: found before anything is trained on them, told in a sentence, and nothing is lost."""

import shutil
from pathlib import Path

import pytest

from support.laboratory import SOFTMAX_2, Laboratory


def flip_a_bit(path, at=0.5):
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def refused(started, code: int, *words: str) -> str:
    assert started.wait() == code, started.log.read_text()
    text = started.log.read_text()
    assert all(word in text for word in words), text
    assert "Traceback" not in text
    assert not started.processes()
    return text


@pytest.fixture
def finished(lab, uninterrupted):
    """A copy of a finished run that a test may break; its last checkpoint is of step 60, and 50, 40 are kept."""
    calm = uninterrupted("softmax", 2)

    def copy(name: str) -> Path:
        return shutil.copytree(lab.run_dir(calm), lab.run_dir(name), symlinks=True)

    return copy


def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one(lab, finished):
    run_dir = finished("damaged-checkpoint")
    (run_dir / "result.json").unlink()
    shard = max(
        (run_dir / "checkpoints/step-00000060").glob("rank-*.bin"),
        key=lambda path: path.stat().st_size,
    )
    flip_a_bit(shard)
    started = lab.start("damaged-checkpoint", *SOFTMAX_2)
    assert started.wait() == 0, started.log.read_text()
    text = started.log.read_text()
    assert "step-00000060" in text and "step-00000050" in text
    assert (run_dir / "checkpoints/step-00000060.damaged-1").is_dir()
    lab.assert_same("damaged-checkpoint", "calm-softmax-2")


def test_training_never_starts_on_a_flipped_bit_of_the_dataset(lab, tmp_path):
    own = Laboratory.create(tmp_path, lab.server)
    shutil.copytree(lab.home / "datasets", tmp_path / "datasets", symlinks=True)
    (dataset,) = (tmp_path / "datasets").glob("files-*")
    shard = dataset / "train/data-00000.arrow"
    flip_a_bit(shard)
    refused(own.start("flipped"), 65, str(shard), "checksum")
    assert not (own.run_dir("flipped") / "attempts.jsonl").exists()
    shutil.rmtree(dataset)  # what the sentence says to do
    assert own.start("flipped", "train.max_steps=6").wait() == 0


def test_a_run_of_another_dataset_or_model_is_refused_with_differences(lab, finished):
    finished("foreign")
    refused(
        lab.start("foreign", *SOFTMAX_2, "data.sequence_length=16"),
        64,
        "dataset.sequence_length: 32 before, 16 now",
    )
    refused(
        lab.start("foreign", *SOFTMAX_2, "model.hidden_size=32"),
        64,
        "model.hidden_size: 64 before, 32 now",
    )
    refused(lab.start("foreign", *SOFTMAX_2, "train.seed=5"), 64, "train.seed: 1234 before, 5 now")


def test_two_commands_of_one_run(lab, uninterrupted):
    """The second waits out the grace period, then is refused with the first one's process; the first is not disturbed."""
    calm = uninterrupted("softmax", 2)
    first = lab.start("twice", *SOFTMAX_2)
    lab.wait_for_step("twice", 1, first)
    first.process.send_signal(19)  # SIGSTOP: it holds the lock for as long as we like
    second = lab.start("twice", *SOFTMAX_2, "runtime.grace_period=1")
    refused(second, 70, f"process {first.process.pid} on")
    first.process.send_signal(18)
    assert first.wait() == 0
    lab.assert_same("twice", calm)


def test_resume_rules(lab, finished):
    run_dir = finished("rules")
    refused(lab.start("rules", *SOFTMAX_2, "runtime.resume=never"), 64, "runtime.resume=never")
    refused(lab.start("rules-new", *SOFTMAX_2, "runtime.resume=must"), 64, "runtime.resume=must")
    refused(
        lab.start("rules", *SOFTMAX_2, "runtime.resume=/no/checkpoint"),
        64,
        "runtime.resume=/no/checkpoint",
    )
    chosen = run_dir / "checkpoints/step-00000040"
    chosen.rename(lab.home / chosen.name)
    chosen.symlink_to(lab.home / chosen.name)  # on another disk
    for attempts in (2, 2):  # the same command again finds the run finished
        started = lab.start("rules", *SOFTMAX_2, f"runtime.resume={chosen}")
        assert started.wait() == 0, started.log.read_text()
        assert len(lab.attempts("rules")) == attempts
    assert lab.attempts("rules")[-1].from_step == 40
    assert (run_dir / "checkpoints/abandoned/step-00000060").is_dir()
    lab.assert_same("rules", "calm-softmax-2")


def test_a_run_whose_folder_is_moved_ends_and_the_next_one_of_its_name_begins_anew(
    lab, uninterrupted
):
    calm = uninterrupted("softmax", 2)
    first = lab.start("moved", *SOFTMAX_2)
    lab.wait_for_step("moved", 5, first)
    lab.run_dir("moved").rename(lab.run_dir("moved-away"))
    refused(first, 70, f"{lab.run_dir('moved')}/lock was moved or removed")
    assert not list(lab.run_dir("moved").glob("checkpoints/*"))
    lab.finish("moved", *SOFTMAX_2)
    assert lab.attempts("moved")[0].from_step == 0
    lab.assert_same("moved", calm)
    lab.finish("moved-away", *SOFTMAX_2)
    lab.assert_same("moved-away", calm)
