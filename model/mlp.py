"""The gated feed-forward block (SwiGLU, Shazeer 2020, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); x is [B, T, hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
