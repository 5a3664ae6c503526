"""Tensors come back to the bit; nothing but tensors is ever built from a checkpoint's files."""

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as metadata_classes

from configs.errors import DataError
from model.config import LlamaConfig
from model.llama import Llama
from tasks.artifacts import check
from tasks.train.worker.checkpoint import _MetadataUnpickler, load, prime, save, state_hash, tensors
from tasks.train.worker.optimizer import build_optimizer
from tasks.train.worker.parallel import Ranks

TRAIN = {
    "weight_decay": 0.1,
    "learning_rate": 1e-2,
    "gate_learning_rate": 2e-2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
}


@pytest.fixture
def ranks(monkeypatch):
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    ranks = Ranks("cpu", "gloo")
    yield ranks
    ranks.leave()


def trained(seed: int) -> tuple[Llama, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16, attention="infini", segment_length=4))
    optimizer = build_optimizer(model, TRAIN)
    for _ in range(3):
        ids = torch.randint(0, 61, (2, 13))
        model.loss(ids[:, :-1], ids[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def saved(ranks, tmp_path):
    model, optimizer = trained(1)
    state = tensors(model, optimizer)
    return save(tmp_path, 3, state, {"step": 3}), state


def test_weights_and_moments_come_back_to_the_bit(saved):
    path, state = saved
    check(path, "checkpoint", checksums=True)
    model, optimizer = trained(2)
    other = tensors(model, optimizer)
    assert state_hash(other, "model.") != state_hash(state, "model.")
    load(path, other)
    for prefix in ("model.", "optimizer."):
        assert state_hash(other, prefix) == state_hash(state, prefix)
    assert sum(name.endswith(".exp_avg") for name in state) == len(list(model.parameters()))


def test_a_primed_optimizer_has_every_tensor_and_moves_no_weight(saved):
    path, state = saved
    torch.manual_seed(5)
    model = Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16, attention="infini", segment_length=4))
    before = state_hash(tensors(model, None), "model.")
    optimizer = build_optimizer(model, TRAIN)
    prime(optimizer)
    assert state_hash(tensors(model, None), "model.") == before
    assert tensors(model, optimizer).keys() == state.keys()
    load(path, tensors(model, optimizer))
    assert state_hash(tensors(model, optimizer), "optimizer.") == state_hash(state, "optimizer.")


def test_the_hash_sees_one_bit_a_name_and_a_shape():
    value = torch.arange(6.0)
    assert state_hash({"a": value}, "") != state_hash({"b": value}, "")
    assert state_hash({"a": value}, "") != state_hash({"a": value.view(2, 3)}, "")
    flipped = value.clone()
    flipped.view(torch.int32)[3] ^= 1
    assert state_hash({"a": value}, "") != state_hash({"a": flipped}, "")


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


def test_a_malicious_pickle_is_refused_before_it_runs(saved, tmp_path):
    path, state = saved
    trap = tmp_path / "trap"
    (path / ".metadata").write_bytes(pickle.dumps(Malicious(trap)))
    with pytest.raises(DataError, match=r"posix\.mkdir"):
        load(path, state)
    assert not trap.exists()


class ByGetattr:
    """What Python 3.11.2 writes for the member of an enumeration, pointed at something else."""

    def __reduce__(self):
        return (getattr, (torch.Size, "__subclasshook__"))


def test_getattr_reaches_nothing_but_the_one_enumeration(saved):
    path, state = saved
    (path / ".metadata").write_bytes(pickle.dumps(ByGetattr()))
    with pytest.raises(DataError, match="__subclasshook__"):
        load(path, state)


def test_enumerations_are_read_as_every_version_of_python_writes_them():
    member = metadata_classes._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT

    class Old(pickle.Pickler):
        def reducer_override(self, value):
            return (getattr, (type(value), value.name)) if value is member else NotImplemented

    written = io.BytesIO()
    Old(written).dump(member)
    assert b"getattr" in written.getvalue()
    assert _MetadataUnpickler(io.BytesIO(written.getvalue())).load() is member
    assert _MetadataUnpickler(io.BytesIO(pickle.dumps(member))).load() is member


def test_tensor_files_are_read_as_tensors_alone(saved, tmp_path):
    path, state = saved
    trap = tmp_path / "trap"
    for file in path.glob("*.distcp"):
        file.write_bytes(pickle.dumps(Malicious(trap), protocol=2).ljust(file.stat().st_size, b"\0"))
    with pytest.raises(DataError, match="cannot be loaded"):
        load(path, state)
    assert not trap.exists()


def test_no_path_of_this_machine_is_in_a_checkpoint(saved, tmp_path):
    path, _ = saved
    assert not [file.name for file in path.iterdir() if str(tmp_path).encode() in file.read_bytes()]


def test_it_loads_without_a_process_group(ranks, tmp_path):
    model, _ = trained(3)
    path = save(tmp_path, 1, tensors(model, None), {"step": 1})
    dist.destroy_process_group()
    fresh, _ = trained(4)
    load(path, tensors(fresh, None))
    assert state_hash(tensors(fresh, None), "model.") == state_hash(tensors(model, None), "model.")
    dist.init_process_group("gloo")  # the fixture leaves it
