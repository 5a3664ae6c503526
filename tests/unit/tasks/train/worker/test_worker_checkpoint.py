"""Tensors come back to the bit; nothing but tensors is ever built from a checkpoint's files."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.storage.artifacts import check, file_checksum
from infini_llama.tasks.storage.tensors import TensorWriter, load_tensors, state_hash
from infini_llama.tasks.train.worker.checkpointer import save_checkpoint
from infini_llama.tasks.train.worker.strategies.native import NativeStrategy
from support.one_rank import single_rank


def trained(seed: int) -> NativeStrategy:
    torch.manual_seed(seed)
    model = Llama(
        LlamaConfig(61, 16, 32, 2, 2, 1, 16, attention="infini", segment_length=4)
    )
    strategy = single_rank(model)
    for _ in range(3):
        ids = torch.randint(0, 61, (2, 13))
        model.loss(ids[:, :-1], ids[:, 1:])[0].backward()
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
    return strategy


@pytest.fixture
def saved(ranks, tmp_path):
    state = trained(1).tensors()
    return save_checkpoint(tmp_path, 3, state, {"step": 3}), state


def test_weights_and_moments_are_restored_bitwise(saved):
    path, state = saved
    check(path, "checkpoint", checksums=True)
    strategy = trained(2)
    other = strategy.tensors()
    assert state_hash(other, "model.") != state_hash(state, "model.")
    load_tensors(path, other)
    for prefix in ("model.", "optimizer."):
        assert state_hash(other, prefix) == state_hash(state, prefix)
    assert sum(name.endswith(".exp_avg") for name in state) == len(
        list(strategy.model.parameters())
    )


def strategy_of(optimizer: str):
    return single_rank(
        Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16)), TrainingConfig(optimizer=optimizer)
    )


def take_step(strategy, apply: bool) -> None:
    ids = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))
    strategy.accumulate([(ids[:, :-1], ids[:, 1:], None)], 32)
    strategy.clip_gradients()
    strategy.update(apply=apply)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_checkpoint_from_before_the_first_update_can_be_loaded(
    ranks, tmp_path, optimizer
):
    """As after steps whose gradients overflowed."""
    strategy = strategy_of(optimizer)
    take_step(strategy, apply=False)
    path = save_checkpoint(tmp_path, 1, strategy.tensors(), {"step": 1})
    other = strategy_of(optimizer)
    other.load_tensors(path)
    assert state_hash(other.tensors(), "") == state_hash(strategy.tensors(), "")


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("adamw", "sgd"),
        ("adamw", "muon"),
        ("muon", "adamw"),
        ("adam", "adamw"),
        ("sgd", "adam"),
        ("sgd", "muon"),
    ],
)
def test_another_optimizer_begins_without_state(
    ranks, tmp_path, before, now, is_recorded
):
    """A checkpoint that does not record its optimizer has the state of the names that are the same."""
    strategy = strategy_of(before)
    take_step(strategy, apply=True)
    path = save_checkpoint(tmp_path, 1, saved := strategy.tensors(), {"step": 1})
    other = strategy_of(now)
    anew = other.load_tensors(path, has_own_optimizer=not is_recorded)
    loaded = other.tensors()
    assert state_hash(loaded, "model.") == state_hash(saved, "model.")
    of_optimizer = {name for name in loaded if name.startswith("optimizer.")}
    assert set(anew) == (of_optimizer if is_recorded else of_optimizer - saved.keys())
    for name in of_optimizer:
        zero = torch.zeros_like(loaded[name])
        assert torch.equal(loaded[name], zero if name in anew else saved[name])


def test_the_hash_sees_one_bit_a_name_and_a_shape():
    value = torch.arange(6.0)
    assert state_hash({"a": value}, "") != state_hash({"b": value}, "")
    assert state_hash({"a": value}, "") != state_hash({"a": value.view(2, 3)}, "")
    flipped = value.clone()
    flipped.view(torch.int32)[3] ^= 1
    assert state_hash({"a": value}, "") != state_hash({"a": flipped}, "")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda part: part.update(file="../rank-00000.bin"),
            "not a file of a checkpoint",
        ),
        (lambda part: part.update(file="/etc/passwd"), "not a file of a checkpoint"),
        (lambda part: part.update(start=part["start"] + 3), "invalid part"),
        (lambda part: part.update(start=-64), "invalid part"),
        (lambda part: part.update(start=1 << 40), "beyond the end"),
        (lambda part: part.update(sizes="all"), "cannot be loaded"),
        (lambda part: part.pop("offsets"), "cannot be loaded"),
    ],
)
def test_a_table_with_other_types_is_refused(saved, change, sentence):
    path, state = saved
    table = json.loads((path / "tensors.json").read_text())
    change(
        table["tensors"][
            "model.lm_head.weight" if "model.lm_head.weight" in state else min(state)
        ]["parts"][0]
    )
    (path / "tensors.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match=sentence):
        load_tensors(path, state)


def test_unknown_types_and_byte_orders_are_refused(saved):
    path, state = saved
    table = json.loads((path / "tensors.json").read_text())
    for change in (
        {"byteorder": "middle"},
        {"tensors": table["tensors"] | {min(state): {"dtype": "object"}}},
    ):
        (path / "tensors.json").write_text(json.dumps(table | change))
        with pytest.raises(DataError, match=str(path)):
            load_tensors(path, state)


def test_another_model_is_reported_by_name(saved):
    path, state = saved
    name = min(state)
    with pytest.raises(DataError, match="Missing key"):
        load_tensors(path, state | {"model.unknown": torch.zeros(2)})
    with pytest.raises(DataError, match=f"Size mismatch.*{name}"):
        load_tensors(path, {name: torch.zeros(3, 3)})


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_block_of_any_tensor_comes_back(tmp_path_factory, data):
    """Parts written by three ranks, read as other parts: what another world size does."""
    folder = tmp_path_factory.mktemp("parts")
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 5)))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    )
    whole = torch.randint(0, 2, shape).to(dtype)
    cuts = [
        0,
        *sorted(data.draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=2))),
        shape[0],
    ]
    metadata, results, writers = (
        Metadata({}),
        [],
        [TensorWriter(folder) for _ in range(3)],
    )
    chunks = []
    for rank, (writer, start, end) in enumerate(
        zip(writers, cuts, cuts[1:], strict=False)
    ):
        offsets, sizes = torch.Size([start, 0]), torch.Size([end - start, shape[1]])
        if end > start:
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        item = WriteItem(MetadataIndex("t", offsets), WriteItemType.SHARD)
        plan = SavePlan([item] if end > start else [])
        writer.set_up_storage_writer(rank == 0, rank=rank)
        results.append(writer.write_data(plan, Resolves(whole[start:end])).value())
    metadata.state_dict_metadata["t"] = TensorStorageMetadata(
        TensorProperties(dtype=dtype), whole.shape, chunks
    )
    writers[0].finish(metadata, results)
    assert all(
        file_checksum(folder / name) == checksum
        for name, checksum in writers[0].checksums.items()
    )
    found = torch.zeros_like(whole)
    load_tensors(folder, {"t": found})
    assert torch.equal(found, whole)


class Resolves(DefaultSavePlanner):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def resolve_data(self, write_item):
        return self.tensor


def test_no_path_of_this_machine_is_in_a_checkpoint(saved, tmp_path):
    path, _ = saved
    assert not [
        file.name
        for file in path.iterdir()
        if str(tmp_path).encode() in file.read_bytes()
    ]
