"""Saving beside training: what is written is the moment of the save, one save waits at most, and a failure is not lost."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.storage.tensors import TensorWriter, load_tensors
from infini_llama.tasks.train.worker.checkpointer import BackgroundSave, _empty_like
from infini_llama.tasks.train.worker.rank import exit_code, root_cause

TRAIN = TrainingConfig(save_total_limit=2)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((64, 64), value), "b": torch.tensor(value)}


def scalars(step: int) -> dict:
    return {"step": step, "validation_loss": None}


def loaded(folder: Path, step: int) -> float:
    found = state(-1.0)
    load_tensors(checkpoints.checkpoint_path(folder, step), found)
    assert found["a"].unique().tolist() == [found["b"].item()]
    return found["b"].item()


def blocked(gate: threading.Event):
    """A disk that gives no answer until `gate` opens."""
    return lambda: gate.wait(10)


def test_a_save_does_not_contain_later_training(ranks, tmp_path):
    gate, tensors = threading.Event(), state(1.0)
    with BackgroundSave(tmp_path, TRAIN, ranks, blocked(gate)) as saver:
        saver.save(1, tensors, scalars(1))
        for value in tensors.values():
            value.fill_(2.0)
        assert checkpoints.committed(tmp_path) == [] and saver.poll() == 0.0
        gate.set()
        assert saver.wait() > 0.0
        assert loaded(tmp_path, 1) == 1.0
        saver.save(2, tensors, scalars(2))
    assert loaded(tmp_path, 1) == 1.0 and loaded(tmp_path, 2) == 2.0, (
        "leaving waits for the last one"
    )


def test_a_checkpoint_that_cannot_be_mapped_is_not_called_damaged(
    ranks, tmp_path, few_addresses
):
    with BackgroundSave(tmp_path, TRAIN, ranks, lambda: None) as saver:
        saver.save(1, state(1.0), scalars(1))
    (part,) = checkpoints.checkpoint_path(tmp_path, 1).glob("rank-*")
    os.truncate(part, few_addresses)
    with pytest.raises(ConfigError, match="ulimit -v"):
        loaded(tmp_path, 1)


def test_a_second_save_waits_for_the_first(ranks, tmp_path):
    gate, entered, done = threading.Event(), threading.Event(), threading.Event()

    def training() -> None:
        saver.save(1, state(1.0), scalars(1))
        entered.set()
        saver.save(2, state(2.0), scalars(2))
        done.set()

    with BackgroundSave(tmp_path, TRAIN, ranks, blocked(gate)) as saver:
        thread = threading.Thread(target=training)
        thread.start()
        assert entered.wait(10) and not done.wait(0.3), (
            "a second copy was made while the first was being written"
        )
        gate.set()
        assert done.wait(10)
        thread.join()
    assert [loaded(tmp_path, step) for step in (1, 2)] == [1.0, 2.0]


def test_a_save_that_the_next_one_waits_for_is_measured(ranks, tmp_path):
    with BackgroundSave(tmp_path, TRAIN, ranks, lambda: time.sleep(0.2)) as saver:
        saver.save(1, state(1.0), scalars(1))
        saver.save(2, state(2.0), scalars(2))
        assert saver.poll() > 0.2
        assert saver.poll() == 0.0


def test_a_copy_of_a_part_on_a_gpu_is_in_host_memory(ranks):
    """The mesh of a sharded tensor names its device, which need not be that of the copy."""
    mesh = init_device_mesh("cpu", (1,))
    part = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    mesh._device_type = "cuda"
    copy = _empty_like(part)
    assert copy.to_local().device.type == "cpu"
    assert (copy.shape, copy.placements) == (part.shape, part.placements)


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "rank-00000.bin")


@pytest.mark.parametrize("when", ["poll", "next save", "leaving"])
def test_a_save_that_fails_is_a_failure_with_its_class(ranks, tmp_path, when):
    with (
        pytest.raises(OSError) as raised,
        BackgroundSave(tmp_path, TRAIN, ranks, full_disk) as saver,
    ):
        saver.save(1, state(1.0), scalars(1))
        while when == "poll":
            saver.poll()
        if when == "next save":
            saver.save(2, state(2.0), scalars(2))
    sentence = root_cause(raised.value)
    assert exit_code(sentence) == 70 and "'rank-00000.bin'" in str(sentence)
    assert checkpoints.committed(tmp_path) == []


def test_a_full_disk_is_reported_with_the_file(ranks, tmp_path, monkeypatch):
    def failing(self, plan, planner):
        full_disk()

    monkeypatch.setattr(TensorWriter, "write_data", failing)
    saver = BackgroundSave(tmp_path, TRAIN, ranks, lambda: None)
    saver.save(1, state(1.0), scalars(1))
    with pytest.raises(BaseException) as raised:
        saver.wait()
    assert "no space" in str(root_cause(raised.value))


def test_an_error_of_training_is_not_hidden_by_one_of_the_pending_save(
    ranks, tmp_path, caplog
):
    with (
        pytest.raises(KeyError, match="of training"),
        BackgroundSave(tmp_path, TRAIN, ranks, full_disk) as saver,
    ):
        saver.save(1, state(1.0), scalars(1))
        raise KeyError("of training")
    assert "save" in caplog.text


def test_an_error_of_training_lets_the_pending_save_finish(ranks, tmp_path):
    gate = threading.Event()
    with (
        pytest.raises(KeyError),
        BackgroundSave(tmp_path, TRAIN, ranks, blocked(gate)) as saver,
    ):
        saver.save(1, state(1.0), scalars(1))
        gate.set()
        raise KeyError("of training")
    assert loaded(tmp_path, 1) == 1.0
