"""environment.precision=fp8: what torchao is given, and what a model computes with it where it is installed."""

import sys
from types import ModuleType

import pytest
import torch

from infini_llama.configs.errors import ConfigError
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.initial_model import use_fp8
from support.models import small


@pytest.fixture
def torchao(monkeypatch):
    """A torchao that only records its calls."""
    calls, float8 = [], ModuleType("torchao.float8")
    float8.Float8LinearConfig = lambda **fields: fields
    float8.convert_to_float8_training = lambda module, config: calls.append((module, config))
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    return calls


def test_the_layers_are_converted_and_the_head_is_not(torchao):
    model = Llama(small())
    use_fp8(model)
    assert torchao == [(model.model.layers, {"emulate": True})]


def test_without_torchao_the_configuration_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match="torchao"):
        use_fp8(Llama(small()))


def test_losses_and_gradients_are_nearly_those_without():
    pytest.importorskip("torchao")
    model = Llama(small(hidden_size=64, intermediate_size=128, vocab_size=96, initializer_range=0.02))
    names = [name for name, _ in model.named_parameters()]
    ids = torch.randint(0, 96, (2, 33))
    results = []
    for convert in (False, True):
        if convert:
            use_fp8(model)
        model.zero_grad()
        total, count = model.loss(ids[:, :-1], ids[:, 1:])
        (total / count).backward()
        results.append((total / count, torch.cat([value.grad.flatten() for value in model.parameters()])))
    (loss, gradient), (found, other) = results
    assert names == [name for name, _ in model.named_parameters()] and list(model.state_dict()) == list(
        Llama(model.config).state_dict()
    )
    assert loss != found and abs(loss - found) < 0.05 * loss
    assert (gradient - other).norm() < 0.2 * gradient.norm()
