"""What torch.compile itself makes of the layers."""

from functools import partial
from types import SimpleNamespace

import torch
from torch._dynamo.utils import counters

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.metrics import ValidationLine
from infini_llama.tasks.train.worker.callbacks.callback import Training
from infini_llama.tasks.train.worker.callbacks.evaluation import Evaluation
from infini_llama.tasks.train.worker.strategies.compiling import Compiled
from infini_llama.tasks.train.worker.strategies.native import LossModule
from support.one_rank import single_rank
from support.records import make_attempt


def test_layers_share_the_code_that_is_generated_once(monkeypatch):
    torch.manual_seed(0)
    module = LossModule(Llama(LlamaConfig(61, 16, 32, 4, 2, 1, 16)))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    Compiled(module, module.model, "block").switch_on()
    ids = torch.randint(0, 61, (2, 13))
    for _ in range(2):
        module(ids[:, :-1], ids[:, 1:]).backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_whole_takes_the_loss_with_it():
    module = LossModule(Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16)))
    assert Compiled(module, module.model, "whole").parts == [module]
    assert len(Compiled(module, module.model, "block").parts) == 2


def test_compiled_code_is_used_in_training_and_not_in_evaluation(monkeypatch, tmp_path):
    calls = []

    def backend(graph, _):
        return lambda *arguments: calls.append(graph) or graph(*arguments)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    strategy = single_rank(Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16)))
    Compiled(strategy.module, strategy.model, "block").switch_on()
    ids = torch.randint(0, 61, (2, 13))

    def step(module, *_):
        return ValidationLine(
            step=1, loss=module(ids[:, :-1], ids[:, 1:]).item(), tokens=24
        )

    validation, metrics = SimpleNamespace(measure=step), SimpleNamespace(writer=None)
    heartbeat = SimpleNamespace(beat=lambda *_: None)
    training = Training(
        make_attempt(tmp_path), strategy, None, strategy.ranks, heartbeat, None
    )
    evaluation = Evaluation(training, validation, metrics)
    loss = step(strategy.module).loss
    assert len(calls) == 2
    assert abs(evaluation._measure(1, lambda: False).loss - loss) < 1e-4
    assert len(calls) == 2
    step(strategy.module)
    assert len(calls) == 4 and len(set(map(id, calls))) == 1, (
        "nothing was compiled anew"
    )
