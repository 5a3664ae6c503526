"""Warnings of gates that cannot do their work."""

import logging

import pytest
import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.model.memory import memories, retrieve
from infini_llama.tasks.train.worker.callbacks.gates import (
    GateWarnings,
    MemoryNorms,
    gate_reach,
)


def warnings(caplog) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]


def test_the_reach_is_the_sum_of_the_rates():
    train = TrainingConfig(
        gate_learning_rate=0.01, lr_schedule="constant", warmup_steps=10, max_steps=100
    )
    assert gate_reach(train, 100) == pytest.approx(0.01 * (90 + 5.5))


def test_the_reach_of_a_very_long_run_is_estimated_at_once():
    steps = 10**12
    train = TrainingConfig(
        gate_learning_rate=0.01,
        lr_schedule="linear",
        min_learning_rate_ratio=0.0,
        warmup_steps=0,
        max_steps=steps,
    )
    assert gate_reach(train, steps) == pytest.approx(0.01 * steps / 2, rel=1e-3)


def test_a_schedule_that_cannot_move_a_gate_is_named(caplog):
    for steps, count in ((1000, 0), (50, 1)):
        train = TrainingConfig(gate_learning_rate=0.01, warmup_steps=5, max_steps=steps)
        GateWarnings(train, steps).at_start(unread=32, longest_document=33)
        assert len(warnings(caplog)) == count
    assert "train.gate_learning_rate=0.01" in warnings(caplog)[0]


def test_texts_no_longer_than_a_segment_are_named(caplog):
    GateWarnings(TrainingConfig(max_steps=1000), 1000).at_start(
        unread=32, longest_document=32
    )
    (message,) = warnings(caplog)
    assert "first 32 of" in message and "model.segment_length" in message


def test_each_saturated_gate_is_named_once_and_before_the_last_step(caplog):
    found = GateWarnings(TrainingConfig(max_steps=1000), 100)
    # Closed by train.init_gate, not by the training.
    found.ignore([[0.5, 0.5], [], [1e-9, 0.5]])
    found.observe(10, [[0.5, 0.002], [0.998, 0.3], [1e-9, 0.5]])
    assert not warnings(caplog)
    for step in (20, 30):
        found.observe(step, [[0.5, 0.0005], [0.9995, 0.3]])
    found.observe(40, [[0.5, 0.0005], [0.9995, 0.0001]])
    found.observe(100, [[1e-9, 0.0005], [0.9995, 0.0001]])
    first, second = warnings(caplog)
    assert (
        "2 gate(s)" in first
        and "layer 0, head 1" in first
        and "layer 1, head 1" in second
    )


@torch.no_grad()
def test_norms_of_what_is_read_and_stored_are_observed_inside_alone():
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(40, 16, 24, 2, 2, 2, 32, attention="infini", segment_length=4)
    ).eval()
    norms, rows = MemoryNorms(2), torch.randint(40, (3, 12))
    with norms.observed(model):
        outside = model(rows)
    assert (
        torch.equal(model(rows), outside) and len(norms.reads) == len(norms.writes) == 2
    )
    layer = model.model.layers[0]
    q, k, v = (
        x.unflatten(2, (3, 4)).transpose(1, 2)
        for x in layer.self_attn.project(
            layer.input_layernorm(model.model.embed_tokens(rows))
        )
    )
    M, z = memories(k[:, :2], v[:, :2], "linear")
    assert norms.writes[0] == pytest.approx(
        M[:, 1].norm(dim=(-2, -1)).mean().item(), rel=1e-4
    )
    found, own = retrieve(q[:, 1:], M, z), v[:, 1:].square().mean()
    assert (
        0 < norms.reads[0] < 10
        and found.square().mean().sqrt() / norms.reads[0] < 2 * own.sqrt()
    )
    assert all(layer.self_attn.observer is None for layer in model.model.layers)


@torch.no_grad()
def test_norms_are_those_of_tokens_that_may_read():
    """A document beside others in its row, each by itself, has the same ones; padding has none."""
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(40, 16, 24, 2, 2, 2, 32, attention="infini", segment_length=4)
    ).eval()
    rows = torch.randint(40, (3, 12))

    def observed(ids: torch.Tensor, documents: torch.Tensor) -> MemoryNorms:
        norms = MemoryNorms(2)
        with norms.observed(model):
            model(ids, documents)
        return norms

    alone = observed(rows, torch.zeros(3, 12, dtype=torch.int64))
    padded = torch.nn.functional.pad(rows, (0, 8))
    padding = torch.nn.functional.pad(
        torch.zeros(3, 12, dtype=torch.int64), (0, 8), value=-1
    )
    beside = observed(padded, padding)
    assert beside.reads == pytest.approx(alone.reads, rel=1e-5)
    of_all_rows = MemoryNorms(2)
    of_all_rows._add(
        0,
        torch.ones(3, 2, 2, 4, 4),
        torch.ones(3, 2, 2, 4, 4),
        torch.ones(3, 2, 2, 4, 4),
        torch.ones(1, 2, 4, dtype=torch.bool),
    )
    assert of_all_rows.reads[0] == 1 and of_all_rows.writes[0] == 4
    short = observed(rows, torch.arange(12).expand(3, 12) // 4)
    assert short.reads == short.writes == (None, None)
