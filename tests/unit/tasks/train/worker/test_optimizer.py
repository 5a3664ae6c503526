"""Which parameter is in which group, and that each optimizer's state resumes to the bit."""

import pytest
import torch

from infini_llama.configs.optimizers import OPTIMIZERS
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.patch_environment.footprint import moment_bytes
from infini_llama.tasks.train.worker.strategies.native import init_optimizer_state
from infini_llama.tasks.train.worker.strategies.optimizer import (
    build_optimizer,
    set_learning_rate,
)
from support.one_rank import single_rank


def model_of(tied=False):
    torch.manual_seed(0)
    return Llama(
        LlamaConfig(
            61,
            16,
            32,
            2,
            2,
            1,
            16,
            attention="infini",
            segment_length=4,
            tie_word_embeddings=tied,
        )
    )


def settings(**changes):
    return TrainingConfig(**changes)


def names_by_group(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {
        group["name"]: {names[parameter] for parameter in group["params"]}
        for group in optimizer.param_groups
    }
    assert sum(map(len, groups.values())) == len(names)  # each parameter once
    return groups


@pytest.mark.parametrize("tied", [False, True])
def test_muon_is_for_the_matrices_of_layers(tied):
    model = model_of(tied)
    optimizer = build_optimizer(model, settings(optimizer="muon"))
    groups = names_by_group(model, optimizer)
    assert groups["matrices"] == {
        name for name, _ in model.named_parameters() if "_proj" in name
    }
    assert groups.get("decay", set()) == (set() if tied else {"lm_head.weight"})
    assert (
        set_learning_rate(
            optimizer, settings(optimizer="muon", warmup_steps=0), 1000, 0
        )
        == 1e-3
    )
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3, 1e-2}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loaded_state_continues_bitwise(kind):
    """Three steps, and one step + its tensors into a new model and optimizer + two steps."""
    train = settings(optimizer=kind, warmup_steps=0)
    batches = torch.randint(
        0, 61, (3, 2, 14), generator=torch.Generator().manual_seed(5)
    )

    def steps(model, optimizer, first, last):
        for step in range(first, last):
            set_learning_rate(optimizer, train, 1000, step)
            model.loss(batches[step, :, :-1], batches[step, :, 1:])[0].backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = model_of()
    strategy = single_rank(whole, train)
    optimizer = strategy.optimizer
    before = [parameter.clone() for parameter in whole.parameters()]
    steps(whole, optimizer, 0, 1)
    saved = {name: value.clone() for name, value in strategy.tensors().items()}
    steps(whole, optimizer, 1, 3)
    assert all(
        not torch.equal(a, b) for a, b in zip(before, whole.parameters(), strict=True)
    )

    resumed = model_of()
    again = single_rank(resumed, train)
    other = again.optimizer
    init_optimizer_state(other)
    state = again.tensors()
    assert state.keys() == saved.keys()
    with torch.no_grad():
        for name, value in saved.items():
            state[name].copy_(value)
    steps(resumed, other, 1, 3)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_making_the_state_changes_neither_rates_nor_weights_and_takes_the_estimated_memory(
    kind,
):
    model = model_of()
    optimizer = build_optimizer(model, settings(optimizer=kind, learning_rate=0.3))
    rates = [group["lr"] for group in optimizer.param_groups]
    before = [parameter.clone() for parameter in model.parameters()]
    init_optimizer_state(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == rates and min(rates) > 0
    moments = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if value.ndim
    ]
    assert sum(value.nbytes for value in moments) == moment_bytes(
        model.config, settings(optimizer=kind)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )


def test_muons_updates_are_of_the_size_of_adamws():
    sizes = {}
    for kind in ("adamw", "muon"):
        model = model_of()
        optimizer = build_optimizer(model, settings(optimizer=kind, weight_decay=0.0))
        weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        before = weight.detach().clone()
        model.loss(torch.randint(0, 61, (2, 14)), torch.randint(0, 61, (2, 14)))[
            0
        ].backward()
        optimizer.step()
        sizes[kind] = (weight.detach() - before).square().mean().sqrt().item()
    assert 0.1 < sizes["muon"] / sizes["adamw"] < 1
