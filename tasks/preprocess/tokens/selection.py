"""Which documents of the units are in a dataset: exact duplicates and copies of validation text are found by the hashes in their tables."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from infini_llama.tasks.preprocess.tokens.units import Unit
from infini_llama.tasks.records.manifest import SPLITS

BUCKET = 2**19  # documents that are sorted at once,
BUCKETS = 128  # or more, where they would be more files than a process may open
ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<i8")])


@dataclass(frozen=True, eq=False)
class Selection:
    """The documents that are kept, and how many are not.

    Attributes:
        kept: by split, bool [documents] of each unit.
        duplicates: documents whose text came before; kept unless they are to be dropped.
        also_validation: training documents whose text is validation text.
    """

    kept: Mapping[str, Sequence[np.ndarray]]
    duplicates: int
    also_validation: int


def select(units: Sequence[Unit], drop_duplicates: bool, folder: Path) -> Selection:
    """Keeps the first of several documents with the same text if `drop_duplicates`, and no training document that is validation text.

    Memory holds a byte per document.

    Args:
        units: in the order of their documents.
        folder: for temporary files.
    """
    # Validation text is numbered first, so that the first of several alike is held out if any is.
    order = [(split, unit.manifest.content[split].documents) for split in reversed(SPLITS) for unit in units]
    held_out = sum(count for split, count in order if split == "validation")
    total = sum(count for _, count in order)
    is_first, is_leak = np.ones(total, dtype=bool), np.zeros(total, dtype=bool)
    hashes = (unit.documents(split)["hash"] for split in reversed(SPLITS) for unit in units)
    for numbers, first in _first_alike(hashes, total, folder):
        is_first[numbers] = numbers == first
        is_leak[numbers] = first < held_out
    is_leak[:held_out] = False
    is_copy = ~is_first & ~is_leak
    is_kept = ~(is_leak | is_copy) if drop_duplicates else ~is_leak
    kept: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    begin = 0
    for split, count in order:
        kept[split].append(is_kept[begin : begin + count])
        begin += count
    return Selection(kept, duplicates=int(is_copy.sum()), also_validation=int(is_leak.sum()))


def _first_alike(hashes: Iterable[np.ndarray], total: int, folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Numbers of documents, and of each the first one with the same hash, int64 [some] each.

    The hashes, uint8 [some, 16] at a time, are distributed over temporary files, and each file is sorted by itself.
    """
    buckets = [_temporary(folder) for _ in range(min(BUCKETS, 1 + total // BUCKET))]
    number = 0
    for block in hashes:
        high, low = np.ascontiguousarray(block).view("<u8").reshape(-1, 2).T
        entries = np.rec.fromarrays([high, low, np.arange(number, number + len(block))], dtype=ENTRY)
        number += len(block)
        into = (low % np.uint64(len(buckets))).astype(np.int64)
        ends = np.cumsum(np.bincount(into, minlength=len(buckets)))[:-1]
        for bucket, part in zip(buckets, np.split(entries[np.argsort(into, kind="stable")], ends), strict=True):
            bucket.write(part.tobytes())
    for bucket in buckets:
        bucket.seek(0)
        found = np.fromfile(bucket, ENTRY).view(np.recarray)
        bucket.close()
        order = np.lexsort((found.low, found.high))  # which keeps equal ones in order
        high, low, numbers = found.high[order], found.low[order], found.number[order]
        is_new = np.ones(len(order), dtype=bool)
        is_new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        if len(order):
            yield numbers, numbers[is_new][np.cumsum(is_new) - 1]


def _temporary(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)
