"""The step: schedule, groups, and gradients that do not depend on how a batch is split."""

import math

import pytest
import torch
from torch import nn

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.context import Context
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.callbacks.gates import gate_shares
from infini_llama.tasks.train.worker.callbacks.step_metrics import parameter_norm
from infini_llama.tasks.train.worker.data.loader import GlobalBatch
from infini_llama.tasks.train.worker.strategies.optimizer import (
    build_optimizer,
    set_learning_rate,
)
from infini_llama.tasks.train.worker.trainer import (
    optimizer_step,
    step_seed,
    tokens_without_logits,
)
from support.one_rank import OneRank, single_rank

TRAIN = TrainingConfig(warmup_steps=10, max_steps=110, gate_learning_rate=1e-2)


def small_model(attention="infini", **changes) -> Llama:
    torch.manual_seed(0)
    return Llama(
        LlamaConfig(
            61, 16, 32, 2, 2, 1, 16, attention=attention, segment_length=4, **changes
        )
    ).double()


def batches(rows: torch.Tensor, size: int):
    return [(part[:, :-1], part[:, 1:]) for part in rows.split(size)]


def step(strategy, rows: torch.Tensor, scale: float = 1.0, is_spike=lambda loss: False):
    return optimizer_step(
        strategy,
        GlobalBatch(batches(rows, 2), 26),
        scale,
        is_spike,
        lambda: False,
        OneRank(),
    )


@pytest.mark.parametrize("attention", ["softmax", "infini"])
@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_gradients_and_loss_equal_those_of_the_whole_batch(attention, micro):
    rows = torch.randint(0, 61, (6, 14), generator=torch.Generator().manual_seed(3))
    whole, split = small_model(attention), small_model(attention)
    inputs, labels = rows[:, :-1], rows[:, 1:]
    mean = nn.functional.cross_entropy(whole(inputs).flatten(0, 1), labels.flatten())
    mean.backward()
    total = single_rank(split).accumulate(batches(rows, micro), labels.numel())
    assert total.item() / labels.numel() == pytest.approx(mean.item(), rel=1e-6)
    for (name, expected), (_, found) in zip(
        whole.named_parameters(), split.named_parameters(), strict=True
    ):
        assert torch.allclose(expected.grad, found.grad, rtol=1e-9, atol=1e-12), name


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    before = [parameter.clone() for parameter in model.parameters()]
    rows = torch.randint(0, 61, (2, 14))
    result = step(single_rank(model, TRAIN), rows)
    assert result.skipped and not math.isfinite(result.loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new) or old.isnan().any()


def test_a_skipped_spike_changes_nothing():
    model = small_model()
    before = [parameter.clone() for parameter in model.parameters()]
    rows = torch.randint(0, 61, (2, 14))
    result = step(single_rank(model, TRAIN), rows, is_spike=lambda loss: loss > 1.0)
    assert result.skipped and math.isfinite(result.loss)
    assert all(
        torch.equal(old, new)
        for old, new in zip(before, model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("chunk", "left_out"), [(0, 0), (4, 11 + 13), (13, 13), (100, 13)]
)
def test_tokens_without_logits_are_counted_per_micro_batch(chunk, left_out):
    """Three micro-batches of one row of 13 tokens: with 13, 2 and 0 targets."""
    model = small_model()
    model.loss_chunk = chunk
    ids, targets = torch.randint(0, 61, (3, 13)), torch.tensor([[13], [2], [0]])
    labels = ids.masked_fill(torch.arange(13) >= targets, -100)
    batch = GlobalBatch([*zip(ids.split(1), labels.split(1), strict=True)], 15)
    result = optimizer_step(
        single_rank(model, TRAIN),
        batch,
        1.0,
        lambda loss: False,
        lambda: False,
        OneRank(),
    )
    assert result.tokens_without_logits == left_out


def test_tokens_without_logits_of_a_shared_row_are_those_of_each_part():
    """13 tokens in segments of 4: one rank has 8 of them, of which 1 is a target, the other 5, all targets."""
    model = small_model()
    model.loss_chunk = 3
    ids = torch.randint(0, 61, (1, 13))
    labels = ids.clone()
    labels[:, 1:8] = -100
    ranks = (Context(None, place, 2) for place in range(2))
    assert [
        tokens_without_logits(model, [(ids, labels)], context) for context in ranks
    ] == [7, 0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_a_batch_without_targets_changes_neither_weights_nor_optimizer(optimizer):
    strategy = single_rank(
        small_model(), TRAIN.model_copy(update={"optimizer": optimizer})
    )
    rows = torch.randint(0, 61, (2, 14))
    step(strategy, rows)  # so that moments are not zero
    before = {name: tensor.clone() for name, tensor in strategy.tensors().items()}
    masked = [
        (inputs, torch.full_like(labels, -100)) for inputs, labels in batches(rows, 2)
    ]
    stop = lambda: True  # noqa: E731
    result = optimizer_step(
        strategy, GlobalBatch(masked, 0), 1.0, lambda loss: False, stop, OneRank()
    )
    assert result.skipped and result.stop_requested
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in strategy.tensors().items()
    )


def test_gates_have_a_group_and_a_rate_of_their_own():
    optimizer = build_optimizer(small_model(), TRAIN)
    assert set_learning_rate(optimizer, TRAIN, 110, 4) == 5e-4
    rates = {
        group["name"]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    }
    assert rates == {
        "decay": (5e-4, 0.1),
        "no_decay": (5e-4, 0.0),
        "gates": (5e-3, 0.0),
    }
    assert {
        group["name"]
        for group in build_optimizer(small_model("softmax"), TRAIN).param_groups
    } == {
        "decay",
        "no_decay",
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("frozen", [1, "all_but_memory"])
def test_frozen_weights_have_neither_updates_nor_optimizer_state(optimizer, frozen):
    model = small_model(memory_layers=[1])
    model.freeze(frozen)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    below = {
        name
        for name in before
        if name.startswith(("model.embed_tokens.", "model.layers.0."))
    }
    of_memory = {name for name in before if ".1.self_attn." in name}
    trained = of_memory if frozen == "all_but_memory" else before.keys() - below
    strategy = single_rank(
        model, TRAIN.model_copy(update={"optimizer": optimizer, "init_from": "folder"})
    )
    step(strategy, torch.randint(0, 61, (2, 14)))
    changed = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    states = {
        name.rsplit(".", 1)[0]
        for name in strategy.tensors()
        if name.startswith("optimizer.")
    }
    assert changed == trained and states == {f"optimizer.{name}" for name in changed}


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(scale):
    rows, results = torch.randint(0, 61, (2, 14)), []
    for factor in (1.0, scale):
        model = small_model()
        results.append(step(single_rank(model, TRAIN), rows, factor))
        results.append([parameter.clone() for parameter in model.parameters()])
    assert results[0] == results[2] and all(
        torch.equal(a, b) for a, b in zip(results[1], results[3], strict=True)
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_maps_have_a_group_and_a_rate_of_their_own(optimizer):
    """Shifts have two dimensions, and are no matrices for Muon."""
    train = TRAIN.model_copy(update={"optimizer": optimizer, "map_learning_rate": 2e-3})
    model = small_model(memory_maps=True)
    made = build_optimizer(model, train)
    set_learning_rate(made, train, 110, 4)
    groups = {group["name"]: group for group in made.param_groups}
    assert (groups["maps"]["lr"], groups["maps"]["weight_decay"]) == (1e-3, 0.0)
    known = [parameter for group in made.param_groups for parameter in group["params"]]
    assert len(known) == len(set(known)) == len(list(model.parameters()))
    assert {parameter.ndim for parameter in groups["maps"]["params"]} == {2, 3}


def test_gates_are_reported_by_layer_and_head():
    heads = gate_shares(small_model())
    assert len(heads) == 2 and all(share == 0.5 for layer in heads for share in layer)
    assert gate_shares(small_model("softmax")) == ()
    assert gate_shares(small_model(memory_layers=[1])) == ((), heads[1])


def test_the_parameter_norm_is_that_of_one_vector():
    model = small_model()
    expected = (
        torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        .norm()
        .item()
    )
    assert parameter_norm(model) == pytest.approx(expected, rel=1e-12)


def test_seeds_differ_by_run_step_and_rank_and_are_stable():
    seeds = {
        step_seed(seed, step, rank)
        for seed in (1, 2)
        for step in range(50)
        for rank in range(4)
    }
    assert (
        len(seeds) == 400
        and step_seed(1234, 7, 1) == step_seed(1234, 7, 1) == SEED_OF_FORMAT_1
    )


SEED_OF_FORMAT_1 = 35141326381287424
