"""What a layer of attention in segments keeps during generation, with and without a memory."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from typing import NamedTuple

import torch
import torch.nn.functional as F

from infini_llama.model.attention import KeyValues, Shape
from infini_llama.model.memory import Memory
from infini_llama.model.rope import Rotary


class Earlier(NamedTuple):
    """What a segment sees of the tokens before it, in a state: the sinks, then the segment before.

    Attributes:
        k, v: [B, Hkv, sinks + N, d], rotated to their positions before the segment.
        plain_k: of the segment before [B, Hkv, N, d], not rotated.
    """

    k: torch.Tensor
    v: torch.Tensor
    plain_k: torch.Tensor


class SegmentState(KeyValues):
    """State of one layer during generation; its size does not depend on how much was read.

    The current segment's keys and values, rotated; row b has completed segments[b] before it. With
    `sinks` also those of the tokens before it that it sees, and the current segment's keys as they
    are, which are rotated again once it is the segment before.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        sinks: int = 0,
    ) -> None:
        super().__init__(shape, dtype, device)
        batch, heads, length, size = shape
        self.segments = [0] * batch
        self.sinks = sinks
        self.plain_k: torch.Tensor | None = None
        self.earlier: Earlier | None = None
        if sinks:
            self.plain_k = torch.zeros_like(self.k)
            seen = (batch, heads, sinks + length, size)
            self.earlier = Earlier(
                k=torch.zeros(seen, dtype=dtype, device=device),
                v=torch.zeros(seen, dtype=dtype, device=device),
                plain_k=torch.zeros_like(self.k),
            )

    def set_row(self, row: int, other: KeyValues) -> None:
        super().set_row(row, other)
        assert isinstance(other, SegmentState)
        self.segments[row] = other.segments[0]
        if self.plain_k is not None and other.plain_k is not None:
            self.plain_k[row] = other.plain_k[0]
        if self.earlier is not None and other.earlier is not None:
            for kept, theirs in zip(self.earlier, other.earlier, strict=True):
                kept[row] = theirs[0]

    def keep_plain(self, k: torch.Tensor, places: torch.Tensor) -> None:
        """Keep the next tokens' keys k [B, Hkv, t, d] as they are, where that is needed."""
        if self.plain_k is None:
            return
        if places.ndim == 1:
            self.plain_k[:, :, places] = k
        else:
            row = torch.arange(len(places), device=k.device)[:, None]
            self.plain_k[row, :, places] = k.transpose(1, 2)

    def restart(self, row: int, plain_k: torch.Tensor) -> None:
        """Begin a segment of a row with the keys [Hkv, rest, d] of its tokens, not rotated."""
        if self.plain_k is not None:
            self.plain_k[row, :, : plain_k.shape[1]] = plain_k

    def keep_full(self, full: list[int], rotary: Rotary) -> None:
        """Make the current segments of these rows, which are full, the segments before."""
        if self.earlier is None or self.plain_k is None:
            return
        for row in full:
            if not self.segments[row]:
                self.keep_sinks(row, self.plain_k[row], self.v[row], rotary)
            self.keep_segment(row, self.plain_k[row], self.v[row], rotary)

    def keep_sinks(
        self, row: int, k: torch.Tensor, v: torch.Tensor, rotary: Rotary
    ) -> None:
        """Keep the sinks of a row from k, v [Hkv, N, d] of its first segment, k not rotated."""
        assert self.earlier is not None
        turn = rotary.last(self.earlier.k.shape[2]).first(self.sinks).turn
        self.earlier.k[row, :, : self.sinks] = turn(k[:, : self.sinks])
        self.earlier.v[row, :, : self.sinks] = v[:, : self.sinks]

    def keep_segment(
        self, row: int, k: torch.Tensor, v: torch.Tensor, rotary: Rotary
    ) -> None:
        """Keep k, v [Hkv, N, d] of the segment that a row has completed, k not rotated."""
        assert self.earlier is not None
        self.earlier.k[row, :, self.sinks :] = rotary.last(k.shape[1]).turn(k)
        self.earlier.v[row, :, self.sinks :] = v
        self.earlier.plain_k[row] = k

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: list[int] | None,
    ) -> torch.Tensor:
        """Append the next tokens' k, v [B, Hkv, t, d], and attend to all that they see.

        Returns:
            attention [B, H, t, d].
        """
        if self.earlier is None or not any(self.segments):
            return super().attend(q, k, v, lengths)
        length = q.shape[2]
        size = self.k.shape[2]
        places = self.positions(length)
        self.append(k, v, lengths)
        reach = max(self.filled)
        begin = self.sinks if max(self.segments) == 1 else 0  # nothing is before that
        k = torch.cat((self.earlier.k[:, :, begin:], self.k[:, :, :reach]), dim=2)
        v = torch.cat((self.earlier.v[:, :, begin:], self.v[:, :, :reach]), dim=2)
        gqa = q.shape[1] != k.shape[1]
        number = [(0, size, self.sinks + size)[min(done, 2)] for done in self.segments]
        if length == 1 and self.together() and min(number) == max(number):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
        before = k.shape[2] - reach
        least = before - torch.tensor(number, device=q.device)
        # [B or 1, t, E + reach]: of the earlier tokens the last ones, of the segment's those so far
        index = torch.arange(before + reach, device=q.device)
        seen = (index >= least[:, None, None]) & (index <= before + places[..., None])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen[:, None], enable_gqa=gqa
        )


class InfiniState(SegmentState):
    """A SegmentState and a memory.

    Of the current segment also its keys as they are, which are written to memory when it is full,
    or, with sinks, when the one after it is, and M, z of the segments before. These stay as they
    are during a segment, as every query of it reads them. The memory of row b holds written[b]
    segments.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        sinks: int = 0,
    ) -> None:
        super().__init__(shape, dtype, device, sinks)
        batch, heads, _, size = shape
        wide = torch.promote_types(dtype, torch.float32)
        self.plain_k = torch.zeros_like(self.k)
        self.written = [0] * batch
        self.memory = Memory(
            torch.zeros(batch, heads, size, size, dtype=wide, device=device),
            torch.zeros(batch, heads, size, dtype=wide, device=device),
        )

    def set_row(self, row: int, other: KeyValues) -> None:
        super().set_row(row, other)
        assert isinstance(other, InfiniState)
        self.memory.M[row] = other.memory.M[0]
        self.memory.z[row] = other.memory.z[0]
        self.written[row] = other.written[0]

    def current(self, full: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, as they are, and values [rows, Hkv, N, d] of the current segments of these rows."""
        assert self.plain_k is not None
        return self.plain_k[full], self.v[full]

    def before(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the segments before, which are kept with sinks only."""
        assert self.earlier is not None
        return self.earlier.plain_k[rows], self.earlier.v[rows, :, self.sinks :]
