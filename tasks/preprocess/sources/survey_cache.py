"""What was found in text that has not changed since, so that a command again reads none of it; files are scanned by several processes."""

import atexit
import json
import os
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Protocol
from uuid import uuid4

import numpy as np

from infini_llama.tasks.preprocess.sources.patterns import portable
from infini_llama.tasks.preprocess.sources.remote import is_remote
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.tables import ROW, Rows
from infini_llama.tasks.preprocess.sources.workers import POLL, result_of, worker_processes
from infini_llama.tasks.storage.artifacts import checksum_of, file_checksum, write_atomic

SURVEYS_VERSION = 5  # tables on disk
SETTLED = 2 * 10**9  # nanoseconds: a file that changed less long ago may change again without a new time
SEVERAL = 16  # small tables of one folder of text; more are joined
SMALL = 2**16  # rows
LEFT_BEHIND = 7 * 86_400.0  # seconds after which what a killed or other process has left is deleted
WORTH_WORKERS = 64 * 2**20  # bytes of text: less is scanned by this process
PASSING = ".passing-"
BATCHES_EACH = 8  # of files, for each worker
LARGEST_BATCH = 2**30  # bytes of text; after each batch, what was found is remembered
NOTED_EVERY = 10.0  # seconds


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


class TextSink(Protocol):
    """Takes the texts of the documents of one table, in order, while they are surveyed."""

    def add(self, texts: list[str], sizes: np.ndarray) -> None:
        """Several documents, and the bytes of their UTF-8."""

    def truncate(self, documents: int) -> None:
        """Forget all documents but the first `documents`: their file is damaged."""

    def close(self) -> None:
        """There are no more."""


OpenSink = Callable[[Path], TextSink]  # for the table in this file; it goes to other processes
SinkFor = Callable[[list[Source]], OpenSink | None]
Scan = Callable[[Source, IO[bytes], TextSink | None], Found]


class Tables:
    """Where tables of documents are: those of text that can be recognized stay in `notes`, others are deleted with the process.

    Args:
        sink_for: the sink, if any, for the texts of these sources, which are about to be read.
    """

    def __init__(self, notes: Path | None, sink_for: SinkFor) -> None:
        self.notes, self.sink_for = notes, sink_for

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


@dataclass(frozen=True)
class Stale:
    """A source that is to be scanned."""

    number: int  # of the source among all
    source: Source
    key: str  # of the notes it belongs to
    stamp: list[Any] | None


def cached_scans(
    sources: list[Source], settings: Mapping[str, object], tables: Tables, scan: Scan, workers: int
) -> list[Found]:
    """`scan` of each source, or what it gave the last time for one with the same place and stamp.

    Args:
        settings: what else decides what a scan finds.
        workers: processes that scan.
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
            stale.append(Stale(number, source, key, stamp))
    fresh: dict[str, Notes] = defaultdict(dict)

    def remember() -> None:
        for key, new in fresh.items() if tables.notes else ():
            unchanged = {place: note for place, note in notes[key].items() if is_remote(place) or _exists(place)}
            notes[key] = unchanged | new
            _write(tables.notes or Path(), key, notes[key])
        fresh.clear()

    for batch, several in _scanned(stale, tables, scan, workers):
        for one, result in zip(batch, several, strict=True):
            found[one.number] = result
            if result.is_readable and one.stamp and _is_settled(one.stamp, begun) and one.source.stamp() == one.stamp:
                fresh[one.key][places[one.number]] = one.stamp, result
        if time.monotonic() - noted > NOTED_EVERY:
            remember()
            noted = time.monotonic()
    remember()
    return [found[number] for number in range(len(sources))]


def _scanned(stale: list[Stale], tables: Tables, scan: Scan, workers: int) -> Iterator[tuple[list[Stale], list[Found]]]:
    """The scans, in batches of which each writes one table; in any order where there are several processes."""
    if not stale:
        return
    sink = tables.sink_for([one.source for one in stale])
    batches: list[tuple[list[Stale], Path]] = []
    total = sum(one.source.size() for one in stale)
    serial = workers < 2 or len(stale) < 2 or total < WORTH_WORKERS
    most = min(LARGEST_BATCH, total if serial else total // (BATCHES_EACH * workers))
    for (key, stays), several in groupby(stale, key=lambda one: (one.key, one.stamp is not None)):
        batch, size = [], 0
        for one in several:
            batch.append(one)
            size += one.source.size()
            if size > most:
                batches.append((batch, tables.new(key, stays)))
                batch, size = [], 0
        if batch:
            batches.append((batch, tables.new(key, stays)))
    if serial:
        yield from ((batch, _scan_batch(scan, [one.source for one in batch], file, sink)) for batch, file in batches)
        return
    with worker_processes(min(workers, len(batches))) as pool:
        pending = {
            pool.submit(_scan_batch, scan, [one.source for one in batch], file, sink): batch for batch, file in batches
        }
        while pending:
            done, _ = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
            for future in done:
                yield pending.pop(future), result_of(future)


def _scan_batch(scan: Scan, sources: list[Source], file: Path, open_sink: OpenSink | None) -> list[Found]:
    sink = open_sink(file) if open_sink else None
    with file.open("wb") as table:
        found = [scan(source, table, sink) for source in sources]
    if sink:
        sink.close()
    return found


def _place(source: Source) -> str:
    if split := source.dataset:
        return f"hub://{split.path}/{split.configuration}/{split.split}"
    if not isinstance(source.path, Path):
        return source.path.url
    return str(source.path if source.path.is_absolute() else source.path.absolute())


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


def _write(folder: Path, key: str, notes: Notes) -> None:
    with suppress(OSError):  # without them, the text is read again the next time
        notes = _joined(notes, folder / f"{key}-{uuid4().hex}.rows")
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
        left = [f"{key}-*.rows", f"{PASSING}*", "*.npz"]  # the last of an older version
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
            first = table.tell() // ROW.itemsize
            for block in found.rows.blocks():
                table.write(block.tobytes())
            joined[place] = stamp, replace(found, rows=Rows(file, first, found.rows.count))
    return joined
