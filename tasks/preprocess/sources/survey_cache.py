"""What was found in text that has not changed since, so that a command again reads none of it."""

import json
import logging
import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from infini_llama.tasks.preprocess.sources.patterns import portable
from infini_llama.tasks.preprocess.sources.remote import is_remote
from infini_llama.tasks.preprocess.sources.scanning import (
    PASSING,
    Counts,
    Found,
    Scan,
    Stale,
    Tables,
    Workers,
    scanned,
    size_here,
)
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.tables import Rows
from infini_llama.tasks.progress import megabytes
from infini_llama.tasks.storage.artifacts import checksum_of, file_checksum, write_atomic

log = logging.getLogger("infini_llama.preprocess")
SURVEYS_VERSION = 6  # tables on disk
SETTLED = 2 * 10**9  # nanoseconds: a file that changed less long ago may change again without a new time
SEVERAL = 16  # small tables of one folder of text; more are joined
SMALL = 2**16  # rows
LEFT_BEHIND = 7 * 86_400.0  # seconds after which what a killed or other process has left is deleted
NOTED_EVERY = 10.0  # seconds

Notes = dict[str, tuple[list[Any], Found]]  # by the file's absolute path or URL: its stamp, and what it holds


def cached_scans(
    sources: list[Source], settings: Mapping[str, object], tables: Tables, scan: Scan, workers: Workers
) -> list[Found]:
    """`scan` of each source, or what it gave the last time for one with the same place and stamp.

    Args:
        settings: what else decides what a scan finds.
        workers: who scans.
    """
    places = list(map(_place, sources))
    groups = list(map(_group, sources, places))
    keys = {group: _key(settings, *group) for group in set(groups)}
    notes = {key: _read(tables.notes, key) if tables.notes else {} for key in keys.values()}
    found: dict[int, Found] = {}
    stale: list[Stale] = []
    begun, noted = time.time_ns(), time.monotonic()
    for number, (source, place, group) in enumerate(zip(sources, places, groups, strict=True)):
        key, stamp = keys[group], source.stamp()
        note = notes[key].get(place)
        if note and note[0] == stamp:
            found[number] = note[1]
        else:
            stale.append(Stale(number, source, key, stamp, size_here(source)))
    fresh: dict[str, Notes] = defaultdict(dict)
    done, total = 0, sum(one.size for one in stale)

    def remember() -> None:
        for key, new in fresh.items() if tables.notes else ():
            unchanged = {place: note for place, note in notes[key].items() if is_remote(place) or _exists(place)}
            notes[key] = unchanged | new
            _write(tables, tables.notes or Path(), key, notes[key])
        fresh.clear()

    try:
        for batch, several in scanned(stale, tables, scan, workers):
            for one, result in zip(batch.stale, several, strict=True):
                found[one.number] = result
                stamp = one.stamp
                if result.is_readable and stamp and _is_settled(stamp, begun) and one.source.stamp() == stamp:
                    fresh[one.key][places[one.number]] = stamp, result
            done += sum(one.size for one in batch.stale)
            if done < total:
                log.info("surveying text", extra={"progress": megabytes(done, total)})
            if time.monotonic() - noted > NOTED_EVERY:
                remember()
                noted = time.monotonic()
    finally:  # also where a file is damaged or a worker was lost
        remember()
    return [found[number] for number in range(len(sources))]


def _place(source: Source) -> str:
    if split := source.dataset:
        return f"hub://{split.path}/{split.configuration}/{split.split}"
    if not isinstance(source.path, Path):
        return source.path.url
    return portable(str(source.path if source.path.is_absolute() else source.path.absolute()))


def _exists(place: str) -> bool:
    return os.path.exists(place)  # noqa: PTH110  thousands are looked at


def _group(source: Source, place: str) -> tuple[str, str, str, str]:
    """What sources of one note share: with one note per folder, neither one more file nor thousands of small ones cost much."""
    folder = place.rpartition("/")[0] or "/"
    below = str(source.path).rpartition("/")[0] if isinstance(source.path, Path) else folder
    return folder, below, source.text_column, source.format


def _key(settings: Mapping[str, object], folder: str, below: str, text_column: str, form: str) -> str:
    what = [SURVEYS_VERSION, settings, [portable(folder), portable(below)], text_column, form]
    return checksum_of(what).removeprefix("blake3:")[:32]


def _is_settled(stamp: list[Any], begun: int) -> bool:
    """Whether a later change would show: always where the stamp is that of the content, and not of a file's times."""
    return isinstance(stamp[-1], str) or max(stamp[2:]) + SETTLED < begun


def _read(folder: Path, key: str) -> Notes:
    """The notes of one folder of text; none where a byte of them or of their tables is damaged."""
    try:
        checksum, text = (folder / f"{key}.json").read_text(encoding="utf-8").split("\n", 1)
        table = json.loads(text)
        if checksum != checksum_of(table) or any(
            file_checksum(folder / name) != of for name, of in table["tables"].items()
        ):
            return {}
        files = {name: folder / name for name in table["tables"]}
        return {
            place: (stamp, Found(Rows(files[name], first, count), can_seek, size, Counts(**counts), bad))
            for place, stamp, name, first, count, can_seek, size, counts, bad in table["notes"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # none yet, or damaged ones


def _write(tables: Tables, folder: Path, key: str, notes: Notes) -> None:
    with suppress(OSError):  # without them, the text is read again the next time
        notes = _joined(notes, tables.new(key, stays=True))
        several = [
            [
                place,
                stamp,
                one.rows.file.name,
                one.rows.first,
                one.rows.count,
                one.can_seek,
                one.size,
                asdict(one.counts),
                one.bad,
            ]
            for place, (stamp, one) in notes.items()
        ]
        used = {found.rows.file for _, found in notes.values()}
        table = {"tables": {file.name: _checksum(file) for file in sorted(used)}, "notes": several}
        write_atomic(folder / f"{key}.json", f"{checksum_of(table)}\n{json.dumps(table)}")
        left = [f"{key}-*", f"{PASSING}*", "*.npz"]  # the last of an older version
        for file in (file for pattern in left for file in folder.glob(pattern)):
            if file not in used and file.stat().st_mtime < time.time() - LEFT_BEHIND:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


@lru_cache(maxsize=2**16)  # a table is written once, and notes of it again and again
def _checksum(table: Path) -> str:
    return file_checksum(table)


def _joined(notes: Notes, file: Path) -> Notes:
    """The same notes, where small tables are many with all of them in one."""
    rows: Counter[Path] = Counter()
    for _, found in notes.values():
        rows[found.rows.file] += found.rows.count
    small = {path for path, count in rows.items() if count < SMALL}
    if len(small) <= SEVERAL:
        return notes
    joined: Notes = {}
    with file.open("wb") as table:
        for place, (stamp, found) in notes.items():
            if found.rows.file not in small:
                joined[place] = stamp, found
                continue
            first = table.tell() // found.rows.layout.itemsize
            for block in found.rows.blocks():
                table.write(block.tobytes())
            joined[place] = stamp, replace(found, rows=Rows(file, first, found.rows.count))
    return joined
