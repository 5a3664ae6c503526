"""Rows of long documents more often than others: classes of rows by document length, mixed as sources are."""

from decimal import Decimal, localcontext

import numpy as np

from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.train.worker.data.mixture import Part, parts_of

AT_ONCE = 1 << 20  # rows looked at together
PRECISION = 2**32  # of a class's share


def preferring(
    reader: TokenReader, strength: float, weights: dict[str, float] | None
) -> tuple[np.ndarray, tuple[Part, ...]]:
    """Rows sorted by class, int64 [rows], and the parts of that order, between which `mixture.mixed_rows` chooses.

    Class c are the rows most of whose inputs are of a document of 2^c to 2^(c+1) - 1 tokens; they are seen (2^c)^strength times as often
    as those of class 0, and each class is gone through wholly before it begins anew. Where sources have weights, these stay exact, and
    the classes are those of each source.
    """
    lengths = lengths_of_rows(reader)
    sources = parts_of(reader.sources, weights) if weights else (Part("", 0, len(lengths), 1),)
    order = np.empty(len(lengths), dtype=np.int64)
    parts: list[Part] = []
    for source in sources:
        own = slice(source.first, source.first + source.rows)
        classes = np.frexp(lengths[own].astype(np.float64))[1] - 1
        order[own] = np.argsort(classes, kind="stable") + source.first
        parts.append(
            Part(source.name, source.first, source.rows, source.weight, _mixed(classes, source.first, strength))
        )
    return order, tuple(parts)


def _mixed(classes: np.ndarray, first: int, strength: float) -> tuple[Part, ...]:
    """A part for each class, ascending; the first row of the first one is number `first`."""
    counts = np.bincount(classes)
    present = np.flatnonzero(counts).tolist()
    with localcontext() as exact:  # the same digits on every machine, which pow() of the C library does not promise
        exact.prec = 50
        wanted = [int(counts[each]) * Decimal(2) ** (Decimal(repr(strength)) * each) for each in present]
        shares = [max(1, int(PRECISION * each / sum(wanted))) for each in wanted]
    parts: list[Part] = []
    for each, share in zip(present, shares, strict=True):
        parts.append(Part(f"documents of {2**each} tokens", first, int(counts[each]), share))
        first += int(counts[each])
    return tuple(parts)


def lengths_of_rows(reader: TokenReader) -> np.ndarray:
    """int64 [rows]: tokens of the document that most inputs of a row are of, of the first one where two have as many."""
    offsets = reader.document_offsets()
    found: list[np.ndarray] = []
    for first in range(0, len(reader), AT_ONCE):
        rows = np.arange(first, min(first + AT_ONCE, len(reader)))
        documents, sizes, counts = _shares(reader, rows, offsets)
        begins = counts.cumsum() - counts
        most = np.repeat(np.maximum.reduceat(sizes, begins), counts)
        at = np.flatnonzero(sizes == most)
        chosen = documents[at[np.searchsorted(at, begins)]]
        found.append(offsets[chosen + 1] - offsets[chosen])
    return np.concatenate(found)


def _shares(reader: TokenReader, rows: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The documents in consecutive rows: the number of each, how many inputs are of it, and how many there are in each row."""
    if reader.pieces is not None:
        begin, end = reader.starts[rows], reader.starts[rows + 1]
        pieces = reader.pieces[begin[0] : end[-1]]
        return np.searchsorted(offsets, pieces[:, 0], side="right") - 1, pieces[:, 1] - 1, end - begin
    starts = np.asarray(reader.starts[rows])
    first = np.searchsorted(offsets, starts, side="right") - 1
    counts = np.searchsorted(offsets, starts + reader.sequence_length, side="left") - first
    place = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
    documents, row = np.repeat(first, counts) + place, np.repeat(starts, counts)
    ends = np.minimum(offsets[documents + 1], row + reader.sequence_length)
    return documents, ends - np.maximum(offsets[documents], row), counts
