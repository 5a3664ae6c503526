"""The text in parts, which are found without reading it: a file, a run of small files, or a range of a large one.

What reading a part has found, the names of its units and what was left out, is remembered by the places, sizes and times of its files,
so that unchanged text is not read again.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from xxhash import xxh3_64_intdigest

from infini_llama.configs.errors import DataError, no_space
from infini_llama.tasks.preprocess.sources.formats import Span
from infini_llama.tasks.preprocess.sources.patterns import portable
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.texts import Fault, Unreadable
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.artifacts import Damaged, checksum_of
from infini_llama.tasks.storage.record_file import read_record, write_record

UNIT_BYTES = 32 * 2**20  # of text at most in a unit, unless a single document is longer; of a file in a range of it
RUN_BYTES = 4 * 2**20  # of small files in a run of them, on average
PER_FILE = 2**11  # bytes that a file adds to a run beside its text, for its opening
PER_DOCUMENT = 2**6  # bytes that a document adds to a unit beside its text, for its place in memory
PARTS_VERSION = 1
NAMED = 10  # bad places that the report names
SETTLED = 2 * 10**9  # nanoseconds after which a change of a file shows in its times
Stamp = tuple[Any, ...]  # what stays the same while a file does; see Source.stamp
DOCUMENT = np.dtype([("hash", "u1", 16), ("bytes", "<i4")])  # of one document: xxh3_128 of its UTF-8


@dataclass(frozen=True, eq=False)
class Part:
    """Text that one worker reads at once.

    Attributes:
        span: of the only file, the range to read; None: all of it.
        held_out: share of its documents that are validation text: 0 of training files, 1 of validation files.
        size: bytes to read, as far as they are known.
        stamps: of each file when it was listed, what stays the same while its text does; None where nothing is known.
    """

    files: Sequence[Source]
    span: Span | None
    held_out: float
    size: int
    stamps: tuple[Stamp | None, ...]

    def __str__(self) -> str:
        more = f" to {self.files[-1]}" if len(self.files) > 1 else ""
        return f"{self.files[0]}{more}"


class UnitText(Record):
    """The text of a unit: `name` is a hash of its documents, in order, and of the share that is held out; `bytes`: in UTF-8."""

    name: str
    documents: int
    bytes: int


class PartText(Record):
    """What was read of a part: its units in order, and how many records are no documents.

    Attributes:
        bad: the first damaged places, in words.
        is_readable: False where the file is damaged and skipped, so that nothing of it is used.
    """

    units: tuple[UnitText, ...]
    records: int
    empty: int
    too_short: int
    bad_records: int
    bad_files: int
    bad: tuple[str, ...]
    is_readable: bool


@dataclass(frozen=True)
class Filters:
    """Which records are documents: `skip_bad` leaves out damaged ones, and min_length is in characters."""

    min_length: int
    skip_bad: bool


@dataclass(frozen=True)
class Documents:
    """The documents of one unit, in UTF-8, and how many of them are from each file, in order."""

    texts: list[bytes]
    files: list[tuple[Source, int]]

    def name(self, held_out: float) -> str:
        """32 hexadecimal digits for the texts and the share of them that is held out."""
        lengths = np.fromiter(map(len, self.texts), np.int64, len(self.texts))
        digest = blake3(np.float64(held_out).tobytes() + lengths.tobytes())
        digest.update(b"".join(self.texts))
        return digest.hexdigest(16)

    def source(self, number: int) -> Source:
        """The file of document `number`."""
        for source, count in self.files:
            if number < count:
                return source
            number -= count
        raise IndexError(number)


def parts_of(sources: Iterable[Source], held_out: float) -> list[Part]:
    """The parts of these files, in the order of their names.

    A run of small files ends where a hash of a file's name says so, so that a file more or less changes one run.
    """
    parts: list[Part] = []
    run: list[tuple[Source, int]] = []

    def end_run() -> None:
        if run:
            parts.append(_part([source for source, _ in run], None, held_out, sum(size for _, size in run)))
            run.clear()

    for source in sorted(sources, key=lambda source: source.name):
        size = source.size()
        if size + PER_FILE >= RUN_BYTES or source.dataset or source.made:
            end_run()
            spans = _spans(source)
            for span in spans or (None,):
                parts.append(_part([source], span, held_out, size // len(spans) if spans else size))
            continue
        if sum(own + PER_FILE for _, own in run) + size > UNIT_BYTES:
            end_run()
        run.append((source, size))
        if xxh3_64_intdigest(source.name.encode()) < (size + PER_FILE) / RUN_BYTES * 2**64:
            end_run()
    end_run()
    return parts


def _spans(source: Source) -> list[Span] | None:
    try:
        return source.spans(UNIT_BYTES)
    except (Unreadable, OSError):
        return None  # its reading says what is wrong


def _part(files: list[Source], span: Span | None, held_out: float, size: int) -> Part:
    stamps = (source.stamp() for source in files)
    return Part(files, span, held_out, size, tuple(None if stamp is None else tuple(stamp) for stamp in stamps))


class PartReader:
    """Reads one part: documents of whole files wait until their unit is full; what is damaged, empty or too short is counted."""

    def __init__(self, part: Part, filters: Filters) -> None:
        self.part, self.filters = part, filters
        self.found: list[UnitText] = []
        self.waiting, self.files, self.size = list[bytes](), list[tuple[Source, int]](), 0
        self.records = self.empty = self.too_short = self.bad_records = self.bad_files = 0
        self.bad: list[str] = []

    def units(self) -> Iterator[tuple[str, Documents]]:
        """The units of the part in order, each with its name. A unit ends at a document's end.

        A file that turns out to be damaged half way contributes nothing to `text`, though units of it may have been yielded.

        Raises:
            DataError: something is damaged and is not to be skipped, or a file is not what it was when it was listed.
        """
        for source, stamp in zip(self.part.files, self.part.stamps, strict=True):
            yield from self._file(source, stamp)
        yield from self._end()

    def text(self) -> PartText:
        """What was read, once all units were."""
        return PartText(
            units=tuple(self.found),
            records=self.records,
            empty=self.empty,
            too_short=self.too_short,
            bad_records=self.bad_records,
            bad_files=self.bad_files,
            bad=tuple(self.bad[:NAMED]),
            is_readable=self.bad_files < len(self.part.files),
        )

    def _file(self, source: Source, stamp: Stamp | None) -> Iterator[tuple[str, Documents]]:
        before = self.records, self.empty, self.too_short, self.bad_records, len(self.bad)
        texts, size, first = list[bytes](), 0, None  # first: number of its first unit, where it has units of its own
        try:
            for batch in source.batches(self.part.span):
                several = self._documents(batch, source)
                together = sum(map(len, several)) + len(several) * PER_DOCUMENT
                if size + together <= UNIT_BYTES:
                    texts += several
                    size += together
                    continue
                for text in several:
                    size += len(text) + PER_DOCUMENT
                    if size > UNIT_BYTES and texts:
                        if first is None:
                            yield from self._end()
                            first = len(self.found)
                        yield self._unit(texts, [(source, len(texts))])
                        texts, size = [], len(text) + PER_DOCUMENT
                    texts.append(text)
        except (Unreadable, OSError) as error:
            if no_space(error):
                raise
            reason = f"{source} {error if isinstance(error, Unreadable) else f'cannot be read ({error.strerror})'}"
            if not self.filters.skip_bad:
                verb = "convert" if "UTF-8" in reason and not isinstance(error, OSError) else "repair"
                raise DataError(f"{reason}; {verb} it, or remove it from {source.key}.") from None
            self.records, self.empty, self.too_short, self.bad_records, named = before
            if first is not None:
                del self.found[first:]
            self.bad[named:] = [reason]
            self.bad_files += 1
            return
        _refuse_changed(source, stamp)
        if self.size + size > UNIT_BYTES:
            yield from self._end()
        self.waiting += texts
        self.files.append((source, len(texts)))
        self.size += size

    def _end(self) -> Iterator[tuple[str, Documents]]:
        """The unit of the documents that wait, if any do."""
        texts, files = self.waiting, self.files
        self.waiting, self.files, self.size = [], [], 0
        if texts:
            yield self._unit(texts, files)

    def _unit(self, texts: list[bytes], files: list[tuple[Source, int]]) -> tuple[str, Documents]:
        documents = Documents(texts, files)
        name = documents.name(self.part.held_out)
        self.found.append(UnitText(name=name, documents=len(texts), bytes=sum(map(len, texts))))
        return name, documents

    def _documents(self, batch: Sequence[str | Fault], source: Source) -> list[bytes]:
        """The records that are documents, in UTF-8; the others are counted."""
        self.records += len(batch)
        shortest = max(1, self.filters.min_length)
        if set(map(type, batch)) == {str} and min(map(len, batch)) >= shortest:  # type: ignore[arg-type]
            return [text.encode() for text in batch]  # type: ignore[union-attr]
        texts = list[bytes]()
        for record in batch:
            if isinstance(record, Fault):
                if not self.filters.skip_bad:
                    raise Unreadable(record.reason)
                self.bad_records += 1
                self.bad.append(f"{source} {record.reason}")
                del self.bad[NAMED:]
            elif not record:
                self.empty += 1
            elif len(record) < shortest:
                self.too_short += 1
            else:
                texts.append(record.encode())
        return texts


def _refuse_changed(source: Source, stamp: Stamp | None) -> None:
    now = source.stamp()
    if stamp is not None and (now is None or tuple(now[:2]) != stamp[:2]):
        raise DataError(
            f"{source} changed or was removed while it was being prepared; run the same command again. Where several machines "
            f"prepare it, all must see the same text at the same paths ({source.key})."
        )


class KnownParts:
    """What reading parts has found before, in a folder of small files; what is damaged or missing is read again."""

    def __init__(self, folder: Path, filters: Filters) -> None:
        self.folder, self.filters = folder, filters
        self.begun = time.time_ns()

    def get(self, part: Part) -> PartText | None:
        file = self._file(part)
        if file is None or not file.exists():
            return None
        try:
            text = read_record(PartText, file)
            os.utime(file)  # `gc` deletes what is not used
            return text
        except (Damaged, OSError):
            return None

    def remember(self, part: Part, text: PartText) -> None:
        """Remembers it, if a later change of the files would show."""
        file = self._file(part)
        if file is not None and all(map(self._is_settled, part.files, part.stamps)):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_record(file, text)

    def _is_settled(self, source: Source, stamp: Stamp | None) -> bool:
        """Whether the stamp is not of a file's times, or these are past."""
        if stamp is None or not source.has_times:
            return stamp is not None
        _, modified, _, changed = stamp
        return max(modified, changed) + SETTLED < self.begun

    def _file(self, part: Part) -> Path | None:
        if any(stamp is None for stamp in part.stamps):
            return None
        files = [
            [place_of(source), source.text_column, source.format, stamp]
            for source, stamp in zip(part.files, part.stamps, strict=True)
        ]
        what = [
            PARTS_VERSION,
            UNIT_BYTES,
            self.filters.min_length,
            self.filters.skip_bad,
            part.held_out,
            part.span,
            files,
        ]
        return self.folder / f"{checksum_of(what).removeprefix('blake3:')[:32]}.json"


def place_of(source: Source) -> str:
    """Where a file is, as text, which the name of a file need not be."""
    if split := source.dataset:
        return f"hub://{split.path}/{split.configuration}/{split.split}"
    if not isinstance(source.path, Path):
        return source.path.url
    return portable(str(source.path if source.path.is_absolute() else source.path.absolute()))
