"""Micro-batches of a step follow each other without a value being read from the device, which a GPU would be waited for."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model import backends
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.data.loader import GlobalBatch
from infini_llama.tasks.train.worker.trainer import optimizer_step
from support.one_rank import OneRank, single_rank

# Operations whose result's value or size the host has to know; indexing by a mask is one by its argument.
READS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "equal",
)
METHODS = ("tolist", "numpy", "item", "__bool__", "__float__", "__int__", "__index__")


class Reads(TorchDispatchMode):
    """Lists the operations that do."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            part is not None and part.dtype in (torch.bool, torch.uint8)
            for part in args[1]
        )
        if name in READS or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Iterator[list[str]]:
    """The names of the operations and methods inside that do."""
    with pytest.MonkeyPatch.context() as patch, Reads() as mode:
        for name in METHODS:
            own = getattr(torch.Tensor, name)
            patch.setattr(
                torch.Tensor,
                name,
                lambda self, *args, own=own, name=name: (
                    mode.found.append(name) or own(self, *args)
                ),
            )
        yield mode.found


def plain_flash(q, k, v, starts, _, longest, __, **options):
    """What flash-attn computes, by a mask, without reading a value."""
    number = torch.searchsorted(
        starts, torch.arange(len(q), dtype=starts.dtype), right=True
    )
    seen = (number[:, None] == number).tril()
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, enable_gqa=True
    )[0].transpose(0, 1)


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(backends, "flash_attention", lambda: plain_flash)


def model_of(backend="sdpa", **fields):
    torch.manual_seed(0)
    shape = {"segment_length": 16} | fields
    return Llama(LlamaConfig(128, 32, 64, 2, 4, 2, 64, **shape), backend)


def batches(count=3, documents=False):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        rows = torch.randint(0, 128, (2, 49), generator=generator)
        labels = rows[:, 1:].masked_fill(rows[:, 1:] < 9, -100)
        numbers = torch.tensor(
            [[0] * 13 + [1] * 20 + [2] * 10 + [-1] * 5, [0] * 48], dtype=torch.int32
        )
        found.append(
            (rows[:, :-1], labels, numbers) if documents else (rows[:, :-1], labels)
        )
    return found


def reads_of(strategy, data):
    """What is read while the micro-batches of a step are computed."""
    with reads() as found:
        strategy.accumulate(data, 200)
    return found


@pytest.mark.parametrize(("packed", "checkpointing"), [(False, "full"), (True, "none")])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qk_norm": True, "hidden_dropout": 0.1},
        {"attention": "infini"},
        {"attention": "infini", "memory_update": "delta"},
        {"attention": "local"},
    ],
    ids=str,
)
def test_no_value_is_read_between_micro_batches(fields, packed, checkpointing):
    model = model_of(**fields)
    model.checkpoint_activations(checkpointing)
    model.loss_chunk, model.z_loss = 20, 1e-4
    assert reads_of(single_rank(model), batches(documents=packed)) == []


@pytest.mark.parametrize("fields", [{}, {"attention": "infini"}], ids=str)
def test_flash_attention_of_documents_reads_no_value_given_a_bound(fields, flash):
    model = model_of("flash2", **fields)
    found = []
    for model.most_documents in (None, 3):
        found.append(reads_of(single_rank(model), batches(documents=True)))
    assert "nonzero" in found[0] and found[1] == []


@pytest.mark.parametrize("fields", [{}, {"attention": "infini"}], ids=str)
def test_a_bound_changes_no_bit(fields, flash):
    losses = []
    for bound in (None, 3, 17):
        model = model_of("flash2", **fields)
        model.most_documents = bound
        strategy = single_rank(model)
        losses.append(strategy.accumulate(batches(documents=True), 200).item())
        losses.append(
            sum(value.grad.double().sum().item() for value in model.parameters())
        )
    assert losses[:2] == losses[2:4] == losses[4:]


def test_a_step_reads_the_loss_and_the_norm_once():
    strategy, data = (
        single_rank(model_of(), TrainingConfig()),
        GlobalBatch(batches(), 200),
    )
    optimizer_step(strategy, data, 1.0, lambda loss: False, lambda: False, OneRank())
    with Reads() as mode:
        optimizer_step(
            strategy, data, 1.0, lambda loss: False, lambda: False, OneRank()
        )
    assert len(mode.found) <= 2
