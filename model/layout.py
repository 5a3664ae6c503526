"""Layout of one forward pass, which all layers share.

It holds rotary tables, and which tokens of a row may see one another.

`documents` [B, T] int numbers the documents of packed rows: equal numbers in a row are one
document, whose tokens stand together; padding is PADDING. Without it a row is one document.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from typing import NamedTuple

import torch
import torch.nn.functional as F

from infini_llama.model.config import LlamaConfig
from infini_llama.model.context import Context
from infini_llama.model.rope import Rotary, rotary, segment_rotary

PADDING = -1


class Rows(NamedTuple):
    """A pass of attention over whole rows [B, T]: `documents` [B, T] or None.

    `boundaries`: of the documents, for the attention functions that are given those and not a mask.
    """

    rotary: Rotary
    documents: torch.Tensor | None = None
    boundaries: torch.Tensor | None = None


class Segments(NamedTuple):
    """A pass of attention inside segments of N tokens, S of them per row.

    The last one is filled up with padding.

    Attributes:
        rotary: of `segment_rotary`, of the positions 0 … N - 1 in a segment first.
        documents: [B * S, N], or None without documents; what follows is then None, too.
        boundaries: as in Rows, of the documents inside segments.
        writes: [B, S, N], tokens that may be written to memory: those of the segment's last
            document.
        keeps: [B, S], whether a segment ends in the document that the one before ended in: its
            memory continues, else it starts anew.
        reads: [B, S, N], tokens that may read: those of the document that the last segment in
            their memory ended in.
        earlier: [B, S, N], with attend_previous_segment: how many tokens of other segments a token
            sees, those of its document in the segment before and of the document's sinks.
        sinks: [B, S, sinks, S * N], 1 for the token of the row that each sink is, else 0. Sinks
            that are in the segment before are left out: the others are the last ones.
        context: the ranks that share each row, of whose S segments all of this are; None: this rank
            alone has them.
    """

    rotary: Rotary
    documents: torch.Tensor | None = None
    boundaries: torch.Tensor | None = None
    writes: torch.Tensor | None = None
    keeps: torch.Tensor | None = None
    reads: torch.Tensor | None = None
    earlier: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    context: Context | None = None


def rows(
    config: LlamaConfig,
    shape: torch.Size,
    documents: torch.Tensor | None,
    like: torch.Tensor,
    by_boundaries: bool = False,
    most_documents: int | None = None,
) -> Rows:
    """Layout of rows of `shape` [B, T]; positions start anew in each document.

    Args:
        most_documents: upper bound of those of a row, padding not counted; None: it is read from
            the device.
    """
    tables = rotary(torch.arange(shape[1], device=like.device), config, like.dtype)
    if documents is None:
        return Rows(tables)
    # Padding is a stretch, too.
    most = None if most_documents is None else most_documents + 1
    return Rows(
        rotary=tables.at(positions(documents)),
        documents=documents,
        boundaries=boundaries(documents, most) if by_boundaries else None,
    )


def positions(documents: torch.Tensor) -> torch.Tensor:
    """Each token's place in its document, [B, T]."""
    places = torch.arange(documents.shape[1], device=documents.device)
    return places - torch.where(_starts(documents), places, 0).cummax(dim=1).values


def boundaries(documents: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """First tokens of stretches of equal numbers in the flattened tokens [B T], int32.

    The number of tokens follows as the last entry.

    Args:
        documents: [B, T].
        most: upper bound of the stretches of a row, for `most` B + 1 entries, of which those that
            are left over repeat the number of tokens. None: one more entry than stretches; the
            device alone knows how many, so it is waited for.
    """
    starts = _starts(documents).flatten()
    if most is None:
        return F.pad(starts.nonzero()[:, 0], (0, 1), value=documents.numel()).int()
    size = most * documents.shape[0]
    count = documents.numel()
    places = torch.arange(count, dtype=torch.int32, device=documents.device)
    ends = torch.full((size + 1,), count, dtype=torch.int32, device=documents.device)
    # All other tokens write the last entry, and the same value, so that their order is no matter.
    target = torch.where(starts, starts.cumsum(0) - 1, size).clamp(max=size)
    return ends.scatter_(0, target, torch.where(starts, places, count))


def _starts(documents: torch.Tensor) -> torch.Tensor:
    """Whether a token is its document's first in the row, [B, T]."""
    return documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0


def segments(
    config: LlamaConfig,
    shape: torch.Size,
    documents: torch.Tensor | None,
    like: torch.Tensor,
    by_boundaries: bool = False,
    context: Context | None = None,
    most_documents: int | None = None,
) -> Segments:
    """Layout of rows of `shape` [B, T], cut every segment_length tokens from the row's beginning.

    They are cut there whatever the documents. With a `context` `shape` is that of this rank's part
    of the rows, while `documents` are those of whole rows.

    A token's position is its place in the segment: rotary attention sees differences of positions
    alone, so that starting anew in a document would change nothing.
    """
    size = min(config.segment_length, shape[1])
    tables = segment_rotary(config, size, like.device, like.dtype)
    if documents is None:
        return Segments(
            rotary=tables,
            reads=_all_but_the_first(shape, size, context, like.device),
            context=context,
        )
    length = documents.shape[1]
    whole = min(config.segment_length, length)
    count = -(-length // whole)
    documents = F.pad(documents, (0, count * whole - length), value=PADDING)
    ends = _last_document(documents).unflatten(1, (count, whole))[:, :, -1]  # [B, S]
    cut = documents.unflatten(1, (count, whole))
    before = F.pad(ends, (1, 0), value=PADDING)[:, :count]
    in_memory = F.pad(ends, (config.attended_segments, 0), value=PADDING)[:, :count]
    if context is not None:
        share = context.segments(length, whole)
        own = slice(context.place * share, (context.place + 1) * share)
        ends = ends[:, own]
        before = before[:, own]
        in_memory = in_memory[:, own]
        cut = cut[:, own, :size]
    # Of one segment; a row's documents may all begin in the same one, which no bound of the row can
    # exclude.
    most = None if most_documents is None else min(most_documents + 1, size)
    earlier = None
    sinks = None
    if config.sees_previous_segment:
        earlier, sinks = _earlier_tokens(
            documents, size, config.attention_sinks, like.dtype
        )
    return Segments(
        rotary=tables,
        documents=cut.flatten(0, 1),
        boundaries=boundaries(cut.flatten(0, 1), most) if by_boundaries else None,
        writes=(cut == ends[:, :, None]) & (cut != PADDING),
        keeps=(ends == before) & (before != PADDING),
        reads=(cut == in_memory[:, :, None]) & (cut != PADDING),
        earlier=earlier,
        sinks=sinks,
        context=context,
    )


def _earlier_tokens(
    documents: torch.Tensor,
    size: int,
    sinks: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`earlier` and `sinks` of Segments, for `documents` [B, S N] of segments of `size` tokens."""
    places = torch.arange(documents.shape[1], device=documents.device)
    # Of each token's document.
    begins = (places - positions(documents)).unflatten(1, (-1, size))
    segment = places[::size, None]
    before = segment - size
    of_sinks = (before - begins).clamp(0, sinks)
    of_segment_before = (segment - begins).clamp(0, size)
    number = torch.arange(sinks, device=documents.device) - sinks + of_sinks[:, :, :1]
    tokens = torch.where(number >= 0, begins[:, :, :1] + number, -1)  # [B, S, sinks]
    chosen = tokens[..., None] == places
    return of_segment_before + of_sinks, chosen.to(dtype)


def _all_but_the_first(
    shape: torch.Size,
    size: int,
    context: Context | None,
    device: torch.device,
) -> torch.Tensor | None:
    """`reads` [1, S, N] of the rank that has a row's first segment.

    The others, and a rank that is alone, need none.
    """
    if context is None or context.place > 0:
        return None
    reads = torch.ones(1, -(-shape[1] // size), size, dtype=torch.bool, device=device)
    reads[:, 0] = False
    return reads


def _last_document(documents: torch.Tensor) -> torch.Tensor:
    """The document of each token, and for padding that of the last token before it [B, T]."""
    places = torch.arange(documents.shape[1], device=documents.device)
    return documents.gather(
        1, torch.where(documents != PADDING, places, 0).cummax(dim=1).values
    )
