"""Documents with nearly the same words: a sketch of each (MinHash), and those that are like an earlier one.

The similarity of two documents is that of their sets of five words in a row: what both have, divided by what either has (Jaccard). It is
the probability that the smallest of all hashes of one set is that of the other. A sketch has 8 bits of that for each of 128 hash
functions. Documents are compared if they agree in all 8 of one of 16 bands (locality-sensitive hashing).
"""

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.sources.documents import Documents, blocks_of
from infini_llama.tasks.preprocess.sources.tables import BLOCK, SKETCH, by_first
from infini_llama.tasks.preprocess.sources.texts import batches

WORDS = 5  # in a row
BAND = 8  # of the SKETCH hash functions
SEED = 1
PART = 2**20  # characters of a long document that are cut into words at once
NAMED = 10  # pairs that the report names
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # each letter is a word
WORD = re.compile(f"[{UNSPACED}]|[^\\W{UNSPACED}]+")
FACTORS = [pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(WORDS)]


@cache
def library() -> Any:
    """What computes sketches.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module("rensa")
    except ImportError:
        raise ConfigError(
            "data.near_duplicates: rensa is not installed; install infini-llama[near-duplicates]."
        ) from None


def version() -> list[int]:
    """What decides the sketch of a text."""
    return [library().RMinHash.ALGORITHM_VERSION, WORDS, BAND, SEED, PART]


def sketches(texts: Sequence[str]) -> np.ndarray:
    """uint8 [texts, SKETCH]; no text is empty. A long text is cut into parts, and has the smallest hashes of all its parts."""
    begins = np.cumsum([0, *(-(-len(text) // PART) for text in texts[:-1])])
    parts = (text[start : start + PART] for text in texts for start in range(0, len(text), PART))
    found = [_smallest(several) for several, _ in batches(((part, len(part)) for part in parts), PART)]
    return np.minimum.reduceat(np.concatenate(found), begins).astype(np.uint8)


def _smallest(parts: list[str]) -> np.ndarray:
    """The smallest hashes of each part's words in a row, uint32 [parts, SKETCH]. A part without words is one."""
    rensa = library().RMinHash
    words = [WORD.findall(part.lower()) or [part] for part in parts]
    hashed = rensa.hash_token_sets([several + [""] * (WORDS - len(several)) for several in words])
    counts = np.array(list(map(len, hashed)))
    ends = counts.cumsum()
    flat = np.fromiter(chain.from_iterable(hashed), np.uint64, int(ends[-1]))
    rows, last = np.zeros_like(flat), np.ones(len(flat), dtype=bool)
    for place, factor in enumerate(FACTORS):
        rows[: len(flat) - place] += flat[place:] * np.uint64(factor)
        last[ends[:, None] - np.arange(1, WORDS)] = False  # these go on in the next part
    offsets = np.concatenate(([0], (counts - (WORDS - 1)).cumsum())).astype(np.uint64)
    matrix = rensa.digest_matrix_from_flat_token_hashes(rows[last], offsets, SKETCH, SEED)
    return np.array(matrix.to_rows(), dtype=np.uint32)


@dataclass(frozen=True)
class Pair:
    """A document, an earlier one that it is like, and how similar they are; both by their numbers."""

    number: int
    first: int
    similarity: float


class _Comparison:
    """Documents are compared with the first one that has the same band; one that was like another before is not compared again."""

    def __init__(self, known: np.ndarray, threshold: float) -> None:
        self.known, self.pairs = known, list[Pair]()
        self.kept = np.ones(len(known), dtype=bool)
        self.least = math.ceil(SKETCH * (threshold * 255 + 1) / 256)  # 1 of 256 agree by chance

    def are_unlike(self, numbers: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """bool [several], of documents and the first ones with the same band, by their numbers."""
        unlike = np.ones(len(numbers), dtype=bool)
        candidates = np.flatnonzero((numbers != firsts) & self.kept[numbers])
        for start in range(0, len(candidates), BLOCK):
            these = candidates[start : start + BLOCK]
            agreeing = (self.known[numbers[these]] == self.known[firsts[these]]).sum(axis=1)
            unlike[these] = agreeing < self.least
            self._name(numbers[these], firsts[these], agreeing)
        return unlike

    def _name(self, numbers: np.ndarray, firsts: np.ndarray, agreeing: np.ndarray) -> None:
        alike = np.flatnonzero(agreeing >= self.least)
        for one in alike[np.argsort(numbers[alike])[:NAMED]].tolist():
            similarity = (int(agreeing[one]) * 256 / SKETCH - 1) / 255
            self.pairs.append(Pair(int(numbers[one]), int(firsts[one]), similarity))
        self.pairs = sorted(self.pairs, key=lambda pair: pair.number)[:NAMED]


def unlike_earlier(members: Sequence[Documents], threshold: float) -> tuple[np.ndarray, list[Pair]]:
    """Which documents are like none before them, bool [documents], and the first of the others.

    Memory has a byte per document; a temporary file beside their tables has the sketches.

    Args:
        threshold: similarity from which on two documents are alike.
    """
    total = sum(map(len, members))
    if total < 2:
        return np.ones(total, dtype=bool), []
    folder = members[0].rows.file.parent
    with tempfile.TemporaryFile(dir=folder) as file:
        for block in blocks_of(members):
            file.write(block["sketch"].tobytes())
        file.flush()
        known = np.memmap(file, np.uint8, "r", shape=(total, SKETCH))
        comparison = _Comparison(known, threshold)
        for band in range(0, SKETCH, BAND):
            comparison.kept &= by_first(_keys(known, band), total, folder, comparison.are_unlike)
    return comparison.kept, comparison.pairs


def _keys(known: np.ndarray, band: int) -> Iterator[np.ndarray]:
    """The band of each document, twice: uint8 [several, 2 BAND]."""
    return (np.tile(known[start : start + BLOCK, band : band + BAND], 2) for start in range(0, len(known), BLOCK))


def in_words(members: Sequence[Documents], pairs: list[Pair]) -> list[str]:
    """The pairs, for the report."""
    ends = np.cumsum(list(map(len, members)))

    def name(number: int) -> str:
        which = int(np.searchsorted(ends, number, side="right"))
        documents = members[which]
        row = next(documents.blocks(number - int(ends[which]) + len(documents)))[0]
        return f"{documents.source} (record {int(row['number']) + 1})"

    return [f"{name(pair.number)} is like {name(pair.first)}: {pair.similarity:.2f}" for pair in pairs]
