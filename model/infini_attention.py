"""Infini-attention: softmax inside segments, a compressive memory across them.

It is that of Munkhdalai et al. 2024, arXiv 2404.07143.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportConstantRedefinition=false
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from infini_llama.model.attention import Attention, KeyValues
from infini_llama.model.backends import causal_attention
from infini_llama.model.config import LlamaConfig, MemoryUpdate
from infini_llama.model.context import shared_memories
from infini_llama.model.layout import Rows, Segments
from infini_llama.model.memory import Memory, memories, mix, retrieve
from infini_llama.model.rope import Rotary
from infini_llama.model.segment_states import InfiniState, SegmentState

# Takes A_dot and A_mem [B, S, H, N, d] of the segments that read, and the M [B, S, Hkv, d, d] that
# each of them reads.
Observer = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None
]


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


class SegmentAttention(Attention):
    """Softmax attention inside segments of `segment_length` tokens: `attention: local`.

    Each segment has positions from 0. A row of one segment at most is plain causal attention,
    exactly.

    With `attend_previous_segment` a segment also sees the one before it, at the positions that end
    with -1, and the first tokens of the text (attention sinks: Xiao et al. 2023, arXiv 2309.17453),
    at the positions right before those.
    """

    def __init__(self, config: LlamaConfig, backend: str = "sdpa") -> None:
        super().__init__(config, backend)
        self.segment_length = config.segment_length
        self.sinks = config.attention_sinks

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
            after each segment that is written [B, S, …], of which that of a ragged one has padding
            in it.
        """
        length = q.shape[2]
        size = min(self.segment_length, length)
        count = -(-length // size)
        padding = count * size - length
        if padding:
            q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        # [B, h, S N, d] to [B, S, h, N, d]
        q, k, v = (x.unflatten(2, (count, size)).transpose(1, 2) for x in (q, k, v))
        completed = 0 if state is None else state.segments[0]
        if self.sinks and completed + count > 1:
            local = self._over_segments_before(q, k, v, layout, state)
        else:
            turn = layout.rotary.first(size).turn
            local = self.softmax(
                turn(q).flatten(0, 1),
                turn(k).flatten(0, 1),
                v.flatten(0, 1),
                layout,
            ).unflatten(0, (-1, count))
        heads, after = self.with_memory(q, k, v, local, layout, state)
        # Joined as [B, S N, H, d], so that the output projection reads it without another copy.
        return heads.transpose(2, 3).flatten(1, 2)[:, :length].transpose(1, 2), after

    def _over_segments_before(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Segments,
        state: SegmentState | None,
    ) -> torch.Tensor:
        """Local attention [B, S, H, N, d] of segments that see the one before and the sinks.

        Args:
            q, k, v: [B, S, h, N, d], not rotated.
        """
        count = q.shape[1]
        completed = 0 if state is None else state.segments[0]
        turn = layout.rotary.first(q.shape[3]).turn
        turned_q = turn(q)
        turned_k = turn(k)
        before_k, before_v = self._segments_before(k, v, layout.rotary, state)
        # The first segment of a text sees itself; the second one the first, too; others also sinks.
        first = min(count, max(0, 1 - completed))
        second = min(count, max(0, 2 - completed))
        parts: list[torch.Tensor] = []
        for begin, end in ((0, first), (first, second), (second, count)):
            if begin == end:
                continue
            here = slice(begin, end)
            keys = [turned_k[:, here]]
            values = [v[:, here]]
            if begin >= first:
                place = slice(begin - first, end - first)
                keys.insert(0, before_k[:, place])
                values.insert(0, before_v[:, place])
            if begin >= second:
                sinks_k, sinks_v = self._sinks(k, v, layout, state, here)
                keys.insert(0, sinks_k)
                values.insert(0, sinks_v)
            parts.append(self._rectangle(turned_q[:, here], keys, values, layout, here))
        return torch.cat([part.transpose(2, 3) for part in parts], dim=1).transpose(
            2, 3
        )

    def _segments_before(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        state: SegmentState | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values [B, S, Hkv, N, d] of the segment before each that has one."""
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        if state is not None and state.earlier is not None and state.segments[0]:
            keys.append(state.earlier.k[:, None, :, self.sinks :])
            values.append(state.earlier.v[:, None, :, self.sinks :])
        if k.shape[1] > 1:
            keys.append(rotary.last(self.segment_length).turn(k[:, :-1]))
            values.append(v[:, :-1])
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def _sinks(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Segments,
        state: SegmentState | None,
        here: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values [B, S, Hkv, sinks, d] of the sinks of the segments `here`."""
        number = here.stop - here.start
        shape = (-1, number, -1, -1, -1)
        if state is not None and state.earlier is not None and state.segments[0]:
            sinks_k = state.earlier.k[:, None, :, : self.sinks]
            sinks_v = state.earlier.v[:, None, :, : self.sinks]
            return sinks_k.expand(shape), sinks_v.expand(shape)
        turn = (
            layout.rotary.last(self.sinks + self.segment_length).first(self.sinks).turn
        )
        if layout.sinks is None:
            sinks_k = turn(k[:, :1, :, : self.sinks])
            sinks_v = v[:, :1, :, : self.sinks]
            return sinks_k.expand(shape), sinks_v.expand(shape)
        # A product and no index: its backward pass adds in the same order each time.
        chosen = layout.sinks[:, here].flatten(1, 2)[:, None]
        with torch.autocast(k.device.type, enabled=False):
            sinks_k, sinks_v = (
                (chosen.to(x.dtype) @ x.transpose(1, 2).flatten(2, 3))
                .unflatten(2, (number, self.sinks))
                .transpose(1, 2)
                for x in (k, v)
            )
        return turn(sinks_k), sinks_v

    def _rectangle(
        self,
        q: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        layout: Segments,
        here: slice,
    ) -> torch.Tensor:
        """Attention [B, S, H, N, d] of the segments `here` over keys that stand one after another.

        Args:
            q: [B, S, H, N, d] of these segments, rotated.
            keys, values: [B, S, Hkv, …, d], the last ones of the segments themselves.
        """
        documents = None
        earlier = None
        if layout.documents is not None and layout.earlier is not None:
            documents = layout.documents.unflatten(0, (len(q), -1))[:, here].flatten(
                0, 1
            )
            earlier = layout.earlier[:, here].flatten(0, 1) if len(keys) > 1 else None
        found = causal_attention(
            q.flatten(0, 1),
            torch.cat(keys, dim=3).flatten(0, 1),
            torch.cat(values, dim=3).flatten(0, 1),
            documents,
            self.backend,
            self.dropout if self.training else 0.0,
            keep_weights=self.keep_weights,
            earlier=earlier,
        )
        return found.unflatten(0, (len(q), -1))

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

    def with_state(
        self, q: torch.Tensor, local: torch.Tensor, state: SegmentState
    ) -> torch.Tensor:
        """`local` [B, H, t, d] mixed with what its queries find in the state's memory.

        Here there is none.
        """
        return local

    def write_full(self, full: list[int], state: SegmentState) -> None:
        """Write to the state's memory as the current segments of these rows are full.

        Here there is none.
        """

    def keep_memory(
        self, row: int, completed: int, after: Memory | None, state: SegmentState
    ) -> None:
        """Keep the memory of a row once so many whole segments more were read.

        Here there is none.

        Args:
            after: of `attend`.
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
        full = [
            row
            for row, filled in enumerate(state.filled)
            if filled == self.segment_length
        ]
        with torch.autocast(q.device.type, enabled=False):
            heads = self.with_state(q, heads, state)
            if full:
                self.write_full(full, state)
        state.keep_full(full, rotary)
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
            state.restart(row, k[row, :, tail])
            self.keep_memory(row, completed, after, state)
            if self.sinks and completed:
                if not state.segments[row]:
                    state.keep_sinks(row, k[row], v[row], rotary)
                last = slice(tail.start - self.segment_length, tail.start)
                state.keep_segment(row, k[row, :, last], v[row, :, last], rotary)
            state.filled[row] = rest
            state.segments[row] += completed
        return heads

    def new_state(self, batch: int, capacity: int, dtype: torch.dtype) -> SegmentState:
        """Empty state, which has room for any number of tokens, whatever `capacity` is."""
        kind = partial(SegmentState, sinks=self.sinks)
        return self.empty(kind, batch, self.segment_length, dtype)


class InfiniAttention(SegmentAttention):
    """Attention inside segments, mixed with what is found in the memory of all earlier ones.

    Each query head takes the share sigmoid(gate) of its output from the memory.

    With `memory_maps` what it writes and reads goes through maps of keys and queries first.

    Each segment but the last writes to memory, and the running sum of that is what the next one
    reads, so the first reads nothing and its gate is left out. With `attend_previous_segment` the
    memory lags by one more: the first two read nothing, and the last two write nothing. Where
    `uses_memory` is False the memory is left out.
    """

    def __init__(self, config: LlamaConfig, backend: str = "sdpa") -> None:
        super().__init__(config, backend)
        self.update: MemoryUpdate = config.memory_update
        self.lag = config.attended_segments  # from a segment to the first that reads it
        self.uses_memory = True
        self.observer: Observer | None = None
        # A tensor, so that compiled code need not change with it.
        self.write_range: torch.Tensor | None = None
        self.gate = nn.Parameter(
            torch.empty(config.num_attention_heads, dtype=torch.float32)
        )
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
            before = (
                state.memory
                if isinstance(state, InfiniState) and state.written[0]
                else None
            )
            count = k.shape[1]
            waiting = self._waiting(state)
            # Drawn for all segments, also for those that are not written.
            writes = (
                self._jittered(layout.writes, k) if self.training else layout.writes
            )
            if layout.context is not None:
                after, before = shared_memories(
                    self.memory_k(k),
                    v,
                    self.update,
                    layout.context,
                    layout.keeps,
                    writes,
                )
            else:
                writing = max(0, count - self.lag + (state is not None))
                after = self._memories(
                    k[:, :writing],
                    v[:, :writing],
                    layout.keeps,
                    writes,
                    before,
                    waiting,
                )
            # From a segment to the first of these that reads the memory after it; and that segment.
            lag = self.lag if waiting is None else self.lag - 1
            first = lag if before is None else lag - 1
            parts = [local[:, :first]]
            if after is not None and first < count:
                M = after.M[:, : count - lag]
                z = after.z[:, : count - lag]
                if before is not None:
                    M = torch.cat((before.M[:, None], M), dim=1)
                    z = torch.cat((before.z[:, None], z), dim=1)
                reads = None if layout.reads is None else layout.reads[:, first:]
                retrieved = retrieve(self.memory_q(q[:, first:]), M, z)
                if self.observer is not None:
                    self.observer(local[:, first:], retrieved, M, reads)
                parts.append(mix(local[:, first:], retrieved, self.gate, reads))
        return torch.cat([part.transpose(2, 3) for part in parts], dim=1).transpose(
            2, 3
        ), after

    def _memories(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        keeps: torch.Tensor | None,
        writes: torch.Tensor | None,
        before: Memory | None,
        waiting: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Memory | None:
        """The memory after each of the first segments, k and v [B, n, …].

        Args:
            keeps, writes: of at least as many segments.
            before: the memory before them.
            waiting: keys and values of a segment that is written first; only states have one,
                and they have no documents.
        """
        count = k.shape[1]
        if waiting is not None:
            keys, values = (part[:, None] for part in waiting)
            if count:
                keys = torch.cat((keys, k), dim=1)
                values = torch.cat((values, v), dim=1)
            return memories(self.memory_k(keys), values, self.update, before)
        if not count:
            return None
        keeps = None if keeps is None else keeps[:, :count]
        writes = None if writes is None else writes[:, :count]
        return memories(self.memory_k(k), v, self.update, before, keeps, writes)

    def _waiting(
        self, state: SegmentState | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of the segment before, where that is not in the state's memory yet."""
        if self.lag == 1 or not isinstance(state, InfiniState) or not state.segments[0]:
            return None
        return state.before([*range(len(state.segments))])

    def _jittered(
        self, writes: torch.Tensor | None, k: torch.Tensor
    ) -> torch.Tensor | None:
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

    def with_state(
        self, q: torch.Tensor, local: torch.Tensor, state: SegmentState
    ) -> torch.Tensor:
        if not isinstance(state, InfiniState) or not any(state.written):
            return local
        reads = None
        if not all(state.written):
            written = torch.tensor(state.written, device=q.device)
            reads = written[:, None].expand(-1, q.shape[2]) > 0
        return mix(local, retrieve(self.memory_q(q), *state.memory), self.gate, reads)

    def write_full(self, full: list[int], state: SegmentState) -> None:
        if not isinstance(state, InfiniState):
            return
        rows = full
        if self.lag > 1:
            rows = [row for row in full if state.segments[row]]
        if not rows:
            return
        k, v = state.current(rows) if self.lag == 1 else state.before(rows)
        keeps = torch.tensor(
            [[state.written[row] > 0] for row in rows], device=state.k.device
        )
        before = Memory(state.memory.M[rows], state.memory.z[rows])
        after = memories(
            self.memory_k(k[:, None]), v[:, None], self.update, before, keeps
        )
        state.memory.M[rows] = after.M[:, 0]
        state.memory.z[rows] = after.z[:, 0]
        for row in rows:
            state.written[row] += 1

    def keep_memory(
        self, row: int, completed: int, after: Memory | None, state: SegmentState
    ) -> None:
        if not isinstance(state, InfiniState) or after is None:
            return
        written = max(0, state.segments[row] + completed + 1 - self.lag)
        place = written - state.written[row] - 1
        if place < 0:
            return
        state.memory.M[row] = after.M[row, place]
        state.memory.z[row] = after.z[row, place]
        state.written[row] = written

    def write(self, x: torch.Tensor, state: KeyValues) -> None:
        """Read whole segments x [B, n N, hidden_size] whose outputs are not needed.

        Rows stand together at the beginning of a segment. The memory is then the one that `read`
        leaves.
        """
        assert isinstance(state, InfiniState)
        _, k, v = self.project(x)
        k, v = (
            part.unflatten(2, (-1, self.segment_length)).transpose(1, 2)
            for part in (k, v)
        )
        with torch.autocast(x.device.type, enabled=False):
            before = state.memory if state.written[0] else None
            after = memories(self.memory_k(k), v, self.update, before)
        state.memory.M[:] = after.M[:, -1]
        state.memory.z[:] = after.z[:, -1]
        state.segments = [segments + k.shape[1] for segments in state.segments]
        state.written = [*state.segments]

    def new_state(self, batch: int, capacity: int, dtype: torch.dtype) -> SegmentState:
        """Empty state; without a memory if that is not used."""
        kind = InfiniState if self.uses_memory else SegmentState
        with_sinks = partial(kind, sinks=self.sinks)
        return self.empty(with_sinks, batch, self.segment_length, dtype)
