"""Rows of a split, computed with numpy.

A row is where in the split's stream of tokens it begins, or, packed, which pieces of documents it
holds.

Packed, a document longer than a row is cut into pieces that overlap by one token: the label of the
one and the first input of the next. So every token but a document's first is the target of exactly
one row. No target is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

import numpy as np

from infini_llama.configs.packing import PACKED, PACKING
from infini_llama.tasks.records.manifest import RowCosts

# Sizes of pieces, int64 [pieces], and tokens of a row to the row of each piece, and the order in
# which the pieces were placed.
Fit = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class RowArrays:
    """Places of the rows of documents in their stream.

    A row is all tokens from its first one on, or, packed, a consecutive run of pieces.

    Attributes:
        entries: int64 [rows], first token of each; packed, int64 [rows + 1]: row i holds the pieces
            entries[i] … entries[i + 1] - 1.
        pieces: int64 [pieces, 2]: first token in the stream, tokens. None: not packed.
    """

    entries: np.ndarray
    pieces: np.ndarray | None = None

    def __len__(self) -> int:
        if self.pieces is None:
            return len(self.entries)
        return len(self.entries) - 1


def pieces_of(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """The pieces of documents of these `lengths`, in order.

    A document of one token has no target and is no piece.

    Returns:
        int64 [pieces, 2]: first token in the stream, and tokens (2 … sequence_length + 1).
    """
    # Pieces of each document.
    counts = np.maximum(0, -(-(lengths - 1) // sequence_length))
    earlier_pieces = counts.cumsum() - counts
    # In its document.
    number = np.arange(counts.sum()) - np.repeat(earlier_pieces, counts)
    skipped = number * sequence_length
    starts = np.repeat(lengths.cumsum() - lengths, counts) + skipped
    sizes = np.minimum(np.repeat(lengths, counts) - skipped, sequence_length + 1)
    return np.stack((starts, sizes), axis=1).astype(np.int64)


def pack(lengths: np.ndarray, sequence_length: int, strategy: str) -> RowArrays:
    """Rows of at most sequence_length + 1 tokens.

    Args:
        lengths: int64 [documents], tokens of each.
        strategy: one of `PACKED`.
    """
    pieces = pieces_of(lengths, sequence_length)
    fit: Fit = resolve_name(PACKING[strategy].fit)
    row_of, order = fit(pieces[:, 1], sequence_length + 1)
    taken = order[np.argsort(row_of[order], kind="stable")]
    pieces_in_row = np.bincount(row_of)
    bounds = np.concatenate(([0], pieces_in_row.cumsum()))
    return RowArrays(bounds, pieces[taken])


def padded(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """A row for each piece."""
    return np.arange(len(sizes)), np.arange(len(sizes))


def greedy(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Next fit: each piece into the last row, else a new one."""
    row_of = np.empty(len(sizes), dtype=np.int64)
    row = -1
    free = 0
    for number, size in enumerate(sizes.tolist()):
        if size > free:
            row += 1
            free = capacity
        row_of[number] = row
        free -= size
    return row_of, np.arange(len(sizes))


def first_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Each piece into the first row with room.

    A tree over the rows, each node the most room below it, finds that row in log(rows) steps.
    """
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    most = [capacity] * (2 * leaves)
    row_of = np.empty(len(sizes), dtype=np.int64)
    for number, size in enumerate(sizes.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            if most[node] < size:
                node += 1
        row_of[number] = node - leaves
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return row_of, np.arange(len(sizes))


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The longest piece first, into the fullest row with room (best-fit decreasing).

    Bit r of `available` says that some row has r tokens free: the fullest row that fits is the
    lowest bit from the size on.
    """
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free tokens
    available = 0
    rows = 0
    for number, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = available >> size
        if fitting:
            lowest_bit = fitting & -fitting
            free = size + lowest_bit.bit_length() - 1
            row = rows_with[free].pop()
            if not rows_with[free]:
                available &= ~(1 << free)
        else:
            free = capacity
            row = rows
            rows += 1
        row_of[number] = row
        left = free - size
        if left > 1:  # no piece is shorter than 2
            rows_with[left].append(row)
            available |= 1 << left
    return row_of, order


def costs_of(
    table: RowArrays,
    lengths: np.ndarray,
    sequence_length: int,
) -> RowCosts:
    """The costs of these rows of documents of these `lengths`."""
    if table.pieces is None:
        return costs_of_starts(table.entries, lengths, sequence_length)
    in_rows = int(table.pieces[:, 1].sum())
    return RowCosts(
        efficiency=in_rows / max(1, len(table) * (sequence_length + 1)),
        cut_documents=int((lengths > sequence_length + 1).sum()),
        lost_tokens=int((lengths == 1).sum()),
        targets=in_rows - len(table.pieces),
    )


def costs_of_starts(
    starts: np.ndarray,
    lengths: np.ndarray,
    sequence_length: int,
) -> RowCosts:
    """The costs of rows without gaps that begin at `starts`, int64 [rows] (concat and window)."""
    ends = lengths.cumsum()
    if len(starts) == 0:
        return RowCosts(
            efficiency=1.0,
            cut_documents=len(lengths),
            lost_tokens=int(ends[-1]),
            targets=0,
        )
    last = int(starts[-1]) + sequence_length + 1
    # The last row that begins by the document's first token.
    first_row = np.searchsorted(starts, ends - lengths, side="right") - 1
    whole = (first_row >= 0) & (ends <= starts[first_row] + sequence_length + 1)
    return RowCosts(
        efficiency=1.0,
        cut_documents=int((~whole).sum()),
        lost_tokens=int(ends[-1]) - last,
        targets=len(starts) * sequence_length,
    )


def row_count(tokens: int, sequence_length: int, stride: int | None = None) -> int:
    """Number of whole rows that begin every `stride` tokens (of 'concat', every sequence_length).

    A row reads one token more than sequence_length, the label of its last input; what is left at
    the end is shorter than a row. Hence row i covers tokens
    [i stride, i stride + sequence_length + 1).
    """
    step = stride or sequence_length
    return max(0, (tokens - 1 - sequence_length) // step + 1)


# As `compute_rows`, on some device.
ComputeRows = Callable[[np.ndarray, str, int, int | None], RowArrays]


def compute_rows(
    lengths: np.ndarray,
    strategy: str,
    sequence_length: int,
    stride: int | None = None,
) -> RowArrays:
    """The rows of `sequence_length` inputs each of documents of these `lengths`.

    Args:
        lengths: int64 [documents], tokens of each.
    """
    if strategy in PACKED:
        return pack(lengths, sequence_length, strategy)
    count = row_count(int(lengths.sum()), sequence_length, stride)
    return RowArrays(np.arange(count) * (stride or sequence_length))
