"""Tables of documents on disk: what is known of each, in order. Memory holds one block, however many documents there are."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np

# Of one document: place among all records of its source, bytes of its UTF-8, byte or row of the file at which it begins, blake3.
ROW = np.dtype([("number", "<i8"), ("size", "<i8"), ("place", "<i8"), ("hash", "u1", 32)])
SKETCH = 128  # bytes
SKETCHED = np.dtype([*ROW.descr, ("sketch", "u1", SKETCH)])  # where near-duplicates are looked for
LAYOUTS = {".rows": ROW, ".sketched": SKETCHED}  # by the suffix of the file
BLOCK = 2**16  # rows
BUCKET = 2**19  # rows that are sorted at once,
BUCKETS = 128  # or more, if they would be more files than a process may open
Condition = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a file of them."""

    file: Path
    first: int = 0
    count: int = 0

    @property
    def layout(self) -> np.dtype:
        """What a row is, ROW or SKETCHED."""
        return LAYOUTS[self.file.suffix]

    def blocks(self) -> Iterator[np.ndarray]:
        """The rows in order, up to BLOCK at a time."""
        layout = self.layout
        for start in range(0, self.count, BLOCK):
            size = min(BLOCK, self.count - start) * layout.itemsize
            begin = (self.first + start) * layout.itemsize
            yield np.frombuffer(os.pread(_open(self.file).fileno(), size, begin), layout)


@lru_cache(maxsize=8)  # thousands of small files of text have their rows in one file
def _open(file: Path) -> IO[bytes]:
    return file.open("rb")


def by_first(hashes: Iterable[np.ndarray], total: int, folder: Path, holds: Condition) -> np.ndarray:
    """bool [total]: what `holds` of each text and the first one with the same hash, which is itself where there is none before it.

    The hashes are distributed over temporary files in `folder`, and each file is sorted by itself.

    Args:
        hashes: uint8 [several, 32] at a time, of which 128 bits decide.
        total: how many there are in all.
        holds: takes numbers of texts and of the first texts like them, int64 [several] each; returns bool [several].
    """
    mask = np.zeros(total, dtype=bool)
    entry = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<i8")])
    buckets = [_temporary(folder) for _ in range(min(BUCKETS, 1 + total // BUCKET))]
    number = 0
    for block in hashes:
        high, low = np.ascontiguousarray(block[:, :16]).view("<u8").T
        entries = np.rec.fromarrays([high, low, np.arange(number, number + len(block))], dtype=entry)
        number += len(block)
        into = (low % np.uint64(len(buckets))).astype(np.int64)
        ends = np.cumsum(np.bincount(into, minlength=len(buckets)))[:-1]
        for bucket, part in zip(buckets, np.split(entries[np.argsort(into, kind="stable")], ends), strict=True):
            bucket.write(part.tobytes())
    for bucket in buckets:
        bucket.seek(0)
        found = np.fromfile(bucket, entry).view(np.recarray)
        bucket.close()
        order = np.lexsort((found.low, found.high))  # which keeps equal ones in order
        high, low, numbers = found.high[order], found.low[order], found.number[order]
        fresh = np.ones(len(order), dtype=bool)
        fresh[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        mask[numbers] = holds(numbers, numbers[fresh][np.cumsum(fresh) - 1])
    return mask


def _temporary(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)


def by_length(blocks: Iterable[np.ndarray], lengths: Iterable[int]) -> Iterator[Iterator[np.ndarray]]:
    """The same rows in runs of these lengths, each as arrays that are read when they are asked for, before the next run."""
    several = iter(blocks)
    rest: list[np.ndarray] = []

    def run(length: int) -> Iterator[np.ndarray]:
        while length:
            block = rest.pop() if rest else next(several)
            yield block[:length]
            if len(block) > length:
                rest.append(block[length:])
            length -= min(length, len(block))

    for length in lengths:
        parts = run(length)
        yield parts
        for _ in parts:  # the rows that were not read
            pass
