"""The order of samples: a pure function of (seed, epoch, position), so that seeking costs nothing and no rank keeps state.

One permutation per epoch; with weights of sources or `train.prefer_long_documents`, one for each part of the rows, which are mixed.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.lineage import SampleRange
from infini_llama.tasks.records.manifest import SourceRows

ROUNDS = 6
AT_ONCE = 1 << 20  # rows looked at together
PRECISION = 2**32  # of a class's share


def _round_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """splitmix64's finalizer: every output bit depends on every input bit (Steele, Lea and Flood 2014)."""
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Image of `positions` under a pseudo-random permutation of range(size).

    A balanced Feistel network over the next even power of two, with cycle walking for images beyond `size`
    (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). O(1) memory and O(1) seek, unlike a shuffled list.

    Args:
        positions: int64 [n], each in [0, size).
        size: number of rows, at least 1.
        seed: of the run.
        epoch: another epoch, another permutation.

    Returns:
        int64 [n], distinct for distinct positions.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    keys = _round_keys(seed, epoch)
    result = positions.astype(np.uint64)
    pending = np.arange(len(result))
    with np.errstate(over="ignore"):
        while len(pending):
            values = result[pending]
            left, right = values >> half, values & mask
            for key in keys:
                left, right = right, left ^ (_mix(right, key) & mask)
            result[pending] = (left << half) | right
            pending = pending[result[pending] >= np.uint64(size)]
    return result.astype(np.int64)


def sample_rows(first: int, count: int, size: int, seed: int) -> np.ndarray:
    """Rows of the samples numbered first, first+1, …, first+count-1 of the whole run; epochs follow each other without a gap."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    epochs, positions = np.divmod(numbers, size)
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        rows[chosen] = permute(positions[chosen], size, seed, int(epoch))
    return rows


def next_sample(samples: int, skipped: Sequence[SampleRange]) -> int:
    """The first sample from number `samples` on that is in none of the ranges that a rollback has left out."""
    for span in sorted(skipped, key=lambda span: span.first):
        if span.first <= samples < span.end:
            samples = span.end
    return samples


@dataclass(frozen=True)
class Part:
    """The rows of one source, and how often they are seen."""

    name: str
    first: int  # row
    rows: int
    weight: int  # its share is weight / sum of weights
    parts: "tuple[Part, ...]" = ()  # between which its own samples are divided in turn, where there are any


def parts_of(sources: Sequence[SourceRows], weights: dict[str, float]) -> tuple[Part, ...]:
    """The parts of a row table whose sources are `sources`, in the order of their rows.

    Raises:
        ConfigError: the weights are for other sources.
    """
    if {source.name for source in sources} != weights.keys():
        there = ", ".join(source.name for source in sources) or "one without a name"
        raise ConfigError(f"data.sources gives weights to {', '.join(weights)}; the dataset's sources are {there}.")
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    scale = math.lcm(*(weight.denominator for weight in exact.values()))
    parts: list[Part] = []
    first = 0
    for source in sources:
        parts.append(Part(source.name, first, source.rows, int(exact[source.name] * scale)))
        first += source.rows
    return tuple(parts)


def mixed_rows(first: int, count: int, parts: Sequence[Part], seed: int) -> np.ndarray:
    """Rows, int64 [count], of the samples numbered first … first+count-1 of the whole run.

    Of the first n samples floor(n w/W) are of the first part, evenly spread (Bresenham 1965), and of the m others
    floor(m w/W) of the second, where W is what weights are left, and so on: exact at each multiple of the sum of the weights,
    and anywhere to fewer samples than there are parts; nothing drifts. The k-th sample of a part is row k mod its rows of
    the permutation for the part's own epoch k div its rows: each source is gone through wholly before it begins anew, in
    another order, sooner for a larger weight, and whatever the other sources do.
    """
    rows = np.empty(count, dtype=np.int64)
    places, begin, left = np.arange(count), first, sum(part.weight for part in parts)
    for part in parts:
        # floor((begin + j) w/W), from what is left of begin w so that the products stay small
        before, remainder = divmod(begin * part.weight, left)
        small = (len(places) + 1) * part.weight + left < 2**63
        steps = np.arange(len(places) + 1, dtype=np.int64 if small else object)
        given = ((remainder + steps * part.weight) // left).astype(np.int64)
        mine = np.diff(given) == 1
        rows[places[mine]] = part.first + _rows_of(part, before + given[:-1][mine], _derived(seed, part.name))
        places, begin, left = places[~mine], begin - before, left - part.weight
    return rows


def _rows_of(part: Part, ordinals: np.ndarray, seed: int) -> np.ndarray:
    """The rows within a source of its own samples with these numbers, which follow each other."""
    if part.parts:
        first = int(ordinals[0]) if len(ordinals) else 0
        return mixed_rows(first, len(ordinals), part.parts, seed) - part.first
    epochs, positions = np.divmod(ordinals, part.rows)
    rows = np.empty(len(ordinals), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        rows[chosen] = permute(positions[chosen], part.rows, seed, epoch)
    return rows


def _derived(seed: int, name: str) -> int:
    """A seed of its own for each source, by name: adding one changes no other's order."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def preferring(
    reader: TokenReader, strength: float, weights: dict[str, float] | None
) -> tuple[np.ndarray, tuple[Part, ...]]:
    """Rows sorted by class, int64 [rows], and the parts of that order, between which `mixed_rows` chooses.

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
