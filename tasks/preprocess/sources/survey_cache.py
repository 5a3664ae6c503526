"""What was found in text that has not changed since, so that a command again reads none of it; files are scanned by several processes."""

import atexit
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from infini_llama.tasks.preprocess.sources.remote import is_remote
from infini_llama.tasks.preprocess.sources.sources import Source, portable
from infini_llama.tasks.preprocess.sources.tables import ROW, Rows
from infini_llama.tasks.preprocess.workers import POLL, result_of, worker_processes
from infini_llama.tasks.storage.artifacts import checksum_of, file_checksum, write_atomic

SURVEYS_VERSION = 4  # tables on disk
SETTLED = 2 * 10**9  # nanoseconds: a file that changed less long ago may change again without a new time
SEVERAL = 16  # tables of one folder of text; more are joined
LEFT_BEHIND = 7 * 86_400.0  # seconds after which what a killed or other process has left is deleted
WORTH_WORKERS = 64 * 2**20  # bytes of text: less is scanned by this process
PASSING = ".passing-"
BATCHES_EACH = 8  # of files, for each worker


@dataclass(frozen=True)
class Counts:
    """Records of one file, and how many of them are no document, by reason."""

    records: int = 0
    empty: int = 0
    too_short: int = 0
    bad_records: int = 0


@dataclass(frozen=True)
class Found:
    """The documents of one file: rows of a table and their bytes of text; what was left out is counted."""

    rows: Rows
    can_seek: bool  # whether `place` finds a record again
    size: int
    counts: Counts
    bad: list[str] = field(default_factory=list)
    is_readable: bool = True


class Tables:
    """Where tables of documents are: those of text that can be recognized stay in `notes`, others are deleted with the process."""

    def __init__(self, notes: Path | None) -> None:
        self.notes = notes

    @cached_property
    def _passing(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=PASSING, dir=self.notes))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def new(self, key: str, stays: bool) -> Path:
        """A file for a table; `key`: of the notes that it belongs to."""
        if self.notes:
            self.notes.mkdir(parents=True, exist_ok=True)
        folder = self.notes if self.notes and stays else self._passing
        return folder / f"{key}-{uuid4().hex}.rows"


Notes = dict[str, tuple[list[Any], Found]]  # by the file's absolute path or URL: its stamp, and what it holds
Scan = Callable[[Source, IO[bytes]], Found]


def cached_scans(
    sources: list[Source], settings: Mapping[str, object], tables: Tables, scan: Scan, workers: int
) -> list[Found]:
    """`scan` of each source, or what it gave the last time for one with the same place and stamp.

    Args:
        settings: what else decides what a scan finds.
        workers: processes that scan.
    """
    keys = {group: _key(settings, *group) for group in set(map(_group, sources))}
    notes = {key: _read(tables.notes, key) if tables.notes else {} for key in keys.values()}
    found: dict[int, Found] = {}
    stale: list[tuple[int, Source, str, list[Any] | None]] = []
    begun = time.time_ns()
    for number, source in enumerate(sources):
        key, stamp = keys[_group(source)], source.stamp()
        note = notes[key].get(_place(source))
        if note and note[0] == stamp:
            found[number] = note[1]
        else:
            stale.append((number, source, key, stamp))
    fresh: dict[str, Notes] = defaultdict(dict)
    scanned = _scanned([(source, key, stamp is not None) for _, source, key, stamp in stale], tables, scan, workers)
    for (number, source, key, stamp), one in zip(stale, scanned, strict=True):
        found[number] = one
        if one.is_readable and stamp and _is_settled(stamp, begun) and source.stamp() == stamp:
            fresh[key][_place(source)] = stamp, one
    if tables.notes:
        for key, new in fresh.items():
            unchanged = {place: note for place, note in notes[key].items() if is_remote(place) or Path(place).exists()}
            _write(tables.notes, key, unchanged | new)
    return [found[number] for number in range(len(sources))]


def _scanned(stale: list[tuple[Source, str, bool]], tables: Tables, scan: Scan, workers: int) -> list[Found]:
    """The scans in order, in batches of which each writes one table."""
    batches: list[tuple[list[Source], Path]] = []
    total = sum(source.size() for source, _, _ in stale)
    alone = workers < 2 or len(stale) < 2 or total < WORTH_WORKERS
    most = total if alone else total // (BATCHES_EACH * workers)
    for (key, stays), several in groupby(stale, key=lambda one: one[1:]):
        batch, size = [], 0
        for source, _, _ in several:
            batch.append(source)
            size += source.size()
            if size > most:
                batches.append((batch, tables.new(key, stays)))
                batch, size = [], 0
        if batch:
            batches.append((batch, tables.new(key, stays)))
    if alone:
        return [one for batch in batches for one in _scan_batch(scan, *batch)]
    with worker_processes(min(workers, len(batches))) as pool:
        futures = [pool.submit(_scan_batch, scan, *batch) for batch in batches]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=POLL)
            for future in done:
                result_of(future)
        return [one for future in futures for one in future.result()]


def _scan_batch(scan: Scan, sources: list[Source], file: Path) -> list[Found]:
    with file.open("wb") as table:
        return [scan(source, table) for source in sources]


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


def _read(folder: Path, key: str) -> Notes:
    """The notes of one folder of text; none where a byte of them or of their tables is damaged."""
    try:
        checksum, text = (folder / f"{key}.json").read_text(encoding="utf-8").split("\n", 1)
        table = json.loads(text)
        if checksum != checksum_of(table) or any(
            file_checksum(folder / name) != of for name, of in table["tables"].items()
        ):
            return {}
        return {
            place: (stamp, Found(Rows(folder / name, first, count), can_seek, size, Counts(**counts), bad))
            for place, stamp, name, first, count, can_seek, size, counts, bad in table["notes"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # none yet, or damaged ones


def _write(folder: Path, key: str, notes: Notes) -> None:
    with suppress(OSError):  # without them, the text is read again the next time
        if len({found.rows.file for _, found in notes.values()}) > SEVERAL:
            notes = _in_one_table(notes, folder / f"{key}-{uuid4().hex}.rows")
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
        table = {"tables": {file.name: file_checksum(file) for file in sorted(used)}, "notes": several}
        write_atomic(folder / f"{key}.json", f"{checksum_of(table)}\n{json.dumps(table)}")
        left = [f"{key}-*.rows", f"{PASSING}*", "*.npz"]  # the last of an older version
        for file in (file for pattern in left for file in folder.glob(pattern)):
            if file not in used and file.stat().st_mtime < time.time() - LEFT_BEHIND:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def _in_one_table(notes: Notes, file: Path) -> Notes:
    joined: Notes = {}
    with file.open("wb") as table:
        for place, (stamp, found) in notes.items():
            rows = Rows(file, table.tell() // ROW.itemsize, found.rows.count)
            for block in found.rows.blocks():
                table.write(block.tobytes())
            joined[place] = stamp, replace(found, rows=rows)
    return joined
