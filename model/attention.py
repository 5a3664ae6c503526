"""Causal self-attention with grouped keys and values (Ainslie et al. 2023, arXiv 2305.13245) and rotary positions."""

import torch
import torch.nn.functional as F
from torch import nn

from model.config import LlamaConfig
from model.rope import Rotary


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention of q [B, H, T, d] over k, v [B, Hkv, T, d]; a token sees itself and those before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class KeyValues:
    """Rotated keys and values of `filled` tokens, in buffers [B, Hkv, capacity, d] that never grow; `filled` is the next one's position."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, capacity: int) -> None:
        """Starts with k, v [B, Hkv, t, d], t <= capacity."""
        batch, heads, self.filled, size = k.shape
        self.k, self.v = k.new_empty(batch, heads, capacity, size), v.new_empty(batch, heads, capacity, size)
        self.k[:, :, : self.filled], self.v[:, :, : self.filled] = k, v

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Takes in one more token's k, v [B, Hkv, 1, d] and attends to all with its query [B, H, 1, d]."""
        self.k[:, :, self.filled], self.v[:, :, self.filled] = k[:, :, 0], v[:, :, 0]
        self.filled += 1
        keys, values = self.k[:, :, : self.filled], self.v[:, :, : self.filled]
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] != k.shape[1])

    def size_in_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V over the whole row; parameter names are Hugging Face's.

    `forward` trains. `prefill` and `decode` generate: the first reads a prompt and returns what the layer must remember, the
    second takes one more token and updates that in place.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """x [B, T, hidden_size] to the same shape; `rotary` holds positions 0 … T - 1."""
        q, k, v = self.project(x)
        return self.merge(causal_attention(rotary.turn(q), rotary.turn(k), v))

    def prefill(self, x: torch.Tensor, rotary: Rotary, capacity: int) -> tuple[torch.Tensor, KeyValues]:
        """`forward`, and the keys and values to `decode` from, with room for `capacity` tokens."""
        q, k, v = self.project(x)
        k = rotary.turn(k)
        return self.merge(causal_attention(rotary.turn(q), k, v)), KeyValues(k, v, capacity)

    def decode(self, x: torch.Tensor, rotary: Rotary, state: KeyValues) -> torch.Tensor:
        """One more token x [B, 1, hidden_size]: the last row of `forward` over everything so far; `rotary` holds its position."""
        q, k, v = self.project(x)
        return self.merge(state.attend(rotary.turn(q), rotary.turn(k), v))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, H, T, d], keys and values [B, Hkv, T, d], not rotated."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        """[B, H, T, d] through the output projection to [B, T, hidden_size]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))
