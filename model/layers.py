"""Parts of a layer beside attention.

Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467), the gated feed-forward
block (Shazeer 2020, arXiv 2002.05202) and activation checkpointing (Chen et al. 2016, arXiv
1604.06174).
"""

# pyright: reportUnknownVariableType=false
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from infini_llama.model import blocked
from infini_llama.model.config import Activation

Checkpointing = Literal["none", "selective", "full"]
aten = torch.ops.aten
# What "selective" keeps, since it takes long to compute: matrix products and attention, but no
# norms and elementwise functions. The second result of blocked attention, its softmax weights, is
# empty unless they are kept.
EXPENSIVE = {
    blocked.OPERATOR,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) for x [..., size].

    The mean and the root are computed in fp32 at least.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)); x is [B, T, hidden_size]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: Activation
    ) -> None:
        super().__init__()
        self.act = ACTIVATIONS[hidden_act]
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def checkpointed(
    function: Callable[..., torch.Tensor],
    kind: Checkpointing | Callable[..., Any],
    *arguments: Any,
) -> torch.Tensor:
    """function(*arguments), with only some of its intermediate results kept.

    The others are computed again in the backward pass. The generators' states are restored, so that
    dropout repeats itself.

    Args:
        kind: "none" keeps all, "selective" the expensive ones and "full" none; or another library's
            function, which is called as torch's `checkpoint`.
    """
    if kind == "none" or not torch.is_grad_enabled():
        return function(*arguments)
    if callable(kind):
        return kind(function, *arguments)
    if kind == "full":
        return checkpoint(function, *arguments, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _keep_expensive)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


def _keep_expensive(
    _context: Any,
    operation: Any,
    *arguments: Any,
    **options: Any,
) -> CheckpointPolicy:
    if operation not in EXPENSIVE:
        return CheckpointPolicy.PREFER_RECOMPUTE
    names = (argument.name for argument in operation._schema.arguments)
    given = dict(zip(names, arguments, strict=False)) | options
    # A kept operator is not run again, so it would draw nothing, and dropout and write jitter after
    # it would draw other numbers.
    if given.get("dropout_p"):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE
