"""The plan of work, fixed before any of it is done: unit k of a split becomes shard k, whoever does it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from infini_llama.tasks.preprocess.sources.documents import Documents, blocks_of, row_numbers_of
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.survey import Corpus
from infini_llama.tasks.preprocess.sources.tables import by_length


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
            if first < len(documents):
                yield from documents.texts(first)
            first = max(0, first - len(documents))

    def source(self, split: str, number: int) -> Source:
        """Where document `number` of a split was read."""
        ends = np.cumsum([len(documents) for documents in self.documents[split]])
        return self.documents[split][int(np.searchsorted(ends, number, side="right"))].source

    def hashes(self, split: str) -> Iterator[tuple[Unit, Iterator[np.ndarray]]]:
        """The units of a split, and of each the hashes of its documents in order, uint8 [several, 32] at a time.

        They are read when they are asked for, before the next unit.
        """
        units = [unit for unit in self.units if unit.split == split]
        blocks = (block["hash"] for block in blocks_of(self.documents[split]))
        return zip(units, by_length(blocks, [unit.documents for unit in units]), strict=True)

    def rows(self, units: list[Unit]) -> Iterator[tuple[Unit, list[tuple[Path, np.ndarray]]]]:
        """These of the units, and of each the tables of its documents and their rows in them, int64 [several] each, in order."""
        wanted = {unit.file for unit in units}
        for split, several in self.documents.items():
            files = {documents.rows.file: None for documents in several}
            numbers, tables = {file: number for number, file in enumerate(files)}, list(files)
            blocks = (
                np.column_stack((np.full(len(rows), numbers[file]), rows)) for file, rows in row_numbers_of(several)
            )
            own = [unit for unit in self.units if unit.split == split]
            for unit, parts in zip(own, by_length(blocks, [unit.documents for unit in own]), strict=True):
                if unit.file in wanted:
                    yield unit, [(tables[part[0, 0]], part[:, 1]) for part in parts]


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
            begins = np.cumsum([0, *map(len, files)])
            first = 0
            for count, size in _cut(files, shard_size // 4):
                file = int(np.searchsorted(begins, first, side="right")) - 1
                continues = bool(first != begins[file]) and not files[file].can_seek
                units.append(Unit(split, number, base + first, count, size, source, continues))
                first, number = first + count, number + 1
            base += first
    return Plan(documents, units)


def _cut(files: list[Documents], most: int) -> Iterator[tuple[int, int]]:
    """(documents, bytes of text) of each unit; in a unit, the bytes and one for each document are at most `most`."""
    count = size = 0
    for sizes in (block["size"] for block in blocks_of(files)):
        ends = (sizes + 1).cumsum()
        first, before = 0, 0
        while first < len(sizes):
            last = int(np.searchsorted(ends, before + most - size - count, side="right"))
            if last == first and not count:
                last += 1  # larger than a unit may be
            if last > first:
                size += int(ends[last - 1]) - before - (last - first)
                count += last - first
                first, before = last, int(ends[last - 1])
            if first < len(sizes):
                yield count, size
                count = size = 0
    if count:
        yield count, size


def shares_of(units: list[Unit], most: int) -> list[list[Unit]]:
    """Runs of about `most` consecutive units. What lies before a run need not be read for it, as far as the files allow it."""
    shares: list[list[Unit]] = []
    for unit in units:
        if not shares or (len(shares[-1]) >= most and not unit.continues):
            shares.append([])
        shares[-1].append(unit)
    return shares
