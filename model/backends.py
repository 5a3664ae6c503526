"""Causal softmax attention by one of three functions.

Which one is chosen once for a run, by its plan or its configuration:

- `sdpa` is torch's, on every device.
- `blocked` is plain matrix products, faster on CPUs for rows of some hundred tokens.
- `flash2` is flash-attn 2 (Dao 2023, arXiv 2307.08691), which needs its package, a GPU and half
  precision.

All compute the same.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from infini_llama.model.blocked import blocked_attention
from infini_llama.model.layout import boundaries

# Rows of more tokens are attended to document by document on a CPU: a mask costs it the pairs that
# it hides.
LONG = 256


@cache
def flash_attention() -> Callable[..., Any]:
    """The function of the package flash-attn.

    It is imported here alone: that the package is installed does not say that it can be imported.

    Raises:
        RuntimeError: it cannot be imported, with the reason.
    """
    try:
        return import_module("flash_attn").flash_attn_varlen_func
    # OSError: a shared library that does not fit this machine
    except (ImportError, AttributeError, OSError) as error:
        raise RuntimeError(
            f"attention backend flash2 is not available: flash_attn_varlen_func ({error})"
        ) from error


class Visible(NamedTuple):
    """Which keys each query sees; its attributes are arguments of `causal_attention`."""

    documents: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    earlier: torch.Tensor | None = None


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None = None,
    backend: str = "sdpa",
    dropout: float = 0.0,
    ends: torch.Tensor | None = None,
    keep_weights: bool = True,
    earlier: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v, where a token sees itself and those before it in its document.

    Args:
        q: [B, H, T, d]; k, v: [B, Hkv, E + T, d], of E tokens before the queries' and of those;
            query head h reads key-value head h // (H / Hkv).
        documents: [B, T], the number of each token's document; None: a row is one.
        dropout: share of the weights that is dropped.
        ends: `model.layout.boundaries` of the documents, where the caller has them; flash2 alone
            looks at them.
        keep_weights: of blocked, for the backward pass, which otherwise computes them again, with
            the same bits.
        earlier: [B, T], of the E tokens before, how many of the last ones each query sees; None:
            all. Equal in a document.

    Returns:
        [B, H, T, d].

    Raises:
        ValueError: the backend has no such name, or cannot drop weights or see earlier tokens.
        RuntimeError: its package is not there.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"attention backend {backend!r} is not one of {', '.join(BACKENDS)}"
        )
    visible = Visible(documents, ends, earlier)
    return BACKENDS[backend](q, k, v, visible, dropout, keep_weights)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    dropout: float,
    keep_weights: bool,
) -> torch.Tensor:
    batch, _, length, _ = q.shape
    if k.shape[2] > length:
        raise ValueError(
            "attention backend flash2 does not support attend_previous_segment; use sdpa"
        )
    # [B, h, T, d] to [B T, h, d]
    q = q.transpose(1, 2).flatten(0, 1)
    k = k.transpose(1, 2).flatten(0, 1)
    v = v.transpose(1, 2).flatten(0, 1)
    ends = visible.ends
    if visible.documents is None:
        ends = torch.arange(
            0, (batch + 1) * length, length, dtype=torch.int32, device=q.device
        )
    elif ends is None:
        ends = boundaries(visible.documents)
    output = flash_attention()(
        q, k, v, ends, ends, length, length, dropout_p=dropout, causal=True
    )
    return output.unflatten(0, (batch, length)).transpose(1, 2)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    dropout: float,
    keep_weights: bool,
) -> torch.Tensor:
    gqa = q.shape[1] != k.shape[1]
    length = q.shape[2]
    is_square = k.shape[2] == length
    documents = visible.documents
    if documents is None and is_square:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=dropout,
            is_causal=True,
            enable_gqa=gqa,
        )
    is_long_on_cpu = (
        q.device.type == "cpu" and length > LONG and not torch.compiler.is_compiling()
    )
    if is_square and documents is not None and is_long_on_cpu:
        return _one_by_one(q, k, v, documents, dropout)
    seen = _mask(visible, length, k.shape[2] - length, q.device)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen,
        dropout_p=dropout,
        enable_gqa=gqa,
    )


def _mask(
    visible: Visible, length: int, before: int, device: torch.device
) -> torch.Tensor:
    """Which keys each query sees [B, 1, length, before + length]; without documents for all B."""
    documents = visible.documents
    if documents is None:
        every = torch.ones(length, before + length, dtype=torch.bool, device=device)
        return every.tril(before)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    if visible.earlier is None:
        return seen
    places = torch.arange(before, device=device)
    return torch.cat(
        (places >= before - visible.earlier[:, None, :, None], seen), dim=-1
    )


def _one_by_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor,
    dropout: float,
) -> torch.Tensor:
    """Attention with one call per document.

    Measured at 2,048 tokens of 5 documents, it takes a fifth of the time of a mask.
    """
    batch, _, length, _ = q.shape
    ends = boundaries(documents).tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    # Each a list with a document's [t, h, d] per entry.
    queries, keys, values = (
        x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (q, k, v)
    )
    outputs: list[torch.Tensor] = []
    for document in zip(queries, keys, values, strict=True):
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in document)
        outputs.append(
            _sdpa(one_q, one_k, one_v, Visible(), dropout, keep_weights=True)[
                0
            ].transpose(0, 1)
        )
    return torch.cat(outputs).unflatten(0, (batch, length)).transpose(1, 2)


def _blocked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    dropout: float,
    keep_weights: bool,
) -> torch.Tensor:
    if dropout:
        raise ValueError(
            "attention backend blocked does not support dropout; "
            "set attention_dropout to 0 or use sdpa"
        )
    return blocked_attention(q, k, v, visible.documents, keep_weights, visible.earlier)


# Each takes what `causal_attention` does, without the backend; what is visible as one record.
BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "sdpa": _sdpa,
    "blocked": _blocked,
    "flash2": _flash,
}
BY_BOUNDARIES = ("flash2",)  # these look at the documents' `ends`
