"""The plan of work, fixed before any of it is done: unit k of a split becomes shard k, whoever does it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.survey import Corpus, Documents


@dataclass(frozen=True)
class Unit:
    """Consecutive documents of one split, whose shard is written as a whole."""

    split: str
    number: int
    first: int  # document of the split
    documents: int
    size: int  # bytes of text
    source: str = ""  # of several, the one that all its documents are of
    continues: bool = False  # begins in the middle of a file that can only be read from its beginning
    key: str = ""  # of its shard's bytes, once it is known who writes them

    @property
    def file(self) -> str:
        return f"{self.split}/data-{self.number:05d}.arrow"


@dataclass(frozen=True, eq=False)
class Plan:
    """All units of both splits, in order."""

    documents: dict[str, list[Documents]]
    units: list[Unit]

    def texts(self, split: str, first: int = 0) -> Iterator[tuple[str, int]]:
        """Text and bytes of every document of a split from number `first` on."""
        for documents in self.documents[split]:
            if first < len(documents.sizes):
                yield from documents.texts(first)
            first = max(0, first - len(documents.sizes))

    def source(self, split: str, number: int) -> Source:
        """Where document `number` of a split was read."""
        ends = np.cumsum([len(documents.sizes) for documents in self.documents[split]])
        return self.documents[split][int(np.searchsorted(ends, number, side="right"))].source

    def hashes(self, unit: Unit) -> Iterator[np.ndarray]:
        """The hashes of a unit's documents in order, uint8 [several, 32] at a time."""
        base = 0
        for documents in self.documents[unit.split]:
            rows = documents.hashes[max(0, unit.first - base) : max(0, unit.first + unit.documents - base)]
            if len(rows):
                yield rows
            base += len(documents.sizes)


def plan_units(corpus: Corpus, shard_size: int) -> Plan:
    """Cuts both splits into units whose shard, at up to 4 bytes a token, has at most `shard_size` bytes.

    A token stands for at least one byte of text, and one more ends each document. A document is never cut: a larger one
    is a unit of its own. No unit has documents of two sources.
    """
    documents = {"train": corpus.train, "validation": corpus.validation}
    units: list[Unit] = []
    for split, members in documents.items():
        base = number = 0
        for source, several in groupby(members, key=lambda member: member.source.origin):
            files = list(several)
            sizes = np.concatenate([file.sizes for file in files])
            begins = np.cumsum([0, *(len(file.sizes) for file in files)])
            ends = (sizes + 1).cumsum()
            first = 0
            while first < len(sizes):
                before = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, before + shard_size // 4, side="right")))
                file = int(np.searchsorted(begins, first, side="right")) - 1
                continues = first != begins[file] and not len(files[file].places)
                size = int(sizes[first:last].sum())
                units.append(Unit(split, number, base + first, last - first, size, source, continues))
                first, number = last, number + 1
            base += len(sizes)
    return Plan(documents, units)


def shares_of(units: list[Unit], most: int) -> list[list[Unit]]:
    """Runs of about `most` consecutive units. What lies before a run need not be read for it, as far as the files allow it."""
    shares: list[list[Unit]] = []
    for unit in units:
        if not shares or (len(shares[-1]) >= most and not unit.continues):
            shares.append([])
        shares[-1].append(unit)
    return shares
