"""Compiled code is used where it agrees with eager execution, and never silently not."""

import json

import pytest
import torch

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.strategies.compiling import compile_if_it_agrees
from infini_llama.tasks.train.worker.strategies.native import LossModule
from support.one_rank import OneRank
from support.records import make_plan


@pytest.fixture
def module() -> LossModule:
    torch.manual_seed(0)
    return LossModule(Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16)))


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    return folder


def compile_as(module: LossModule, run_dir, forward, monkeypatch):
    """With `forward(original, *arguments)` as what torch.compile makes of the layers."""
    monkeypatch.setattr(
        torch,
        "compile",
        lambda original, **options: lambda *arguments: forward(original, *arguments),
    )
    ids = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(1))

    def first_batch() -> float:
        loss = module(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return loss.item()

    return compile_if_it_agrees(
        module,
        module.model,
        make_plan(compile="block"),
        first_batch,
        OneRank(),
        run_dir,
    )


def called(module: LossModule) -> bool:
    return "forward" in module.model.model.layers[0].__dict__


def test_code_that_agrees_is_used(module, run_dir, monkeypatch):
    compile_as(
        module, run_dir, lambda original, *arguments: original(*arguments), monkeypatch
    )
    assert (
        called(module)
        and json.loads((run_dir / "compile.json").read_text())["reason"] == ""
    )
    assert all(parameter.grad is None for parameter in module.parameters())


class WrongBackward(torch.autograd.Function):
    """The right value with a gradient that is 1 % off: equal losses prove nothing."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * 1.01


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda original, *arguments: original(*arguments) * 1.01, "its loss differs"),
        (
            lambda original, *arguments: original(*arguments) * float("nan"),
            "its loss differs",
        ),
        (
            lambda original, *arguments: WrongBackward.apply(original(*arguments)),
            "its gradients by",
        ),
        (
            lambda original, *arguments: 1 / 0,
            "cannot be compiled here (ZeroDivisionError: division by zero)",
        ),
        (
            lambda original, *arguments: next(iter(())),
            "cannot be compiled here (StopIteration: no message)",
        ),
    ],
)
def test_compiled_code_that_disagrees_is_disabled_with_a_warning(
    module, run_dir, monkeypatch, caplog, forward, reason
):
    compile_as(module, run_dir, forward, monkeypatch)
    assert not called(module) and reason in caplog.text
    caplog.clear()
    compile_as(
        module, run_dir, lambda original, *arguments: original(*arguments), monkeypatch
    )
    assert not called(module) and caplog.text


def test_dropping_compiled_code_is_reported_as_no_longer_exact(
    module, run_dir, monkeypatch, caplog
):
    compile_as(
        module, run_dir, lambda original, *arguments: original(*arguments), monkeypatch
    )
    module.model.model.layers[0].__dict__.pop("forward")
    module.model.model.layers[1].__dict__.pop("forward")
    compile_as(
        module,
        run_dir,
        lambda original, *arguments: original(*arguments) * 2,
        monkeypatch,
    )
    assert not called(module) and "bitwise" in caplog.text


def test_a_batch_without_a_loss_proves_nothing_and_does_not_fail(
    module, run_dir, monkeypatch, caplog
):
    monkeypatch.setattr(
        torch,
        "compile",
        lambda original, **options: lambda *arguments: original(*arguments) * 2,
    )
    plan = make_plan(compile="block")
    compile_if_it_agrees(module, module.model, plan, lambda: 0.0, OneRank(), run_dir)
    assert (
        not called(module)
        and caplog.text
        and json.loads((run_dir / "compile.json").read_text())["reason"]
    )
