"""A row that several ranks share (context parallelism).

Each rank holds a run of its segments, and passes on what they wrote to memory.

Attention inside segments needs nothing of other ranks. A rank's segments together are one affine
map of the memory that they find, M -> A M + B; every rank sends the others its map, of the size of
one memory however long the row is, and joins those of the ranks before it (Blelloch 1990, "Prefix
sums and their applications"; for linear attention Sun et al. 2024, "Linear Attention Sequence
Parallelism", arXiv 2404.02882).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportConstantRedefinition=false
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from infini_llama.model.config import MemoryUpdate
from infini_llama.model.memory import (
    Memory,
    Product,
    delta_factors,
    of_segments,
    running_sums,
    scan,
)

# torch 2.13's names for what was all_gather_into_tensor and reduce_scatter_tensor.
_NEW = hasattr(dist, "all_gather_single")
gather = getattr(dist, "all_gather_single" if _NEW else "all_gather_into_tensor")
reduce_scatter = getattr(
    dist, "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"
)


class Context(NamedTuple):
    """The ranks that share each row, `size` of them, of which this one is number `place`."""

    group: dist.ProcessGroup
    place: int
    size: int

    def part(self, row: torch.Tensor, segment_length: int) -> torch.Tensor:
        """This rank's segments of `row` [B, T].

        They are as many as every other's but for the last, whose share may be smaller.
        """
        share = self.segments(row.shape[1], segment_length) * segment_length
        return row[:, self.place * share : (self.place + 1) * share]

    def segments(self, length: int, segment_length: int) -> int:
        """Segments of a rank's share of rows of `length` tokens."""
        return -(-length // (segment_length * self.size))

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[size, …]: the `x` of every rank, all of one shape.

        In the backward pass each gets back the sum of its gradients.
        """
        result: Any = _Gather.apply(x, self.group, self.size)
        return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, size: int
    ) -> torch.Tensor:
        ctx.group = group
        result = x.new_empty(size * x.shape[0], *x.shape[1:])
        gather(result, x.contiguous(), group=group)
        return result.unflatten(0, (size, -1))

    @staticmethod
    def backward(
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        (gradient,) = grad_outputs
        own_gradient = torch.empty_like(
            gradient[0], memory_format=torch.contiguous_format
        )
        reduce_scatter(
            own_gradient, gradient.contiguous().flatten(0, 1), group=ctx.group
        )
        return own_gradient, None, None


def shared_memories(
    k: torch.Tensor,
    v: torch.Tensor,
    update: MemoryUpdate,
    context: Context,
    keeps: torch.Tensor | None,
    writes: torch.Tensor | None,
) -> tuple[Memory, Memory]:
    """`memory.memories` of this rank's segments of a row.

    Every rank of the context has to call this, and to use what it gets.

    Args:
        k, v, keeps, writes: of this rank's segments; the other arguments as there.

    Returns:
        the memory after each of them [B, S, …], and the one that the first finds [B, …], zeros on
        the first rank.
    """
    features, M, z = of_segments(k, v, writes)
    # [B, S, 1, 1]
    kept = (
        torch.ones_like(z[..., :1, :1])
        if keeps is None
        else keeps.to(z.dtype)[..., None, None]
    )
    # Whether what is found here is still there after each segment.
    through = kept.cumprod(dim=1)
    if update == "linear":
        sums = running_sums(_joined(M, z), None, keeps)
        before = _passed_on(through[:, -1, ..., None], sums[:, -1], torch.mul, context)
        return _split(sums + through[..., None] * before[:, None]), _split(before)
    sums = running_sums(z, None, keeps)
    z_before = _passed_on(through[:, -1], sums[:, -1], torch.mul, context)
    z_after = sums + through * z_before[:, None]
    A = delta_factors(features, z_after, z_before, update, keeps)
    # Each segment's own map and the product of those up to it are one recurrence: its start is
    # (M, A) in place of M.
    first = _nothing_on_the_first(A[:, :1], context)
    starts = torch.cat(
        (M, torch.cat((first, torch.zeros_like(A[:, 1:])), dim=1)), dim=-1
    )
    later = torch.cat((torch.zeros_like(first), A[:, 1:]), dim=1)
    M, A = scan(later, starts, torch.matmul).chunk(2, dim=-1)
    M_before = _passed_on(A[:, -1], M[:, -1], torch.matmul, context)
    return Memory(M + A @ M_before[:, None], z_after), Memory(M_before, z_before)


def _passed_on(
    A: torch.Tensor,
    B: torch.Tensor,
    product: Product,
    context: Context,
) -> torch.Tensor:
    """Result of the maps x -> product(A, x) + B of all ranks before this one, shaped as B [b, …].

    They are applied one after another, from zeros.
    """
    size = B[0].numel()
    of_ranks = context.gathered(torch.cat((B.flatten(1), A.flatten(1)), dim=1))
    x = _nothing_on_the_first(of_ranks[0, :, :size].view_as(B), context)
    for of_rank in of_ranks[1 : context.place]:
        x = product(of_rank[:, size:].view_as(A), x) + of_rank[:, :size].view_as(B)
    return x


def _nothing_on_the_first(x: torch.Tensor, context: Context) -> torch.Tensor:
    """x, or on the first rank zeros that still depend on it.

    Its backward pass has to meet the other ranks' too.
    """
    return (
        x
        if context.place > 0
        else x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0.0)
    )


def _joined(M: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """One tensor [..., d, d + 1] of M [..., d, d] and z [..., d]."""
    return torch.cat((M, z[..., None]), dim=-1)


def _split(joined: torch.Tensor) -> Memory:
    return Memory(joined[..., :-1], joined[..., -1])
