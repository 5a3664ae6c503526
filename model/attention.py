"""Causal self-attention with grouped keys and values and rotary positions.

Grouped keys and values are those of Ainslie et al. 2023, arXiv 2305.13245.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from infini_llama.model.backends import causal_attention
from infini_llama.model.config import LlamaConfig
from infini_llama.model.layers import RMSNorm
from infini_llama.model.layout import Rows, Segments
from infini_llama.model.rope import Rotary

Shape = tuple[int, int, int, int]  # [B, Hkv, capacity, d]


class KeyValues:
    """Rotated keys and values of what was read, in buffers of `shape` [B, Hkv, capacity, d].

    Row b holds filled[b] of them.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.filled = [0] * shape[0]

    def together(self) -> bool:
        """Whether all rows hold the same number of tokens."""
        return len(set(self.filled)) == 1

    def grow(self, capacity: int) -> None:
        """Give the buffers room for `capacity` tokens, with what they hold."""
        more = capacity - self.k.shape[2]
        self.k = F.pad(self.k, (0, 0, 0, more))
        self.v = F.pad(self.v, (0, 0, 0, more))

    def positions(self, length: int) -> torch.Tensor:
        """Places of the next `length` tokens, [length] where rows stand together, else [B, length].

        Raises:
            ValueError: there is no room for them.
        """
        if max(self.filled) + length > self.k.shape[2]:
            raise ValueError(
                f"{max(self.filled)} tokens and {length} more are over the capacity of "
                f"{self.k.shape[2]}"
            )
        filled = self.filled[:1] if self.together() else self.filled
        places = torch.tensor(filled, device=self.k.device)[:, None] + torch.arange(
            length, device=self.k.device
        )
        return places[0] if self.together() else places

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: list[int] | None = None,
    ) -> None:
        """Append k, v [B, Hkv, t, d]; of row b the first lengths[b] count."""
        length = k.shape[2]
        if self.together():
            place = slice(self.filled[0], self.filled[0] + length)
            self.k[:, :, place] = k
            self.v[:, :, place] = v
        else:
            row = torch.arange(len(self.filled), device=k.device)[:, None]
            place = self.positions(length)
            self.k[row, :, place] = k.transpose(1, 2)
            self.v[row, :, place] = v.transpose(1, 2)
        added = lengths or [length] * len(self.filled)
        self.filled = [old + new for old, new in zip(self.filled, added, strict=True)]

    def set_row(self, row: int, other: "KeyValues") -> None:
        """Let a row be what `other`, a state of the same layer with one row, has read."""
        filled = other.filled[0]
        self.k[row, :, :filled] = other.k[0, :, :filled]
        self.v[row, :, :filled] = other.v[0, :, :filled]
        self.filled[row] = filled

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: list[int] | None,
    ) -> torch.Tensor:
        """Append the next tokens' k, v [B, Hkv, t, d], and attend to everything so far.

        Returns:
            attention [B, H, t, d] of their queries over everything so far.
        """
        if max(self.filled) == 0:
            self.append(k, v, lengths)
            return causal_attention(q, k, v)
        length = q.shape[2]
        gqa = q.shape[1] != k.shape[1]
        places = self.positions(length)
        single = length == 1 and self.together()
        self.append(k, v, lengths)
        reach = max(self.filled) if lengths is None else int(places.max()) + 1
        k = self.k[:, :, :reach]
        v = self.v[:, :, :reach]
        if single:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
        seen = torch.arange(reach, device=q.device) <= places[..., None]
        if seen.ndim > 2:
            seen = seen[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=gqa)


AnyState = TypeVar("AnyState", bound=KeyValues)


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V over the whole row; parameter names are Hugging Face's.

    `forward` is for whole rows. `read` continues from a state, which it updates.
    """

    def __init__(self, config: LlamaConfig, backend: str = "sdpa") -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.backend = backend
        self.dropout = config.attention_dropout
        self.kv_heads = config.num_key_value_heads
        self.keep_weights = True
        width = config.hidden_size
        q_width = config.num_attention_heads * config.head_size
        kv_width = config.num_key_value_heads * config.head_size
        self.q_proj = nn.Linear(width, q_width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, width, bias=False)
        self.q_norm = (
            RMSNorm(config.head_size, config.rms_norm_eps) if config.qk_norm else None
        )
        self.k_norm = (
            RMSNorm(config.head_size, config.rms_norm_eps) if config.qk_norm else None
        )

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """x [B, T, hidden_size] to the same shape."""
        q, k, v = self.project(x)
        turn = rows.rotary.turn
        return self.merge(self.softmax(turn(q), turn(k), v, rows))

    def read(
        self,
        x: torch.Tensor,
        rotary: Rotary,
        state: KeyValues,
        lengths: list[int] | None = None,
    ) -> torch.Tensor:
        """Continue from a state: x [B, t, hidden_size] of the next tokens to the same shape.

        The result is that of `forward` over everything so far, in the rows of these tokens.

        `rotary` has the tables of all positions from 0. Of row b the first lengths[b] tokens count;
        None: all.
        """
        q, k, v = self.project(x)
        turn = rotary.at(state.positions(x.shape[1])).turn
        return self.merge(state.attend(turn(q), turn(k), v, lengths))

    def new_state(self, batch: int, capacity: int, dtype: torch.dtype) -> KeyValues:
        """Empty state for `batch` rows of at most `capacity` tokens.

        Args:
            dtype: in which keys and values are computed.
        """
        return self.empty(KeyValues, batch, capacity, dtype)

    def empty(
        self,
        kind: Callable[[Shape, torch.dtype, torch.device], AnyState],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
    ) -> AnyState:
        """Empty state of a kind, where the layer's weights are."""
        shape = (batch, self.kv_heads, capacity, self.head_dim)
        return kind(shape, dtype, self.k_proj.weight.device)

    def softmax(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Rows | Segments,
    ) -> torch.Tensor:
        """Softmax attention of rotated q [B, H, T, d] over k, v [B, Hkv, T, d] in this layout."""
        return causal_attention(
            q,
            k,
            v,
            layout.documents,
            self.backend,
            self.dropout if self.training else 0.0,
            layout.boundaries,
            self.keep_weights,
        )

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, H, T, d], keys and values [B, Hkv, T, d], not rotated."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        """[B, H, T, d] through the output projection to [B, T, hidden_size]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))
