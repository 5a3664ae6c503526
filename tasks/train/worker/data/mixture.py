"""The order of samples from several sources: each sample's source and row are a pure function of (seed, sample number)."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.records.manifest import SourceRows
from infini_llama.tasks.train.worker.data.order import permute


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
