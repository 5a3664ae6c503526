"""Rows of a split: where in its stream of tokens each begins, or, packed, which pieces of documents it holds; with numpy.

Packed, a document longer than a row is cut into pieces that overlap by one token, the label of the one and the first input of the
next, so that every token but a document's first is the target of exactly one row. No target is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infini_llama.tasks.records.manifest import RowCosts


@dataclass(frozen=True, eq=False)
class RowArrays:
    """Places of the rows of documents in their stream: from a first token on, or, packed, as consecutive runs of pieces."""

    # int64: first tokens [rows]; packed, [rows + 1]: row i holds the pieces entries[i] … entries[i + 1] - 1
    entries: np.ndarray
    pieces: np.ndarray | None = None  # int64 [pieces, 2]: first token in the stream, tokens

    def __len__(self) -> int:
        return len(self.entries) - (self.pieces is not None)


def pieces_of(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """int64 [pieces, 2], first token and tokens (2 … sequence_length + 1), of documents of these `lengths`, in order.

    A document of one token has no target and is no piece.
    """
    counts = np.maximum(0, -(-(lengths - 1) // sequence_length))
    starts = np.repeat(lengths.cumsum() - lengths, counts)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    sizes = np.minimum(np.repeat(lengths, counts) - number * sequence_length, sequence_length + 1)
    return np.stack((starts + number * sequence_length, sizes), axis=1).astype(np.int64)


def pack(lengths: np.ndarray, sequence_length: int, strategy: str) -> RowArrays:
    """Rows of at most sequence_length + 1 tokens.

    Args:
        lengths: int64 [documents], tokens of each.
        strategy: greedy (next fit: into the last row, else a new one), first_fit (into the first row with room), best_fit
            (longest first, into the fullest row with room: best-fit decreasing), padded (a row for each piece).
    """
    pieces = pieces_of(lengths, sequence_length)
    row_of, order = FITS[strategy](pieces[:, 1], sequence_length + 1)
    taken = order[np.argsort(row_of[order], kind="stable")]
    return RowArrays(np.concatenate(([0], np.bincount(row_of).cumsum())), pieces[taken])


def _padded(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(len(sizes)), np.arange(len(sizes))


def _greedy(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    row, free, row_of = -1, 0, np.empty(len(sizes), dtype=np.int64)
    for number, size in enumerate(sizes.tolist()):
        if size > free:
            row, free = row + 1, capacity
        row_of[number], free = row, free - size
    return row_of, np.arange(len(sizes))


def _first_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """A tree over the rows, each node the most room below it, finds the first row with room in log(rows) steps."""
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    most = [capacity] * (2 * leaves)
    row_of = np.empty(len(sizes), dtype=np.int64)
    for number, size in enumerate(sizes.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            node += most[node] < size
        row_of[number] = node - leaves
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return row_of, np.arange(len(sizes))


def _best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Bit r of a number says that some row has r free: the fullest row that fits is the lowest bit from the size on."""
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free tokens
    available = rows = 0
    for number, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = available >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[free].pop()
            if not rows_with[free]:
                available &= ~(1 << free)
        else:
            row, free, rows = rows, capacity, rows + 1
        row_of[number] = row
        if (left := free - size) > 1:  # no piece is shorter than 2
            rows_with[left].append(row)
            available |= 1 << left
    return row_of, order


FITS: dict[str, Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]] = {
    "padded": _padded,
    "greedy": _greedy,
    "first_fit": _first_fit,
    "best_fit": _best_fit,
}
PACKED = tuple(FITS)  # the other strategies cut the stream wherever a row ends


def costs_of(table: RowArrays, lengths: np.ndarray, sequence_length: int) -> RowCosts:
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


def costs_of_starts(starts: np.ndarray, lengths: np.ndarray, sequence_length: int) -> RowCosts:
    """The same for rows without gaps that begin at `starts` (concat and window)."""
    ends = lengths.cumsum()
    last = int(starts[-1]) + sequence_length + 1 if len(starts) else 0
    # The last row that begins by the document's first token.
    first_row = np.searchsorted(starts, ends - lengths, side="right") - 1
    whole = (
        (first_row >= 0) & (ends <= starts[first_row] + sequence_length + 1)
        if len(starts)
        else ends < 0
    )
    return RowCosts(
        efficiency=1.0,
        cut_documents=int((~whole).sum()),
        lost_tokens=int(ends[-1]) - last,
        targets=len(starts) * sequence_length,
    )


def row_count(tokens: int, sequence_length: int, stride: int | None = None) -> int:
    """How many rows there are that begin every `stride` tokens (of 'concat', every sequence_length) and are whole.

    A row reads one token more than sequence_length, the label of its last input; what is left at the end is shorter than a row.
    Hence row i covers tokens [i stride, i stride + sequence_length + 1).
    """
    return max(0, (tokens - 1 - sequence_length) // (stride or sequence_length) + 1)


# As `compute_rows`, on some device.
ComputeRows = Callable[[np.ndarray, str, int, int | None], RowArrays]


def compute_rows(
    lengths: np.ndarray, strategy: str, sequence_length: int, stride: int | None = None
) -> RowArrays:
    """The rows of documents of these `lengths`, int64 [documents], of `sequence_length` inputs each."""
    if strategy in PACKED:
        return pack(lengths, sequence_length, strategy)
    count = row_count(int(lengths.sum()), sequence_length, stride)
    return RowArrays(np.arange(count) * (stride or sequence_length))
