"""Causal attention as matrix products over blocks of queries, with its own backward pass.

On a CPU this is faster than the fused function for rows of some hundred tokens. The softmax weights
are kept for the backward pass, heads x T / 2 numbers per token, or computed again there, with the
same bits. Both passes are operators of their own, so that compiled code calls them as they are, and
has the bits of eager execution there.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math
import re
from collections.abc import Generator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from infini_llama.model.layout import boundaries

aten = torch.ops.aten
# Kept weights of each block start at a multiple of 64 bytes, since products may round otherwise
# elsewhere.
ALIGNED = 32
# Names of operators are those of this module: an exported model carries a copy of this file, and a
# second definition of a name would free the first one in torch, which then crashes or computes with
# what took its memory.
OPERATORS = re.sub(r"\W", "_", __name__)


def block_size(length: int, dtype: torch.dtype) -> int:
    """Queries of one product.

    What a causal mask hides is then little, and the products are still large ones.
    """
    return 128 if dtype.itemsize == 2 and length >= 512 else 64


def blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    keep_weights: bool,
    earlier: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `model.backends.causal_attention`.

    Scores and weights have the type of the products; the softmax is computed in fp32.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    output, _ = attend(
        q, k, v, documents, earlier, keep_weights and torch.is_grad_enabled()
    )
    return output.transpose(1, 2)


@torch.library.custom_op(f"{OPERATORS}::blocked_attention", mutates_args=())
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    earlier: torch.Tensor | None,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and, with `keep`, all softmax weights one after another, which `gradients` reads.

    Args:
        q: [B, T, H, d]; k, v: [B, E + T, Hkv, d]; documents, earlier: [B, T].
    """
    count = k.shape[2]
    queries, keys, values = (_grouped(x, count) for x in (q, k, v))
    weights = q.new_empty(_size(q, k, keep))
    output = torch.empty_like(queries)
    for block in _blocks(q, k, documents, earlier, weights, keep):
        part = block.softmax(queries, keys)
        output[block.matrices, block.rows] = torch.bmm(
            part, values[block.matrices, block.keys]
        )
    return _ungrouped(output, q), weights if keep else q.new_empty(0)


@torch.library.custom_op(f"{OPERATORS}::blocked_attention_gradients", mutates_args=())
def gradients(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    earlier: torch.Tensor | None,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from that of the output [B, T, H, d].

    Args:
        weights: those that `attend` kept; empty where none were kept.
    """
    count = k.shape[2]
    scale = q.shape[-1] ** -0.5
    queries, keys, values, of_output = (_grouped(x, count) for x in (q, k, v, gradient))
    kept = weights.numel() > 0
    weights = weights if kept else q.new_empty(_size(q, k, keep=False))
    of_weights = q.new_empty(_size(q, k, keep=False))
    of_queries = torch.empty_like(queries)
    # [B Hkv, d, E + T]: the products that are added to these are faster so than transposed.
    of_keys, of_values = (
        x.new_zeros(len(x), x.shape[2], x.shape[1]) for x in (keys, values)
    )
    for block in _blocks(q, k, documents, earlier, weights, kept):
        here = block.matrices
        rows = block.rows
        seen = block.keys
        part = block.weights if kept else block.softmax(queries, keys)
        of_values[here, :, seen] += torch.bmm(of_output[here, rows].mT, part)
        of_scores = of_weights[: part.numel()].view(part.shape)
        torch.bmm(of_output[here, rows], values[here, seen].mT, out=of_scores)
        aten._softmax_backward_data(
            of_scores, part, -1, part.dtype, grad_input=of_scores
        )
        of_queries[here, rows] = torch.bmm(of_scores, keys[here, seen])
        of_keys[here, :, seen] += torch.bmm(queries[here, rows].mT, of_scores)
    return (
        _ungrouped(of_queries.mul_(scale), q),
        _transposed_back(of_keys.mul_(scale), count),
        _transposed_back(of_values, count),
    )


class Block(NamedTuple):
    """Queries that are computed together, and the keys that they see.

    Attributes:
        matrices: those of the grouped queries and keys.
        rows: of grouped queries.
        keys: of grouped keys, from the first that is seen to the last query's.
        hidden: what is added to the scores of the last keys [rows, queries]: -inf where a query is
            before the key.
        weights: the softmax weights [matrices, rows, keys], or where to write them.
    """

    matrices: slice
    rows: slice
    keys: slice
    hidden: torch.Tensor
    weights: torch.Tensor

    def softmax(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Compute the weights."""
        part = self.weights
        torch.baddbmm(
            part,
            queries[self.matrices, self.rows],
            keys[self.matrices, self.keys].mT,
            beta=0,
            alpha=queries.shape[-1] ** -0.5,
            out=part,
        )
        part[:, :, -self.hidden.shape[1] :] += self.hidden
        return torch.softmax(part, -1, out=part)


class Stretch(NamedTuple):
    """Tokens that may see one another.

    Those from `begin` to before `end`, in the rows from `first` to before `last`, which also see
    the `earlier` keys before them.
    """

    first: int
    last: int
    begin: int
    end: int
    earlier: int


def _blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    documents: torch.Tensor | None,
    earlier: torch.Tensor | None,
    weights: torch.Tensor,
    keep: bool,
) -> Generator[Block]:
    """All blocks, those of a document one after the other.

    Weights that are not kept are all written to the same place.
    """
    batch, length, heads, _ = q.shape
    count = k.shape[2]
    groups = heads // count
    before = k.shape[1] - length
    size = block_size(length, q.dtype)
    offset = 0
    hidden = q.new_full((size, size), -torch.inf).triu_(1).repeat_interleave(groups, 0)
    stretches = [Stretch(0, batch, 0, length, before)]
    if documents is not None:
        stretches = _stretches(documents, earlier)
    for first, last, begin, stop, seen in stretches:
        keys = before + begin - seen
        for start in range(begin, stop, size):
            end = min(start + size, stop)
            shape = (
                (last - first) * count,
                (end - start) * groups,
                before + end - keys,
            )
            numbers = math.prod(shape)
            yield Block(
                matrices=slice(first * count, last * count),
                rows=slice(start * groups, end * groups),
                keys=slice(keys, before + end),
                hidden=hidden[: shape[1], : end - start],
                weights=weights[offset : offset + numbers].view(shape),
            )
            if keep:
                offset += _aligned(numbers)


def _stretches(documents: torch.Tensor, earlier: torch.Tensor | None) -> list[Stretch]:
    """One stretch per document."""
    length = documents.shape[1]
    ends = boundaries(documents).tolist()
    seen = None if earlier is None else earlier.flatten().tolist()
    stretches: list[Stretch] = []
    for start, end in pairwise(ends):
        row = start // length
        begin = start % length
        before = 0 if seen is None else seen[start]
        stretches.append(Stretch(row, row + 1, begin, begin + end - start, before))
    return stretches


def _size(q: torch.Tensor, k: torch.Tensor, keep: bool) -> int:
    """Numbers that the weights of all blocks have at most, or those of the largest one."""
    batch, length, heads, _ = q.shape
    before = k.shape[1] - length
    size = block_size(length, q.dtype)
    # Of a row that is one document.
    sizes: list[int] = []
    for start in range(0, length, size):
        end = min(start + size, length)
        sizes.append(_aligned(heads * (end - start) * (before + end)))
    if not keep:
        return batch * max(sizes)
    # Several documents have less in them, but each of their blocks is aligned: in short rows of few
    # heads, that is more.
    return batch * max(sum(sizes), length * (heads + ALIGNED))


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNED) * ALIGNED


def _grouped(x: torch.Tensor, count: int) -> torch.Tensor:
    """[B, T, h, d] to [B count, T h / count, d].

    The heads that read the same keys stand together, by token.
    """
    return (
        x.unflatten(2, (count, -1))
        .transpose(1, 2)
        .flatten(2, 3)
        .flatten(0, 1)
        .contiguous()
    )


def _ungrouped(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `_grouped`."""
    batch, length, heads, size = like.shape
    count = len(x) // batch
    return (
        x.view(batch, count, length, heads // count, size)
        .transpose(1, 2)
        .reshape(like.shape)
        .contiguous()
    )


def _transposed_back(x: torch.Tensor, count: int) -> torch.Tensor:
    """[B count, d, T] to [B, T, count, d]."""
    return x.unflatten(0, (-1, count)).permute(0, 3, 1, 2).contiguous()


@attend.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    earlier: torch.Tensor | None,
    keep: bool,
) -> Any:
    return q.new_empty(q.shape), q.new_empty(_size(q, k, keep) if keep else 0)


@gradients.register_fake
def _(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], output[1])


def _backward(
    ctx: Any, gradient: torch.Tensor, _: None
) -> tuple[torch.Tensor | None, ...]:
    return (*gradients(gradient, *ctx.saved_tensors), None, None, None)


attend.register_autograd(_backward, setup_context=_setup)
# The operator as `torch.utils.checkpoint` sees it.
OPERATOR = attend._opoverload  # pyright: ignore[reportPrivateUsage]
