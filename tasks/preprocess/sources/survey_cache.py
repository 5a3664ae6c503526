"""What was found in files that have not changed since, so that a command again reads no text."""

import json
import os
import time
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infini_llama.tasks.preprocess.sources.remote import is_remote
from infini_llama.tasks.preprocess.sources.sources import Source, portable
from infini_llama.tasks.storage.artifacts import checksum_of

SURVEYS_VERSION = 4  # parquet, arrow and datasets have places
SETTLED = 2 * 10**9  # nanoseconds: a file that changed less long ago may change again without a new time


@dataclass(frozen=True)
class Counts:
    """Records of one file, and how many of them are no document, by reason."""

    records: int
    empty: int
    too_short: int
    bad_records: int


@dataclass(frozen=True, eq=False)
class Found:
    """The documents of one file: number among its records, UTF-8 bytes, blake3 and place of each; what was left out is counted."""

    numbers: np.ndarray  # int64 [documents]
    sizes: np.ndarray  # int64 [documents]
    hashes: np.ndarray  # uint8 [documents, 32]
    places: np.ndarray  # int64 [documents], or [0] where they cannot be gone to
    counts: Counts
    bad: list[str] = field(default_factory=list)


Notes = dict[str, tuple[list[Any], Found]]  # by the file's absolute path or URL: its stamp, and what it holds


def cached_scans(
    sources: list[Source], settings: Mapping[str, object], folder: Path, scan: Callable[[Source], Found | None]
) -> list[Found | None]:
    """`scan` of each source, or what it gave the last time for one with the same place and stamp.

    Args:
        settings: what else decides what a scan finds.
        folder: of the notes, one for each folder of text; one that is damaged is none.
    """
    files = {group: folder / f"{_key(settings, *group)}.npz" for group in set(map(_group, sources))}
    notes, fresh, begun = {file: _read(file) for file in files.values()}, defaultdict[Path, Notes](dict), time.time_ns()
    found = []
    for source in sources:
        file, place, stamp = files[_group(source)], _place(source), source.stamp()
        note = notes[file].get(place)
        if note and note[0] == stamp:
            found.append(note[1])
            continue
        found.append(one := scan(source))
        if one and stamp and _is_settled(stamp, begun) and source.stamp() == stamp:
            fresh[file][place] = stamp, one
    for file, new in fresh.items():
        unchanged = {place: note for place, note in notes[file].items() if is_remote(place) or Path(place).exists()}
        _write(file, unchanged | new)
    return found


def _place(source: Source) -> str:
    if source.dataset:
        return f"hub://{'/'.join(str(part) for part in source.dataset[:3])}"
    return str(source.path.absolute() if isinstance(source.path, Path) else source.path.url)


def _group(source: Source) -> tuple[str, str, str, str]:
    """What sources of one note share: with one note per folder, neither one more file nor thousands of small ones cost much."""
    folder = _place(source).rpartition("/")[0] or "/"
    below = str(source.path.parent) if isinstance(source.path, Path) else folder
    return folder, below, source.text_column, source.format


def _key(settings: Mapping[str, object], folder: str, below: str, text_column: str, form: str) -> str:
    what = [SURVEYS_VERSION, settings, [portable(folder), portable(below)], text_column, form]
    return checksum_of(what).removeprefix("blake3:")[:32]


def _is_settled(stamp: list[Any], begun: int) -> bool:
    """Whether a later change would show: always where the stamp is that of the content, and not of a file's times."""
    return isinstance(stamp[-1], str) or max(stamp[2:]) + SETTLED < begun


def _read(file: Path) -> Notes:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            numbers, sizes, hashes, places = (arrays[name] for name in ("numbers", "sizes", "hashes", "places"))
            table = json.loads(arrays["table"].tobytes())
        notes, first, placed = {}, 0, 0
        for path, stamp, documents, known, counts, bad in table:
            part, where = slice(first, first + documents), slice(placed, placed + known)
            notes[path] = (stamp, Found(numbers[part], sizes[part], hashes[part], places[where], Counts(**counts), bad))
            first, placed = first + documents, placed + known
        return notes if first == len(numbers) == len(sizes) == len(hashes) and placed == len(places) else {}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return {}  # none yet, or a damaged one


def _write(file: Path, notes: Notes) -> None:
    table = [
        [path, stamp, len(one.sizes), len(one.places), asdict(one.counts), one.bad]
        for path, (stamp, one) in notes.items()
    ]
    several = [one for _, one in notes.values()]
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    with suppress(OSError):  # without it, the text is read again the next time
        file.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as target:
            np.savez(
                target,
                numbers=np.concatenate([one.numbers for one in several]),
                sizes=np.concatenate([one.sizes for one in several]),
                hashes=np.concatenate([one.hashes for one in several]),
                places=np.concatenate([one.places for one in several]),
                table=np.frombuffer(json.dumps(table).encode(), dtype=np.uint8),
            )
        part.replace(file)
