"""One optimizer step: micro-batches, accumulation, clipping, update."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from tasks.train.worker.data import Batch
from tasks.train.worker.parallel import Ranks, no_sync


class Diverged(Exception):
    """The loss or the gradient is not finite; the update was not applied."""


def accumulate(
    module: nn.Module, micro_batches: Iterable[Batch], global_tokens: int, ranks: Ranks, autocast: torch.autocast
) -> torch.Tensor:
    """Adds to every parameter's gradient that of the mean loss over all `global_tokens` targets of the step, on all ranks.

    Dividing the *sum* of losses by the step's global token count makes the result independent of how the batch is split;
    DDP then divides by the world size, which is multiplied in beforehand.

    Returns:
        This rank's sum of losses, a scalar on its device.
    """
    batches = list(micro_batches)
    total = torch.zeros((), dtype=torch.float32, device=ranks.device)
    for number, (inputs, labels) in enumerate(batches):
        with no_sync(module, skip=number < len(batches) - 1):
            with autocast:
                loss = module(inputs, labels)
            (loss * (ranks.world_size / global_tokens)).backward()
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
) -> tuple[float, float, bool]:
    """Forward, backward, one all-reduce of the scalars, clip, update.

    Returns:
        mean loss over the global batch (nats a token), gradient norm before clipping, and whether any rank was asked to stop.

    Raises:
        Diverged: on every rank alike, before the update, when loss or gradient is not finite.
    """
    loss_sum = accumulate(module, micro_batches, global_tokens, ranks, autocast)
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
    loss, stop = ranks.sum(loss_sum.item(), float(wants_to_stop()))
    loss /= global_tokens
    grad_norm = norm.item()  # gradients are equal on all ranks, and so is their norm
    if not (torch.isfinite(norm) and loss == loss and abs(loss) != float("inf")):
        raise Diverged(f"loss {loss} and gradient norm {grad_norm} are not finite; the update was not applied.")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, grad_norm, stop > 0
