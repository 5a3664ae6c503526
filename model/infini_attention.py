"""Infini-attention: softmax inside segments, a compressive memory across them.

It is that of Munkhdalai et al. 2024, arXiv 2404.07143.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportConstantRedefinition=false
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from infini_llama.model.attention import Attention, KeyValues, Shape
from infini_llama.model.config import LlamaConfig, MemoryUpdate
from infini_llama.model.context import shared_memories
from infini_llama.model.layout import Rows, Segments
from infini_llama.model.memory import Memory, memories, mix, retrieve
from infini_llama.model.rope import Rotary

# Takes A_dot and A_mem [B, S, H, N, d] of the segments that read, and the M [B, S, Hkv, d, d] that
# each of them reads.
Observer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class HeadMaps(nn.Module):
    """x [..., H, N, d] to A x + b of each head, in fp32 at least; at first A = I, b = 0.

    So the memory's queries and keys are of its own, while local attention keeps its own.
    """

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(heads, size, size, dtype=torch.float32))
        self.shift = nn.Parameter(torch.empty(heads, size, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        turned = torch.einsum("...hnd,hed->...hne", x.to(wide), self.matrix.to(wide))
        return turned + self.shift.to(wide)[:, None]


class SegmentState(KeyValues):
    """State of one layer during generation; its size does not depend on how much was read.

    The current segment's keys and values, rotated; row b has completed segments[b] before it.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self.segments = [0] * shape[0]

    def set_row(self, row: int, other: KeyValues) -> None:
        super().set_row(row, other)
        assert isinstance(other, SegmentState)
        self.segments[row] = other.segments[0]

    def keep_plain(self, k: torch.Tensor, places: torch.Tensor) -> None:
        """Keep what a memory needs of the next tokens' keys k [B, Hkv, t, d], not rotated."""

    def restart(
        self,
        row: int,
        plain_k: torch.Tensor,
        after: Memory | None,
        completed: int,
    ) -> None:
        """Keep what a memory needs once whole segments of a row and a rest were read.

        Args:
            plain_k: the rest's keys [Hkv, rest, d].
            completed: number of whole segments.
        """


class InfiniState(SegmentState):
    """A SegmentState and a memory.

    Of the current segment also its keys as they are, which are written to memory when it is full,
    and M, z of the completed ones, which stay as they are during a segment, as every query of it
    reads them.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        batch, heads, _, size = shape
        wide = torch.promote_types(dtype, torch.float32)
        self.plain_k = torch.zeros_like(self.k)
        self.memory = Memory(
            torch.zeros(batch, heads, size, size, dtype=wide, device=device),
            torch.zeros(batch, heads, size, dtype=wide, device=device),
        )

    def set_row(self, row: int, other: KeyValues) -> None:
        super().set_row(row, other)
        assert isinstance(other, InfiniState)
        self.plain_k[row] = other.plain_k[0]
        self.memory.M[row] = other.memory.M[0]
        self.memory.z[row] = other.memory.z[0]

    def keep_plain(self, k: torch.Tensor, places: torch.Tensor) -> None:
        if places.ndim == 1:
            self.plain_k[:, :, places] = k
        else:
            row = torch.arange(len(places), device=k.device)[:, None]
            self.plain_k[row, :, places] = k.transpose(1, 2)

    def restart(
        self,
        row: int,
        plain_k: torch.Tensor,
        after: Memory | None,
        completed: int,
    ) -> None:
        self.plain_k[row, :, : plain_k.shape[1]] = plain_k
        if completed and after is not None:
            self.memory.M[row] = after.M[row, completed - 1]
            self.memory.z[row] = after.z[row, completed - 1]


class SegmentAttention(Attention):
    """Softmax attention inside segments of `segment_length` tokens: `attention: local`.

    Each segment has positions from 0. A row of one segment at most is plain causal attention,
    exactly.
    """

    def __init__(self, config: LlamaConfig, backend: str = "sdpa") -> None:
        super().__init__(config, backend)
        self.segment_length = config.segment_length

    def forward(self, x: torch.Tensor, rows: Rows | Segments) -> torch.Tensor:
        """x [B, T, hidden_size] to the same shape."""
        assert isinstance(rows, Segments)
        q, k, v = self.project(x)
        heads, _ = self.attend(q, k, v, rows)
        return self.merge(heads)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Segments,
        state: SegmentState | None = None,
    ) -> tuple[torch.Tensor, Memory | None]:
        """All segments at once, without a loop.

        They are folded into the batch for local attention. The last may be ragged: it is padded on
        the right, where causal attention does not look.

        Args:
            q: [B, H, T, d]; k, v: [B, Hkv, T, d]; not rotated.
            state: whose memory the first segment reads and all, the last too, write to.

        Returns:
            the heads' outputs [B, H, T, d], and of a layer with a memory and a state the memories
            after each segment [B, S, …], of which that of a ragged one has padding in it.
        """
        length = q.shape[2]
        size = min(self.segment_length, length)
        count = -(-length // size)
        padding = count * size - length
        if padding:
            q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        # [B, h, S N, d] to [B, S, h, N, d]
        q, k, v = (x.unflatten(2, (count, size)).transpose(1, 2) for x in (q, k, v))
        turn = layout.rotary.first(size).turn
        local = self.softmax(
            turn(q).flatten(0, 1),
            turn(k).flatten(0, 1),
            v.flatten(0, 1),
            layout,
        )
        heads, after = self.with_memory(q, k, v, local.unflatten(0, (-1, count)), layout, state)
        # Joined as [B, S N, H, d], so that the output projection reads it without another copy.
        return heads.transpose(2, 3).flatten(1, 2)[:, :length].transpose(1, 2), after

    def with_memory(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        local: torch.Tensor,
        layout: Segments,
        state: SegmentState | None,
    ) -> tuple[torch.Tensor, Memory | None]:
        """`local` [B, S, H, N, d] mixed with what its queries find in the memory, and the memories.

        Here there is none.
        """
        return local, None

    def with_state(self, q: torch.Tensor, local: torch.Tensor, state: SegmentState) -> torch.Tensor:
        """`local` [B, H, t, d] mixed with what its queries find in the state's memory.

        Here there is none.
        """
        return local

    def write_full(self, full: list[int], state: SegmentState) -> None:
        """Write the current segments of these rows, which are full, to the state's memory.

        Here there is none.
        """

    def read(
        self,
        x: torch.Tensor,
        rotary: Rotary,
        state: KeyValues,
        lengths: list[int] | None = None,
    ) -> torch.Tensor:
        """Continue from a state, as `Attention.read` does.

        `rotary` has the tables of a segment's positions.

        Raises:
            ValueError: several tokens for rows that do not stand together.
        """
        assert isinstance(state, SegmentState)
        q, k, v = self.project(x)
        together = state.together() and len(set(state.segments)) == 1
        if x.shape[1] > 1 and not together:
            raise ValueError(
                "sequences at different positions can only be read one token at a time; "
                "read each one separately"
            )
        heads: list[torch.Tensor] = []
        start = 0
        if lengths is None:  # what still fits into the segment that was begun
            start = min(x.shape[1], self.segment_length - max(state.filled))
            heads.append(
                self._inside(
                    q[:, :, :start],
                    k[:, :, :start],
                    v[:, :, :start],
                    rotary,
                    state,
                )
            )
        if start < x.shape[1]:
            q, k, v = (part[:, :, start:] for part in (q, k, v))
            lengths = lengths or [q.shape[2]] * q.shape[0]
            heads.append(self._whole(q, k, v, rotary, state, lengths))
        return self.merge(torch.cat(heads, dim=2))

    def _inside(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        state: SegmentState,
    ) -> torch.Tensor:
        """Heads [B, H, t, d] of tokens that stay inside their rows' current segments.

        The segments that are then full are written to memory.
        """
        places = state.positions(q.shape[2])
        turn = rotary.at(places).turn
        state.keep_plain(k, places)
        heads = state.attend(turn(q), turn(k), v, None)
        full = [row for row, filled in enumerate(state.filled) if filled == self.segment_length]
        with torch.autocast(q.device.type, enabled=False):
            heads = self.with_state(q, heads, state)
            if full:
                self.write_full(full, state)
        for row in full:
            state.filled[row] = 0
            state.segments[row] += 1
        return heads

    def _whole(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        state: SegmentState,
        lengths: list[int],
    ) -> torch.Tensor:
        """Heads [B, H, t, d] of tokens that begin with a segment.

        They are computed in the parallel form, from and to the state's memory. Of row b lengths[b]
        count.
        """
        heads, after = self.attend(q, k, v, Segments(rotary), state)
        for row, length in enumerate(lengths):
            completed, rest = divmod(length, self.segment_length)
            tail = slice(completed * self.segment_length, length)
            state.k[row, :, :rest] = rotary.first(rest).turn(k[row, :, tail])
            state.v[row, :, :rest] = v[row, :, tail]
            state.restart(row, k[row, :, tail], after, completed)
            state.filled[row] = rest
            state.segments[row] += completed
        return heads

    def new_state(self, batch: int, capacity: int) -> SegmentState:
        """Empty state, which has room for any number of tokens, whatever `capacity` is."""
        return self.empty(SegmentState, batch, self.segment_length)


class InfiniAttention(SegmentAttention):
    """Attention inside segments, mixed with what is found in the memory of all earlier ones.

    Each query head takes the share sigmoid(gate) of its output from the memory.

    With `memory_maps` what it writes and reads goes through maps of keys and queries first.

    Each segment but the last writes to memory, and the running sum of that is what the next one
    reads, so the first reads nothing and its gate is left out. Where `uses_memory` is False the
    memory is left out.
    """

    def __init__(self, config: LlamaConfig, backend: str = "sdpa") -> None:
        super().__init__(config, backend)
        self.update: MemoryUpdate = config.memory_update
        self.uses_memory = True
        self.observer: Observer | None = None
        # A tensor, so that compiled code need not change with it.
        self.write_range: torch.Tensor | None = None
        self.gate = nn.Parameter(torch.empty(config.num_attention_heads, dtype=torch.float32))
        self.memory_q: nn.Module = nn.Identity()
        self.memory_k: nn.Module = nn.Identity()
        if config.memory_maps:
            self.memory_q = HeadMaps(config.num_attention_heads, config.head_size)
            self.memory_k = HeadMaps(config.num_key_value_heads, config.head_size)

    def with_memory(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        local: torch.Tensor,
        layout: Segments,
        state: SegmentState | None,
    ) -> tuple[torch.Tensor, Memory | None]:
        if not self.uses_memory:
            return local, None
        with torch.autocast(q.device.type, enabled=False):
            before = state.memory if isinstance(state, InfiniState) and state.segments[0] else None
            count = k.shape[1]
            writing = count if state is not None else count - 1
            after = None
            all_writes = self._jittered(layout.writes, k) if self.training else layout.writes
            if layout.context is not None:
                after, before = shared_memories(
                    self.memory_k(k),
                    v,
                    self.update,
                    layout.context,
                    layout.keeps,
                    all_writes,
                )
            elif writing:
                keeps = None if layout.keeps is None else layout.keeps[:, :writing]
                writes = None if all_writes is None else all_writes[:, :writing]
                keys = self.memory_k(k[:, :writing])
                after = memories(keys, v[:, :writing], self.update, before, keeps, writes)
            first = 0 if before is not None else 1  # the first segment that has something to read
            parts = [local[:, :first]]
            if after is not None and first < count:
                M = after.M[:, : count - 1]
                z = after.z[:, : count - 1]
                if before is not None:
                    M = torch.cat((before.M[:, None], M), dim=1)
                    z = torch.cat((before.z[:, None], z), dim=1)
                reads = None if layout.reads is None else layout.reads[:, first:]
                retrieved = retrieve(self.memory_q(q[:, first:]), M, z)
                if self.observer is not None:
                    self.observer(local[:, first:], retrieved, M)
                parts.append(mix(local[:, first:], retrieved, self.gate, reads))
        return torch.cat([part.transpose(2, 3) for part in parts], dim=1).transpose(2, 3), after

    def _jittered(self, writes: torch.Tensor | None, k: torch.Tensor) -> torch.Tensor | None:
        """`writes` [B, S, N] times a random factor per row and segment.

        It is log-uniform between 1 and e^write_range. A fact is then read among as much else as in
        a text with that many times as many segments.
        """
        if self.write_range is None:
            return writes
        drawn = torch.rand(
            *k.shape[:2],
            1,
            device=k.device,
            dtype=torch.promote_types(k.dtype, torch.float32),
        )
        factors = torch.exp(self.write_range * drawn)
        return factors if writes is None else factors * writes

    def set_write_jitter(self, most: float) -> None:
        """In training, scale what each segment writes by a random factor between 1 and `most`."""
        if self.write_range is None:
            self.write_range = torch.zeros((), device=self.gate.device)
        self.write_range.fill_(math.log(most))

    def with_state(self, q: torch.Tensor, local: torch.Tensor, state: SegmentState) -> torch.Tensor:
        if not isinstance(state, InfiniState) or not any(state.segments):
            return local
        reads = None
        if not all(state.segments):
            completed = torch.tensor(state.segments, device=q.device)
            reads = completed[:, None].expand(-1, q.shape[2]) > 0
        return mix(local, retrieve(self.memory_q(q), *state.memory), self.gate, reads)

    def write_full(self, full: list[int], state: SegmentState) -> None:
        if not isinstance(state, InfiniState):
            return
        keeps = torch.tensor([[state.segments[row] > 0] for row in full], device=state.k.device)
        before = Memory(state.memory.M[full], state.memory.z[full])
        after = memories(
            self.memory_k(state.plain_k[full][:, None]),
            state.v[full][:, None],
            self.update,
            before,
            keeps,
        )
        state.memory.M[full] = after.M[:, 0]
        state.memory.z[full] = after.z[:, 0]

    def write(self, x: torch.Tensor, state: KeyValues) -> None:
        """Read whole segments x [B, n N, hidden_size] whose outputs are not needed.

        Rows stand together at the beginning of a segment. The memory is then the one that `read`
        leaves.
        """
        assert isinstance(state, InfiniState)
        _, k, v = self.project(x)
        k, v = (part.unflatten(2, (-1, self.segment_length)).transpose(1, 2) for part in (k, v))
        with torch.autocast(x.device.type, enabled=False):
            before = state.memory if state.segments[0] else None
            after = memories(self.memory_k(k), v, self.update, before)
        state.memory.M[:] = after.M[:, -1]
        state.memory.z[:] = after.z[:, -1]
        state.segments = [segments + k.shape[1] for segments in state.segments]

    def new_state(self, batch: int, capacity: int) -> SegmentState:
        """Empty state; without a memory if that is not used."""
        kind = InfiniState if self.uses_memory else SegmentState
        return self.empty(kind, batch, self.segment_length)
