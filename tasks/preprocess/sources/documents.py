"""The documents of sources that are kept: what is known of them, and their texts, read again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.tables import BLOCK, Rows, by_length
from infini_llama.tasks.preprocess.sources.texts import Fault, Records, Unreadable


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one source that are kept, in order: a table on disk, and at most one bit in memory per row of it."""

    source: Source
    rows: Rows
    can_seek: bool  # whether a record is found by its place; else the source is read from its beginning
    count: int
    size: int  # UTF-8 bytes
    kept: np.ndarray | None = None  # uint8 [rows / 8]; None: all

    def __len__(self) -> int:
        return self.count

    def mask(self) -> np.ndarray:
        """Which rows are kept, bool [rows]."""
        if self.kept is None:
            return np.ones(self.rows.count, dtype=bool)
        return np.unpackbits(self.kept, count=self.rows.count).view(bool)

    def blocks(self, first: int = 0) -> Iterator[np.ndarray]:
        """What is known of the documents from number `first` on, ROW [several] at a time."""
        for rows, mask in _masked([self]):
            found = np.arange(rows.count) if mask is None else np.flatnonzero(mask)
            if first < len(found):
                skipped = int(found[first])  # what lies before is not read
                for block in Rows(rows.file, rows.first + skipped, rows.count - skipped).blocks():
                    yield block[found[first:] - skipped]
            first = max(0, first - len(found))

    def keep(self, mask: np.ndarray) -> "Documents":
        """Those of the documents for which `mask`, bool [documents], holds."""
        rows = self.mask()
        rows[rows] = mask
        kept = replace(self, kept=np.packbits(rows), count=int(mask.sum()))
        return replace(kept, size=sum(int(block["size"].sum()) for block in kept.blocks()))

    def texts(self, first: int = 0) -> Iterator[tuple[str, int]]:
        """The text and the size of each document from the `first` on, read again.

        Raises:
            DataError: the source is not what it was when it was hashed.
        """
        expected = (
            row for block in self.blocks(first) for row in zip(block["hash"], block["size"].tolist(), strict=True)
        )
        found = first
        try:
            for record, (digest, size) in zip(self._records(first), expected, strict=False):
                if isinstance(record, Fault) or blake3(record.encode()).digest() != digest.tobytes():
                    break
                yield record, size
                found += 1
        except (Unreadable, FileNotFoundError):
            pass
        if found < self.count:
            raise DataError(
                f"{self.source} changed or was removed while it was being prepared; run the same command again."
            )

    def _records(self, first: int) -> Records:
        if self.can_seek:
            yield from self.source.records_at(self._column("place", first))
            return
        wanted = self._column("number", first)
        following = next(wanted, None)
        for number, record in enumerate(self.source.records(self._column("number", first))):
            if following is None:
                return
            if number == following:
                yield record
                following = next(wanted, None)

    def _column(self, name: str, first: int) -> Iterator[int]:
        return (value for block in self.blocks(first) for value in block[name].tolist())


def _runs(several: Sequence[Documents]) -> Iterator[list[Documents]]:
    """The same sources, small ones whose rows follow each other in a table together: thousands of files are read as a few."""
    run: list[Documents] = []
    for one in several:
        last, rows = run[-1].rows if run else one.rows, one.rows
        follows = last.first + last.count == rows.first and (last.file is rows.file or last.file == rows.file)
        if run and not (follows and rows.first + rows.count - run[0].rows.first <= BLOCK):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _masked(run: list[Documents]) -> Iterator[tuple[Rows, np.ndarray | None]]:
    """Rows of a run, up to BLOCK at a time, and which of them are kept; None: all."""
    rows = Rows(run[0].rows.file, run[0].rows.first, sum(one.rows.count for one in run))
    if len(run) > 1:
        several = None if all(one.kept is None for one in run) else np.concatenate([one.mask() for one in run])
        yield rows, several
        return
    kept = run[0].kept
    for start in range(0, rows.count, BLOCK):
        count = min(BLOCK, rows.count - start)
        part = None if kept is None else np.unpackbits(kept[start // 8 : (start + count + 7) // 8], count=count)
        yield Rows(rows.file, rows.first + start, count), None if part is None else part.view(bool)


def blocks_of(several: Sequence[Documents]) -> Iterator[np.ndarray]:
    """What is known of the documents of these sources, in order, ROW [several] at a time."""
    for run in _runs(several):
        for rows, mask in _masked(run):
            for block in rows.blocks():
                yield block if mask is None else block[mask]


def row_numbers_of(several: Sequence[Documents]) -> Iterator[tuple[Path, np.ndarray]]:
    """Tables, and the numbers of these sources' documents in them, int64 [several] at a time."""
    for run in _runs(several):
        for rows, mask in _masked(run):
            found = np.arange(rows.count) if mask is None else np.flatnonzero(mask)
            yield rows.file, found + rows.first


def identities_of(several: Sequence[Documents]) -> list[list[Any]]:
    """[name, bytes, hash] of each source, which stand for its text in the key."""
    hashes = (block["hash"] for block in blocks_of(several))
    found = []
    for one, parts in zip(several, by_length(hashes, map(len, several)), strict=True):
        if one.count == 1:
            digest = next(parts).tobytes().hex()
        else:
            joined = blake3()
            for part in parts:
                joined.update(part.tobytes())
            digest = joined.hexdigest()
        found.append([one.source.name, one.size, digest])
    return found


def select(several: Sequence[Documents], mask: np.ndarray) -> list[Documents]:
    """Of these sources, none of which is empty, the documents for which `mask`, bool over all of them in order, holds."""
    if mask.all():
        return list(several)
    parts = [mask[first:last] for first, last in pairwise(accumulate(map(len, several), initial=0))]
    return [one if part.all() else one.keep(part) for one, part in zip(several, parts, strict=True) if part.any()]
