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

import numpy as np

from infini_llama.tasks.preprocess.sources.sources import Source, portable
from infini_llama.tasks.storage.artifacts import checksum_of

SURVEYS_VERSION = 3
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


Notes = dict[str, tuple[list[int], Found]]  # by the file's absolute path: its stamp, and what it holds


def cached_scans(
    sources: list[Source], settings: Mapping[str, object], folder: Path, scan: Callable[[Source], Found | None]
) -> list[Found | None]:
    """`scan` of each source, or what it gave the last time for a file with the same place, size, inode and times.

    Args:
        settings: what else decides what a scan finds.
        folder: of the notes, one for each folder of text; one that is damaged is none.
    """
    files = {group: folder / f"{_key(settings, *group)}.npz" for group in set(map(_group, sources))}
    notes, fresh, begun = {file: _read(file) for file in files.values()}, defaultdict[Path, Notes](dict), time.time_ns()
    found = []
    for source in sources:
        file, place, stamp = files[_group(source)], str(source.path.absolute()), _stamp(source.path)
        if source.dataset or source.made:  # it has a name alone, whatever file lies there
            stamp = None
        note = notes[file].get(place)
        if note and note[0] == stamp:
            found.append(note[1])
            continue
        found.append(one := scan(source))
        if one and stamp and max(stamp[2:]) + SETTLED < begun and _stamp(source.path) == stamp:
            fresh[file][place] = stamp, one
    for file, new in fresh.items():
        unchanged = {place: note for place, note in notes[file].items() if _stamp(Path(place)) == note[0]}
        _write(file, unchanged | new)
    return found


def _group(source: Source) -> tuple[Path, str, str]:
    """What sources of one note share: with one note per folder, neither one more file nor thousands of small ones cost much."""
    return source.path.parent, source.text_column, source.format


def _key(settings: Mapping[str, object], parent: Path, text_column: str, form: str) -> str:
    folder = [portable(str(parent.absolute())), portable(str(parent))]
    what = [SURVEYS_VERSION, settings, folder, text_column, form]
    return checksum_of(what).removeprefix("blake3:")[:32]


def _stamp(path: Path) -> list[int] | None:
    """Size, inode and times of a file; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


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
