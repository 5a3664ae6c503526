"""The order of samples: a pure function of (seed, epoch, position).

Hence seeking costs nothing and no rank keeps state. One permutation per epoch; with weights of
sources, one for each source, which are mixed.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.lineage import SampleRange
from infini_llama.tasks.records.manifest import SourceRows

ROUNDS = 6


def _round_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(
        f"{seed}:{epoch}".encode(), digest_size=8 * ROUNDS
    ).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """splitmix64's finalizer: every output bit depends on every input bit.

    Steele, Lea and Flood 2014.
    """
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permute(
    positions: np.ndarray,
    size: int,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """Image of `positions` under a pseudo-random permutation of range(size).

    A balanced Feistel network over the next even power of two, with cycle walking for images beyond
    `size` (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). O(1) memory and O(1)
    seek, unlike a shuffled list.

    Args:
        positions: int64 [n], each in [0, size).
        size: number of rows, at least 1.

    Returns:
        int64 [n], distinct for distinct positions.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    keys = _round_keys(seed, epoch)
    result = positions.astype(np.uint64)
    pending = np.arange(len(result))
    with np.errstate(over="ignore"):
        while len(pending):
            values = result[pending]
            left = values >> half
            right = values & mask
            for key in keys:
                left, right = right, left ^ (_mix(right, key) & mask)
            result[pending] = (left << half) | right
            is_beyond = result[pending] >= np.uint64(size)
            pending = pending[is_beyond]
    return result.astype(np.int64)


def rows_of_samples(
    first: int,
    count: int,
    size: int,
    seed: int,
) -> np.ndarray:
    """Rows of the samples numbered first, first+1, …, first+count-1 of the whole run.

    Epochs follow each other without a gap.
    """
    samples = np.arange(first, first + count, dtype=np.int64)
    return _rows_of(samples, size, seed)


def _rows_of(samples: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Rows of the samples with these numbers: one permutation of range(size) after the other."""
    epochs, positions = np.divmod(samples, size)
    rows = np.empty(len(samples), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        rows[chosen] = permute(positions[chosen], size, seed, epoch)
    return rows


def next_sample(samples: int, skipped: Sequence[SampleRange]) -> int:
    """The first sample from number `samples` on that no rollback has left out.

    Args:
        skipped: the ranges that rollbacks have left out.
    """
    for span in sorted(skipped, key=lambda span: span.first):
        if span.first <= samples < span.end:
            samples = span.end
    return samples


def samples_used(samples: int, skipped: Sequence[SampleRange]) -> int:
    """Number of samples before number `samples` that are in none of the ranges.

    The ranges may overlap.
    """
    used = 0
    counted = 0
    for span in sorted(skipped, key=lambda span: span.first):
        used += max(0, min(span.first, samples) - counted)
        counted = max(counted, span.end)
    return used + max(0, samples - counted)


@dataclass(frozen=True)
class WeightedSource:
    """The rows of one source, and how often they are seen."""

    name: str
    first: int  # row
    rows: int
    weight: int  # its share is weight / sum of weights


def weighted_sources(
    sources: Sequence[SourceRows],
    weights: dict[str, float],
) -> tuple[WeightedSource, ...]:
    """The sources of a row table with their weights, in the order of their rows.

    Raises:
        ConfigError: the weights are for other sources.
    """
    exact = [Fraction(repr(weight)) for weight in in_order(sources, weights)]
    scale = math.lcm(*(weight.denominator for weight in exact))
    weighted: list[WeightedSource] = []
    first = 0
    for source, weight in zip(sources, exact, strict=True):
        weighted.append(
            WeightedSource(source.name, first, source.rows, int(weight * scale))
        )
        first += source.rows
    return tuple(weighted)


def in_order(
    sources: Sequence[SourceRows], weights: dict[str, float]
) -> tuple[float, ...]:
    """The weights of the sources of a row table, in the order of their rows.

    Raises:
        ConfigError: the weights are for other sources.
    """
    if {source.name for source in sources} != weights.keys():
        names = ", ".join(source.name for source in sources) or "one without a name"
        raise ConfigError(
            f"data.sources gives weights to {', '.join(weights)}; "
            f"the dataset's sources are {names}. Name the sources as the dataset does, "
            "or remove their weight and loss_weight."
        )
    return tuple(weights[source.name] for source in sources)


def mixed_rows(
    first: int,
    count: int,
    sources: Sequence[WeightedSource],
    seed: int,
) -> np.ndarray:
    """Rows, int64 [count], of the samples numbered first … first+count-1 of the whole run.

    The first source gets floor(n w/W) of the first n samples, evenly spread (Bresenham 1965): w is
    its weight, W the sum of all. The next source gets its share of the remaining samples in the
    same way, by the remaining weights. The shares are exact at each multiple of the sum of the
    weights, and elsewhere off by fewer samples than there are sources.

    Each source is shuffled anew whenever it has been used up, whatever the others do.
    """
    rows = np.empty(count, dtype=np.int64)
    places = np.arange(count)
    begin = first
    left = sum(source.weight for source in sources)
    for source in sources:
        # floor((begin + j) w/W), from what is left of begin w so that the products stay small.
        before, remainder = divmod(begin * source.weight, left)
        fits_int64 = (len(places) + 1) * source.weight + left < 2**63
        steps = np.arange(len(places) + 1, dtype=np.int64 if fits_int64 else object)
        counts = ((remainder + steps * source.weight) // left).astype(np.int64)
        chosen = np.diff(counts) == 1
        numbers = before + counts[:-1][chosen]
        seed_of_source = _derived(seed, source.name)
        own_rows = _rows_of(numbers, source.rows, seed_of_source)
        rows[places[chosen]] = source.first + own_rows
        places = places[~chosen]
        begin -= before
        left -= source.weight
    return rows


def representative_rows(reader: TokenReader, number: int) -> np.ndarray:
    """`number` rows of a split, int64, that represent all of it.

    They are drawn from all of it, since its first rows may be of one file, topic or language. Of
    several sources there are of each in the share that it has of all rows. More rows begin with the
    fewer ones.
    """
    if not reader.sources:
        return rows_of_samples(0, number, len(reader), seed=0)
    sources = [source for source in reader.sources if source.rows]
    shares: dict[str, float] = {source.name: source.rows for source in sources}
    weighted = weighted_sources(sources, shares)
    return mixed_rows(0, number, weighted, seed=0)


def _derived(seed: int, name: str) -> int:
    """A seed of its own for each source, by name: adding one changes no other's order."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
