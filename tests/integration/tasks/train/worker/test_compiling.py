"""What torch.compile itself makes of the layers."""

from functools import partial

import torch
from torch._dynamo.utils import counters

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.strategies.compiling import Compiled
from infini_llama.tasks.train.worker.strategies.native import LossModule


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
