"""Causal attention as matrix products over blocks of queries, whose softmax weights are kept for the backward pass.

On a CPU, rows of some hundred tokens are faster so than by the fused function, whose backward pass computes the weights again in
tiles. The weights take memory: heads x T / 2 numbers per token. Both passes are operators of their own, so that compiled code
calls them as they are, and has the bits of eager execution there.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import re
from collections.abc import Generator
from typing import Any

import torch

aten = torch.ops.aten
# Queries of one product: what a causal mask hides is then little, and the products are still large ones.
BLOCK = 64
# Names of operators are those of this module: an exported model carries a copy of this file, and a second definition of a name
# would free the first one in torch, which then crashes or computes with what took its memory.
OPERATORS = re.sub(r"\W", "_", __name__)


def blocked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    """Compute `model.backends.causal_attention`; scores and weights have the type of the products, the softmax is computed in fp32."""
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, documents, torch.is_grad_enabled())[0].transpose(1, 2)


@torch.library.custom_op(f"{OPERATORS}::blocked_attention", mutates_args=())
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and, with `keep`, all softmax weights one after another, which `gradients` reads.

    Args:
        q: [B, T, H, d]; k, v: [B, T, Hkv, d]; documents: [B, T].
    """
    batch, _, _, size = q.shape
    count = k.shape[2]
    queries, keys, values = (_grouped(x, count) for x in (q, k, v))
    weights = q.new_empty(_size(q, keep))
    output = torch.empty_like(queries)
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).triu(1)[:, None]
    for start, end, rows, part in _blocks(weights, q, count, keep):
        torch.baddbmm(part, queries[:, rows], keys[:, :end].mT, beta=0, alpha=size**-0.5, out=part)
        scores = part.view(batch, count, end - start, -1, end)
        scores[..., start:].masked_fill_(later[: end - start, :, : end - start], -torch.inf)
        if documents is not None:
            others = documents[:, start:end, None] != documents[:, None, :end]
            scores.masked_fill_(others[:, None, :, None], -torch.inf)
        torch.softmax(part, -1, out=part)
        output[:, rows] = torch.bmm(part, values[:, :end])
    return _ungrouped(output, q), weights if keep else q.new_empty(0)


@torch.library.custom_op(f"{OPERATORS}::blocked_attention_gradients", mutates_args=())
def gradients(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from that of the output [B, T, H, d]."""
    count = k.shape[2]
    queries, keys, values, of_output = (_grouped(x, count) for x in (q, k, v, gradient))
    of_queries, of_keys, of_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for _, end, rows, part in _blocks(weights, q, count, True):
        of_values[:, :end] += torch.bmm(part.mT, of_output[:, rows])
        of_scores = torch.bmm(of_output[:, rows], values[:, :end].mT)
        aten._softmax_backward_data(of_scores, part, -1, part.dtype, grad_input=of_scores)
        of_queries[:, rows] = torch.bmm(of_scores, keys[:, :end])
        of_keys[:, :end] += torch.bmm(of_scores.mT, queries[:, rows])
    scale = q.shape[-1] ** -0.5
    return _ungrouped(of_queries.mul_(scale), q), _ungrouped(of_keys.mul_(scale), k), _ungrouped(of_values, v)


def _grouped(x: torch.Tensor, count: int) -> torch.Tensor:
    """[B, T, h, d] to [B count, T h / count, d]: the heads that read the same keys stand together, by token."""
    return x.unflatten(2, (count, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1).contiguous()


def _ungrouped(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `_grouped`."""
    batch, length, heads, size = like.shape
    count = len(x) // batch
    return x.view(batch, count, length, heads // count, size).transpose(1, 2).reshape(like.shape).contiguous()


def _size(q: torch.Tensor, keep: bool) -> int:
    """Numbers that the weights of all blocks have, or those of the last and largest one."""
    batch, length, heads, _ = q.shape
    ends = [min(start + BLOCK, length) for start in range(0, length, BLOCK)]
    sizes = [(end - start) * end for start, end in zip(range(0, length, BLOCK), ends, strict=True)]
    return batch * heads * (sum(sizes) if keep else max(sizes))


def _blocks(
    weights: torch.Tensor, q: torch.Tensor, count: int, keep: bool
) -> Generator[tuple[int, int, slice, torch.Tensor]]:
    """For each block: its start and end, its rows of grouped queries, and its weights [B Hkv, rows, end]."""
    batch, length, heads, _ = q.shape
    groups, offset = heads // count, 0
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        shape = (batch * count, (end - start) * groups, end)
        size = shape[0] * shape[1] * shape[2]
        yield start, end, slice(start * groups, end * groups), weights[offset : offset + size].view(shape)
        offset += size if keep else 0


@attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, keep: bool) -> Any:
    return q.new_empty(q.shape), q.new_empty(_size(q, True) if keep else 0)


@gradients.register_fake
def _(gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:3], output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    return (*gradients(gradient, *ctx.saved_tensors), None, None)


attend.register_autograd(_backward, setup_context=_setup)
