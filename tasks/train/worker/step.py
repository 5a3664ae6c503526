"""One optimizer step: micro-batches, accumulation, clipping, update."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from infini_llama.tasks.train.worker.data.loader import Batch
from infini_llama.tasks.train.worker.strategies.deepspeed import Zero
from infini_llama.tasks.train.worker.strategies.native import clip, synchronized
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the global batch, nats a token; grad_norm: before clipping; `skipped`: the update was left out."""

    loss: float
    grad_norm: float
    stop: bool
    skipped: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def accumulate(
    module: nn.Module,
    micro_batches: Iterable[Batch],
    global_tokens: int,
    ranks: Ranks,
    autocast: torch.autocast,
    scale: float = 1.0,
) -> torch.Tensor:
    """Adds to every parameter's gradient that of the mean loss over all `global_tokens` targets of the step, on all ranks.

    Dividing the *sum* of losses by the step's global token count makes the result independent of how the batch is split;
    the strategy then averages over the ranks, whose number is multiplied in beforehand. So is `scale`, of fp16's loss scaling.

    Returns:
        This rank's sum of losses, a scalar on its device.
    """
    batches = list(micro_batches)
    total = torch.zeros((), dtype=torch.float32, device=ranks.device)
    for number, batch in enumerate(batches):
        with synchronized(module, last=number == len(batches) - 1):
            with autocast:
                loss = module(*batch)
            scaled = loss * (ranks.world_size / global_tokens * scale)
            if isinstance(module, Zero):
                module.backward(scaled, last=number == len(batches) - 1)
            else:
                scaled.backward()
        total += loss.detach()
    return total


def train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Batch],
    global_tokens: int,
    max_grad_norm: float,
    ranks: Ranks,
    autocast: torch.autocast,
    wants_to_stop: Callable[[], bool],
    is_spike: Callable[[float], bool] = lambda loss: False,
    scale: float = 1.0,
) -> StepResult:
    """Forward, backward, one all-reduce of the scalars, clip, update.

    An update that is not finite, or whose loss `is_spike`, is left out, on every rank alike:
    the summed loss and the reduced gradients are the same on all.
    `stop` of the result says whether any rank was asked to stop.
    """
    loss_sum = accumulate(module, micro_batches, global_tokens, ranks, autocast, scale)
    if isinstance(module, Zero):  # clips in its own partitions
        total, stop = ranks.sum(loss_sum.item(), float(wants_to_stop()))
        loss = total / global_tokens
        wanted = math.isfinite(loss) and not is_spike(loss)
        grad_norm = module.step(wanted, scale)
        return StepResult(loss, grad_norm, stop > 0, not (wanted and math.isfinite(grad_norm)))
    if scale != 1.0:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / scale)
    norm = clip(module, max_grad_norm)
    total, stop = ranks.sum(loss_sum.item(), float(wants_to_stop()))
    loss, grad_norm = total / global_tokens, norm.item()
    good = math.isfinite(loss) and math.isfinite(grad_norm) and not is_spike(loss)
    if good:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, grad_norm, stop > 0, not good)
