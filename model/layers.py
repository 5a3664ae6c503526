"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467) and the gated feed-forward block (Shazeer 2020,
arXiv 2002.05202)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from infini_llama.model.config import Activation


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) for x [..., size]; the mean and the root in fp32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)); x is [B, T, hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: Activation = "silu") -> None:
        super().__init__()
        self.act = ACTIVATIONS[hidden_act]
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
