"""The first reading of a source: its documents are counted, measured and hashed, and their rows written to a table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from blake3 import blake3

from infini_llama.configs.errors import DataError, no_space
from infini_llama.tasks.preprocess.sources.near_duplicates import sketches
from infini_llama.tasks.preprocess.sources.scanning import Counts, Found, TextSink
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.tables import LAYOUTS, SKETCHED, Rows
from infini_llama.tasks.preprocess.sources.texts import Fault, Unreadable

NAMED = 10  # bad places that the report names


@dataclass
class _Seen:
    """What a scan has counted so far."""

    records: int = 0
    empty: int = 0
    too_short: int = 0
    bad_records: int = 0
    size: int = 0
    last: int = -1  # place of the last record
    can_seek: bool = True
    bad: list[str] = field(default_factory=list)


def scan_source(source: Source, table: IO[bytes], sink: TextSink | None, min_length: int, skip: bool) -> Found:
    """Counts and hashes; a file that turns out to be damaged half way contributes nothing.

    Args:
        table: takes a row for each document; its suffix says which.
        sink: takes their texts.
        skip: damaged records and files are left out.

    Raises:
        DataError: something is damaged, and nothing is to be left out.
    """
    begin, seen, layout = table.tell(), _Seen(), LAYOUTS[Path(table.name).suffix]
    try:
        for records, places in source.batches():
            texts, numbers = _documents(records, min_length, seen)
            if len(texts) < len(records):
                faults = [record.reason for record in records if isinstance(record, Fault)]
                if faults and not skip:
                    raise Unreadable(faults[0])
                seen.bad += [f"{source} {fault}" for fault in faults[: NAMED - len(seen.bad)]]
            if texts:
                rows = _rows(texts, numbers + seen.records, places[numbers] if len(places) else -1, layout)
                sizes = rows["size"]
                seen.size += int(sizes.sum())
                table.write(rows.tobytes())
                if sink:
                    sink.add(texts, sizes)
            _note_places(places, seen)
            seen.records += len(records)
    except (Unreadable, OSError) as error:
        if no_space(error):
            raise
        reason = f"{source} {error if isinstance(error, Unreadable) else f'cannot be read ({error.strerror})'}"
        if not skip:
            verb = "convert" if "UTF-8" in reason and not isinstance(error, OSError) else "repair"
            raise DataError(f"{reason}; {verb} it, or remove it from {source.key}.") from None
        table.seek(begin)
        table.truncate()
        if sink:
            sink.truncate(begin // layout.itemsize)
        return Found(Rows(Path(table.name)), False, 0, Counts(), [reason], is_readable=False)
    rows = Rows(Path(table.name), begin // layout.itemsize, (table.tell() - begin) // layout.itemsize)
    counts = Counts(seen.records, seen.empty, seen.too_short, seen.bad_records)
    return Found(rows, seen.can_seek, seen.size, counts, seen.bad)


def _documents(records: Sequence[str | Fault], min_length: int, seen: _Seen) -> tuple[list[str], np.ndarray]:
    """The records that are documents, and their numbers among these records, int64; the others are counted."""
    shortest = max(1, min_length)
    if set(map(type, records)) == {str} and min(map(len, records)) >= shortest:  # type: ignore[arg-type]
        return records, np.arange(len(records))  # type: ignore[return-value]
    texts, numbers = [], []
    for number, record in enumerate(records):
        if isinstance(record, Fault):
            seen.bad_records += 1
        elif not record:
            seen.empty += 1
        elif len(record) < shortest:
            seen.too_short += 1
        else:
            texts.append(record)
            numbers.append(number)
    return texts, np.array(numbers, dtype=np.int64)


def _rows(texts: list[str], numbers: np.ndarray, places: np.ndarray | int, layout: np.dtype) -> np.ndarray:
    encoded = [text.encode() for text in texts]
    rows = np.empty(len(texts), layout)
    rows["number"], rows["place"] = numbers, places
    rows["size"] = list(map(len, encoded))
    rows["hash"] = np.frombuffer(b"".join([blake3(data).digest() for data in encoded]), np.uint8).reshape(-1, 32)
    if layout is SKETCHED:
        rows["sketch"] = sketches(texts)
    return rows


def _note_places(places: np.ndarray, seen: _Seen) -> None:
    """Whether each record is found again by its place: not where there is none, or where a long line is several records."""
    seen.can_seek &= len(places) > 0 and seen.last < places[0] and bool((places[1:] > places[:-1]).all())
    seen.last = int(places[-1]) if len(places) else seen.last
