"""A model that several ranks compute together (tensor parallelism): each has some attention heads with their memories and gates, a
slice of the MLP, and some words of embedding and head.

Activations between the blocks are whole and the same on every rank; a block begins with `Split.spread` and ends with `Split.joined`,
the conjugate f and g of Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3. Parameters are DTensors, of which `here` is
what this rank computes with; who makes them so decides where they lie (`infini_llama.tasks.train.worker.tensor`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from infini_llama.model.context import gather


class Split(NamedTuple):
    """The ranks that share the model, `size` of them, of which this one is number `place`."""

    group: dist.ProcessGroup
    place: int
    size: int

    def part(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter, which is a DTensor; gradients of it go back there."""
        shared: Any = parameter
        return shared.to_local()

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """x, the same on every rank, for this rank's part of a block; in the backward pass the ranks' gradients are summed."""
        result: Any = _Spread.apply(x, self.group)
        return result

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks' parts of a block give; each gets back the gradient as it is."""
        result: Any = _Joined.apply(x, self.group)
        return result

    def own(self, ids: torch.Tensor, share: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of this rank's `share` words `ids` are, 0 for another rank's, and whether they are this rank's."""
        number = ids - self.place * share
        mine = (number >= 0) & (number < share)
        return number.masked_fill(~mine, 0), mine

    def of_all(self, x: torch.Tensor) -> torch.Tensor:
        """[size, …]: the x of every rank; no gradient goes through."""
        result = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        gather(result, x.contiguous(), group=self.group)
        return result.unflatten(0, (self.size, -1))

    @contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        """Random numbers of this rank's own inside, from where all ranks stand, who then stand together again."""
        seed = int(torch.randint(2**62, ())) + self.place
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(grad_outputs[0], ctx.group), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_outputs[0], None


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the ranks' x, the same to the bit on each; x stays as it is."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def here(parameter: torch.Tensor, split: Split | None) -> torch.Tensor:
    """What this rank computes with of a parameter: its part where there is a `split`."""
    return parameter if split is None else split.part(parameter)


class Linear(nn.Linear):
    """Without bias; with this rank's part of the weight."""

    split: Split | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.linear(x, here(self.weight, self.split))


class Embedding(nn.Embedding):
    """The weight's rows [B, T, D] for ids [B, T]; where ranks share the `words`, each has the rows of its own alone."""

    split: Split | None = None
    words: Split | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = here(self.weight, self.split)
        if self.words is None:
            return F.embedding(ids, weight)
        number, mine = self.words.own(ids, len(weight))
        return self.words.joined(F.embedding(number, weight).masked_fill(~mine[..., None], 0.0))
