"""What was found in files that have not changed since, so that a command again reads no text."""

import json
import os
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.storage.artifacts import checksum_of

SURVEYS_VERSION = 2
SETTLED = 2 * 10**9  # nanoseconds: a file that changed less long ago may change again without a new time


@dataclass(frozen=True, eq=False)
class Found:
    """The documents of one file: number among its records, UTF-8 bytes, blake3 and place of each; what was left out is counted."""

    numbers: np.ndarray  # int64 [documents]
    sizes: np.ndarray  # int64 [documents]
    hashes: np.ndarray  # uint8 [documents, 32]
    places: np.ndarray  # int64 [documents], or [0] where they cannot be gone to
    counts: dict[str, int]
    bad: list[str] = field(default_factory=list)


def remembered(
    sources: list[Source], settings: dict[str, Any], folder: Path, scan: Callable[[Source], Found | None]
) -> list[Found | None]:
    """`scan` of each source, or what it gave the last time for a file with the same place, size, inode and times.

    Args:
        settings: what else decides what a scan finds.
        folder: of the notes; one that is damaged is none.
    """
    names = [[_place(source), str(source.path), source.name, source.text_column, source.format] for source in sources]
    key = checksum_of([SURVEYS_VERSION, settings, names]).removeprefix("blake3:")
    file = folder / f"{key[:32]}.npz"
    stamps, notes, begun = [_stamp(source) for source in sources], _read(file), time.time_ns()
    found = []
    for source, stamp in zip(sources, stamps, strict=True):
        note = notes.get(_place(source))
        found.append(note[1] if note and stamp and note[0] == stamp else scan(source))
    kept = {
        _place(source): (stamp, one)
        for source, stamp, one in zip(sources, stamps, found, strict=True)
        if one and stamp and max(stamp[2:]) + SETTLED < begun and _stamp(source) == stamp
    }
    if kept and {path: note[0] for path, note in notes.items()} != {path: note[0] for path, note in kept.items()}:
        _write(file, kept)
    return found


def _place(source: Source) -> str:
    return str(source.path.absolute())


def _stamp(source: Source) -> list[int] | None:
    """Size, inode and times of a file; None for what is none: made text has a name alone, whatever lies there."""
    if source.dataset or source.made:
        return None
    try:
        status = source.path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


Notes = dict[str, tuple[list[int], Found]]


def _read(file: Path) -> Notes:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            numbers, sizes, hashes, places = (arrays[name] for name in ("numbers", "sizes", "hashes", "places"))
            table = json.loads(arrays["table"].tobytes())
        notes, first, placed = {}, 0, 0
        for path, stamp, documents, known, counts, bad in table:
            part, where = slice(first, first + documents), slice(placed, placed + known)
            notes[path] = (stamp, Found(numbers[part], sizes[part], hashes[part], places[where], counts, bad))
            first, placed = first + documents, placed + known
        return notes if first == len(numbers) == len(sizes) == len(hashes) and placed == len(places) else {}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return {}  # none yet, or a damaged one


def _write(file: Path, notes: Notes) -> None:
    table = [
        [path, stamp, len(one.sizes), len(one.places), one.counts, one.bad] for path, (stamp, one) in notes.items()
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
