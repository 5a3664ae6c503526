"""Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143): softmax inside segments, a compressive memory across them."""

import torch
import torch.nn.functional as F
from torch import nn

from model.attention import Attention, KeyValues, causal_attention
from model.config import LlamaConfig
from model.memory import mix, read, written
from model.rope import Rotary


class InfiniState(KeyValues):
    """What one layer remembers during generation; its size does not depend on how much was read.

    Beside the current segment's keys and values: M [B, Hkv, d, d] and z [B, Hkv, d] of the `segments` completed ones, which
    stay as they are during a segment, as every query of it reads them; what its tokens write waits in pending_M, pending_z.
    """

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, capacity: int, M: torch.Tensor, z: torch.Tensor, segments: int
    ) -> None:
        """Starts inside or at the end of a segment whose rotated keys and values are k, v; `capacity` is a segment's length."""
        super().__init__(k, v, capacity)
        self.M, self.z, self.segments = M, z, segments
        self.pending_M, self.pending_z = torch.zeros_like(M), torch.zeros_like(z)

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Notes tokens of the current segment for the memory: k (not rotated), v [B, Hkv, t, d]. A full segment ends here."""
        added_M, added_z = written(k, v)
        self.pending_M += added_M
        self.pending_z += added_z
        if self.filled == self.k.shape[2]:
            self.M += self.pending_M
            self.z += self.pending_z
            self.pending_M.zero_()
            self.pending_z.zero_()
            self.filled = 0
            self.segments += 1

    def size_in_bytes(self) -> int:
        return super().size_in_bytes() + 2 * (self.M.nbytes + self.z.nbytes)


class InfiniAttention(Attention):
    """Attention of which each query head takes the share sigmoid(gate) from the memory of all earlier segments.

    A row of one segment at most is plain causal attention, exactly: it has no memory to read.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.segment_length = config.segment_length
        self.gate = nn.Parameter(torch.empty(config.num_attention_heads, dtype=torch.float32))

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """x [B, T, hidden_size] to the same shape; `rotary` holds positions 0 … min(T, segment_length) - 1."""
        if x.shape[1] <= self.segment_length:
            return super().forward(x, rotary)
        return self.merge(self.attend(*self.project(x), rotary)[0])

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All segments at once, without a loop.

        They are folded into the batch for local attention, each with positions from 0. Each but the last writes to memory, and
        the running sum of that is what the next one reads, so the first reads nothing and its gate is left out. The last
        may be ragged: it is padded on the right, where causal attention does not look, and as it never writes, neither
        does the padding.

        Args:
            q: [B, H, T, d]; k, v: [B, Hkv, T, d]; not rotated; T > segment_length.

        Returns:
            the heads' outputs [B, H, T, d], and M [B, Hkv, d, d], z [B, Hkv, d] as the last segment reads them.
        """
        length, size = q.shape[2], self.segment_length
        segments = -(-length // size)
        if padding := segments * size - length:
            q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        # [B, h, S N, d] to [B, S, h, N, d]
        q, k, v = (x.unflatten(2, (segments, size)).transpose(1, 2) for x in (q, k, v))
        local = causal_attention(rotary.turn(q).flatten(0, 1), rotary.turn(k).flatten(0, 1), v.flatten(0, 1))
        local = local.unflatten(0, (-1, segments))
        with torch.autocast(q.device.type, enabled=False):
            added_M, added_z = written(k[:, :-1], v[:, :-1])
            M, z = added_M.cumsum(dim=1), added_z.cumsum(dim=1)
            mixed = mix(local[:, 1:], read(q[:, 1:], M, z), self.gate)
        # Joined as [B, S, N, H, d], so that the output projection reads it without another copy.
        heads = torch.cat((local[:, :1].transpose(2, 3), mixed.transpose(2, 3)), dim=1).flatten(1, 2)
        return heads[:, :length].transpose(1, 2), M[:, -1], z[:, -1]

    def prefill(self, x: torch.Tensor, rotary: Rotary, capacity: int) -> tuple[torch.Tensor, InfiniState]:
        """`forward`, and the state to `decode` from, which has room for any number of tokens whatever `capacity` says."""
        q, k, v = self.project(x)
        batch, kv_heads, length, size = k.shape
        if length <= self.segment_length:
            heads = causal_attention(rotary.turn(q), rotary.turn(k), v)
            M = k.new_zeros(batch, kv_heads, size, size, dtype=torch.promote_types(k.dtype, torch.float32))
            z = M[..., 0].clone()
        else:
            heads, M, z = self.attend(q, k, v, rotary)
            M, z = M.clone(), z.clone()  # lets go of the other segments' memories
        earlier = (length - 1) // self.segment_length
        k, v = k[:, :, earlier * self.segment_length :], v[:, :, earlier * self.segment_length :]
        turned_k = rotary.first(k.shape[2]).turn(k)
        state = InfiniState(turned_k, v, self.segment_length, M, z, earlier)
        with torch.autocast(x.device.type, enabled=False):
            state.write(k, v)
        return self.merge(heads), state

    def decode(self, x: torch.Tensor, rotary: Rotary, state: KeyValues) -> torch.Tensor:
        """One more token x [B, 1, hidden_size]: the last row of `forward` over everything so far; `rotary` holds its position."""
        assert isinstance(state, InfiniState)
        q, k, v = self.project(x)
        heads = state.attend(rotary.turn(q), rotary.turn(k), v)
        with torch.autocast(x.device.type, enabled=False):
            if state.segments:
                heads = mix(heads, read(q, state.M, state.z), self.gate)
            state.write(k, v)
        return self.merge(heads)
