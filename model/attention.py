"""Self-attention over a whole row (softmax) or inside segments with a compressive memory (infini)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from model.config import LlamaConfig
from model.infini_attention import before_each, mix, read, written
from model.rope import Rotary, rotate


@dataclass
class AttentionState:
    """What one layer remembers during generation.

    Softmax: the rotated keys and values of every token so far. Infini: those of the current segment alone, the memory M, z
    that this segment reads, and what the segment will have added to it (pending_M, pending_z); its size does not grow.
    """

    k: torch.Tensor  # [B, Hkv, t, d]
    v: torch.Tensor
    M: torch.Tensor | None = None  # [B, Hkv, d, d]
    z: torch.Tensor | None = None  # [B, Hkv, d]
    pending_M: torch.Tensor | None = None
    pending_z: torch.Tensor | None = None
    segments: int = 0  # completed before the current one

    def size_in_bytes(self) -> int:
        held = (self.k, self.v, self.M, self.z, self.pending_M, self.pending_z)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention of q [B, H, T, d] over k, v [B, Hkv, T, d], each token seeing itself and those before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; parameter names are Hugging Face's, plus `gate` for infini."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        if config.attention == "infini":
            self.gate = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """x [B, T, hidden_size] to the same shape, each token seeing itself and those before it.

        Args:
            rotary: tables of positions 0, 1, …: T of them, or at least a segment's for infini.
        """
        q, k, v = self.project(x)
        if self.config.attention == "infini" and x.shape[1] > self.config.segment_length:
            return self.merge(self.infini(q, k, v, rotary)[0])
        return self.merge(causal_attention(rotate(q, rotary), rotate(k, rotary), v))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, H, T, d], keys and values [B, Hkv, T, d], not rotated."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        return q, k, v

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        """[B, H, T, d] to [B, T, hidden_size] through the output projection."""
        batch, _, length, _ = heads.shape
        return self.o_proj(heads.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim))

    def infini(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, AttentionState]:
        """Infini-attention of more than one segment, without a loop over segments.

        Segments are folded into the batch for the local part, where rotary positions start at 0 in each; the memory is a
        cumulative sum over them. A ragged last segment is padded on the right: causal attention does not look there, and
        padding is masked out of the memory. The first segment has no memory yet, so its gate is left out.

        Args:
            q: [B, H, T, d]; k, v: [B, Hkv, T, d]; T > segment_length, not rotated.

        Returns:
            [B, H, T, d] and the state to generate from.
        """
        length, size = q.shape[2], self.config.segment_length
        segments = -(-length // size)
        padding = segments * size - length
        mask = None
        if padding:
            q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
            mask = (torch.arange(segments * size, device=q.device) < length).view(segments, 1, size)
        # [B, h, S*N, d] -> [B, S, h, N, d]
        q, k, v = (x.unflatten(2, (segments, size)).transpose(1, 2) for x in (q, k, v))
        turned_q, turned_k = rotate(q.flatten(0, 1), rotary), rotate(k.flatten(0, 1), rotary)
        local = causal_attention(turned_q, turned_k, v.flatten(0, 1)).unflatten(0, (-1, segments))
        with torch.autocast(q.device.type, enabled=False):
            added_M, added_z = written(k, v, mask)
            M, z = before_each(added_M), before_each(added_z)
            found = read(q[:, 1:], M[:, 1:], z[:, 1:])
            mixed = torch.cat((local[:, :1], mix(local[:, 1:], found, self.gate)), dim=1)
        output = mixed.transpose(1, 2).flatten(2, 3)[:, :, :length]
        tail = size - padding
        last_k = turned_k.unflatten(0, (-1, segments))[:, -1, :, :tail]
        state = AttentionState(
            last_k, v[:, -1, :, :tail], M[:, -1], z[:, -1], added_M[:, -1], added_z[:, -1], segments - 1
        )
        return output, self._turn_page(state)

    def prefill(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, AttentionState]:
        """`forward`, and the state from which `decode` goes on."""
        q, k, v = self.project(x)
        if self.config.attention == "infini" and x.shape[1] > self.config.segment_length:
            heads, state = self.infini(q, k, v, rotary)
            return self.merge(heads), state
        turned_k = rotate(k, rotary)
        output = self.merge(causal_attention(rotate(q, rotary), turned_k, v))
        if self.config.attention == "softmax":
            return output, AttentionState(turned_k, v)
        pending_M, pending_z = written(k, v)
        state = AttentionState(
            turned_k, v, torch.zeros_like(pending_M), torch.zeros_like(pending_z), pending_M, pending_z
        )
        return output, self._turn_page(state)

    def decode(self, x: torch.Tensor, state: AttentionState, rotary: Rotary) -> tuple[torch.Tensor, AttentionState]:
        """One more token x [B, 1, hidden_size]; equal to `forward` over everything so far.

        Args:
            rotary: tables of the one position that the token has (in its segment, for infini): `state.k.shape[2]`.
        """
        q, k, v = self.project(x)
        keys = torch.cat((state.k, rotate(k, rotary)), dim=2)
        values = torch.cat((state.v, v), dim=2)
        local = F.scaled_dot_product_attention(rotate(q, rotary), keys, values, enable_gqa=self.heads != self.kv_heads)
        if self.config.attention == "softmax":
            return self.merge(local), AttentionState(keys, values)
        assert (
            state.M is not None and state.z is not None and state.pending_M is not None and state.pending_z is not None
        )
        with torch.autocast(x.device.type, enabled=False):
            mixed = mix(local, read(q, state.M, state.z), self.gate) if state.segments else local
            added_M, added_z = written(k, v)
        after = AttentionState(
            keys, values, state.M, state.z, state.pending_M + added_M, state.pending_z + added_z, state.segments
        )
        return self.merge(mixed), self._turn_page(after)

    def _turn_page(self, state: AttentionState) -> AttentionState:
        """At a segment's end what it wrote joins the memory, and its keys and values are let go."""
        if state.k.shape[2] < self.config.segment_length:
            return state
        assert (
            state.M is not None and state.z is not None and state.pending_M is not None and state.pending_z is not None
        )
        nothing_M, nothing_z = torch.zeros_like(state.M), torch.zeros_like(state.z)
        empty_k, empty_v = state.k[:, :, :0].clone(), state.v[:, :, :0].clone()
        M, z = state.M + state.pending_M, state.z + state.pending_z
        return AttentionState(empty_k, empty_v, M, z, nothing_M, nothing_z, state.segments + 1)
