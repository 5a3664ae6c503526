"""Half weights against autocast: the same bits with fewer casts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.data.prefetch import GlobalBatch
from infini_llama.tasks.train.worker.optimizer import build_optimizer
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
from infini_llama.tasks.train.worker.trainer import optimizer_step
from support.models import config as config
from support.one_rank import OneRank

STEPS, MICRO_BATCHES, LAYERS = 3, 3, 2
LINEAR = 7 * LAYERS


class WeightCasts(TorchDispatchMode):
    """Counts casts of whole matrices of the layers to bf16, and back."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.count += 1
        return func(*args, **(kwargs or {}))


def trained(config, half_weights: bool, checkpointing="none", fused=False, chunk=0, backend="sdpa", **model):
    """The losses, weights and number of casts of some steps."""
    torch.manual_seed(1)
    llama = Llama(config(**model), backend)
    llama.checkpoint_activations(checkpointing)
    llama.fuse_projections(fused)
    llama.loss_chunk = chunk
    strategy = build_strategy(llama, TrainingConfig(), "bf16", 2, OneRank(), build_optimizer, half_weights)
    generator, losses = torch.Generator().manual_seed(2), []
    matrices = {value.shape for name, value in llama.named_parameters() if ".layers." in name and value.ndim == 2}
    with WeightCasts(matrices) as casts:
        for _ in range(STEPS):
            rows = torch.randint(0, 97, (MICRO_BATCHES, 2, 30), generator=generator)
            batch = GlobalBatch([(part[:, :-1], part[:, 1:]) for part in rows], rows[..., 1:].numel())
            losses.append(optimizer_step(strategy, batch, 1.0, lambda _: False, lambda: False, OneRank()).loss)
    return losses, dict(llama.named_parameters()), casts.count


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"attention": "infini", "fused": True, "chunk": 20},
        {"checkpointing": "full", "hidden_dropout": 0.1},
        {"checkpointing": "selective", "backend": "blocked"},
    ],
)
def test_the_bits_are_those_of_autocast(config, case):
    losses, weights, _ = trained(config, False, **case)
    found, copied, _ = trained(config, True, **case)
    assert found == losses
    for name, value in copied.items():
        assert value.dtype == torch.float32 and torch.equal(value, weights[name]), name


def test_micro_batches_cast_no_weights(config):
    """Autocast makes a tensor of every weight and gradient in every micro-batch; here the step's first gradient is one, and later ones
    are added to it."""
    assert trained(config, False)[2] == STEPS * MICRO_BATCHES * LINEAR * 2
    assert trained(config, True)[2] == STEPS * LINEAR
