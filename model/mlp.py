"""The gated feed-forward block (SwiGLU and GeGLU, Shazeer 2020, arXiv 2002.05202)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from infini_llama.model.config import Activation
from infini_llama.model.split import Linear

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)); x is [B, T, hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: Activation = "silu") -> None:
        super().__init__()
        self.act = ACTIVATIONS[hidden_act]
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
