"""The text in parts: a file, a run of small files, or a range of a large one.

Parts are found without reading the text. What reading a part has found, the names of its units and
what was left out, is remembered by the places and stamps of its files, so that unchanged text
is not read again.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
from blake3 import blake3
from xxhash import xxh3_64_intdigest

from infini_llama.configs.errors import DataError, no_space
from infini_llama.tasks.batches import batches
from infini_llama.tasks.preprocess.sources.source import TextInput
from infini_llama.tasks.preprocess.sources.texts import Fault, Span, Stamp, Unreadable
from infini_llama.tasks.preprocess.tokens.targets import AnswerTargets, ByteSpan
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.artifacts import Damaged, key_of
from infini_llama.tasks.storage.files import mark_used
from infini_llama.tasks.storage.record_files import read_record, write_record

# Most bytes of text in a unit, unless a single document is longer. A large file is read in ranges
# of this size.
UNIT_BYTES = 32 * 2**20
RUN_BYTES = 4 * 2**20  # of small files in a run of them, on average
PER_FILE = 2**11  # bytes that a file adds to a run beside its text, for its opening
# Bytes that a document adds to a unit beside its text, for its place in memory.
PER_DOCUMENT = 2**6
# Of the reports in units/parts: a part whose report has another version is read again.
PARTS_VERSION = 2
NAMED = 10  # bad places that the report names
SETTLED = 2 * 10**9  # nanoseconds after which a change of a file shows in its times
# Of one document: xxh3_128 of its UTF-8, and its size.
DOCUMENT = np.dtype([("hash", "u1", 16), ("bytes", "<i4")])


@dataclass(frozen=True, eq=False)
class Part:
    """Text that one worker reads at once.

    Attributes:
        span: of the only file, the range to read; None: all of it.
        held_out_share: share of its documents that are validation text: 1 of validation files; of
            training files data.validation_fraction, or 0 where validation files are named.
        size: bytes to read, as far as they are known.
        stamps: of each file when it was listed, what changes with its text; None where
            nothing is known.
        targets: the rule of which bytes of its documents count in the loss; None: all.
    """

    files: Sequence[TextInput]
    span: Span | None
    held_out_share: float
    size: int
    stamps: tuple[Stamp | None, ...]
    targets: AnswerTargets | None = None

    def __str__(self) -> str:
        more = f" to {self.files[-1]}" if len(self.files) > 1 else ""
        return f"{self.files[0]}{more}"


class UnitReport(Record):
    """A unit that was read: `name` is that of its `Documents`.

    Attributes:
        files: numbers of its files within the part, in order, each with how many documents are from
            it.
    """

    name: str
    files: tuple[tuple[int, int], ...]


class PartReport(Record):
    """The result of reading a part: its units in order, and how many records are no documents.

    Attributes:
        unreachable: damaged files that could not be opened or read, and may be at another time;
            also files that generated texts take their filler from.
        bad: the first damaged places, in words.
        is_readable: False where all of its files are damaged and skipped, so that nothing of the
            part is used.
    """

    units: tuple[UnitReport, ...]
    records: int
    empty: int
    too_short: int
    bad_records: int
    bad_files: int
    unreachable: int = 0
    bad: tuple[str, ...]
    is_readable: bool


@dataclass(frozen=True)
class Filters:
    """The conditions for a record to be a document.

    Attributes:
        min_length: in characters.
        skip_bad: damaged records are left out.
    """

    min_length: int
    skip_bad: bool


@dataclass(frozen=True)
class Documents:
    """The documents of one unit.

    Attributes:
        texts: in UTF-8.
        files: how many of them are from each file, in order.
        held_out_share: share of them that is validation text; see `held_out.is_held_out`.
        spans: bytes of each one that count in the loss; None: all.
    """

    texts: list[bytes]
    files: list[tuple[TextInput, int]]
    held_out_share: float
    spans: Sequence[Sequence[ByteSpan]] | None = None

    @cached_property
    def name(self) -> str:
        """Name of the unit.

        32 hexadecimal digits for the texts, the share of them that is held out, and the bytes of
        them that count.
        """
        lengths = np.fromiter(map(len, self.texts), np.int64, len(self.texts))
        digest = blake3()
        if self.spans is not None:
            digest = blake3(key=_digest_of(self.spans))
        digest.update(np.float64(self.held_out_share).tobytes() + lengths.tobytes())
        for batch in batches(self.texts, len):
            digest.update(b"".join(batch))
        return digest.hexdigest(16)

    def file_of(self, number: int) -> TextInput:
        """The file of document `number`."""
        return next(islice(_file_of_each(self.files), number, None))


def _file_of_each(files: Iterable[tuple[TextInput, int]]) -> Iterator[TextInput]:
    """The file of each document, of files with so many each."""
    return chain.from_iterable(repeat(file, count) for file, count in files)


def _digest_of(spans: Sequence[Sequence[ByteSpan]]) -> bytes:
    """A digest of the spans of several documents, 32 bytes."""
    counts = [len(of_document) for of_document in spans]
    bounds = [bound for of_document in spans for span in of_document for bound in span]
    numbers = np.array([len(counts), *counts, *bounds], np.int64)
    return blake3(numbers.tobytes()).digest()


def parts_of(
    files: Iterable[TextInput],
    held_out_share: float,
    targets: AnswerTargets | None = None,
) -> list[Part]:
    """The parts of these files, in the order of their names.

    A hash of a file's name decides whether a run of small files ends with it, so that an added or
    removed file changes one run only.
    """
    parts: list[Part] = []
    run = list[TextInput]()
    run_bytes = 0

    def end_run() -> None:
        nonlocal run, run_bytes
        if run:
            add(run, None, run_bytes)
            run = []
            run_bytes = 0

    def add(files: list[TextInput], span: Span | None, size: int) -> None:
        stamps = tuple(file.stamp() for file in files)
        parts.append(Part(files, span, held_out_share, size, stamps, targets))

    for file in sorted(files, key=lambda file: file.name):
        size = file.size()
        if size + PER_FILE >= RUN_BYTES or file.has_own_part:
            end_run()
            spans = _spans(file)
            for span in spans or (None,):
                add([file], span, size // len(spans) if spans else size)
            continue
        if run_bytes + len(run) * PER_FILE + size > UNIT_BYTES:
            end_run()
        run.append(file)
        run_bytes += size
        if (
            xxh3_64_intdigest(file.name.encode())
            < (size + PER_FILE) / RUN_BYTES * 2**64
        ):
            end_run()
    end_run()
    return parts


def _spans(file: TextInput) -> list[Span] | None:
    try:
        return file.spans(UNIT_BYTES)
    except (Unreadable, OSError):
        return None  # its reading raises a clear error


class Abandoned(Exception):
    """The work is not needed any more: another part of it failed, or a stop was requested."""


def never() -> bool:
    """The `should_stop` of work that is never interrupted."""
    return False


class PartReader:
    """A reader of one part.

    Documents of whole files wait until their unit is full. What is damaged, empty or too short is
    counted.

    Args:
        should_stop: called between batches of text.

    Attributes:
        waiting, files, size: the documents that wait for their unit, how many of them are from each
            file, and their size in bytes.
    """

    def __init__(
        self,
        part: Part,
        filters: Filters,
        should_stop: Callable[[], bool] = never,
    ) -> None:
        self.part = part
        self.filters = filters
        self.should_stop = should_stop
        self.numbers = {file: number for number, file in enumerate(part.files)}
        self.reports: list[UnitReport] = []
        self.waiting = list[bytes]()
        self.files = list[tuple[TextInput, int]]()
        self.size = 0
        self.records = 0
        self.empty = 0
        self.too_short = 0
        self.bad_records = 0
        self.bad_files = 0
        self.unreachable = 0
        self.bad: list[str] = []

    def units(self) -> Iterator[Documents]:
        """The units of the part in order. A unit ends at a document's end.

        A file that turns out to be damaged half way contributes nothing to `report`, though units
        of it may have been yielded.

        Raises:
            DataError: something is damaged and is not to be skipped, or a file is not what it was
                when it was listed.
            Abandoned: `should_stop`.
        """
        for file, stamp in zip(self.part.files, self.part.stamps, strict=True):
            yield from self._read_file(file, stamp)
        yield from self._end()

    def report(self) -> PartReport:
        """The result, once all units were read."""
        return PartReport(
            units=tuple(self.reports),
            records=self.records,
            empty=self.empty,
            too_short=self.too_short,
            bad_records=self.bad_records,
            bad_files=self.bad_files,
            unreachable=self.unreachable,
            bad=tuple(self.bad[:NAMED]),
            is_readable=self.bad_files < len(self.part.files),
        )

    def _read_file(self, file: TextInput, stamp: Stamp | None) -> Iterator[Documents]:
        """The units that become full with this file, of whose documents the last ones wait."""
        before = (
            self.records,
            self.empty,
            self.too_short,
            self.bad_records,
            len(self.bad),
        )
        texts = list[bytes]()
        size = 0
        first: int | None = None  # number of its first unit, if it has units of its own
        try:
            for batch in file.batches(self.part.span):
                if self.should_stop():
                    raise Abandoned
                documents = self._documents(batch, file)
                together = sum(map(len, documents)) + len(documents) * PER_DOCUMENT
                if size + together <= UNIT_BYTES:
                    texts += documents
                    size += together
                    continue
                for text in documents:
                    size += len(text) + PER_DOCUMENT
                    if size > UNIT_BYTES and texts:
                        if first is None:
                            yield from self._end()
                            first = len(self.reports)
                        yield self._unit(texts, [(file, len(texts))])
                        texts = []
                        size = len(text) + PER_DOCUMENT
                    texts.append(text)
        except (Unreadable, OSError) as error:
            if no_space(error):
                raise
            self.records, self.empty, self.too_short, self.bad_records, named = before
            if first is not None:
                del self.reports[first:]
            del self.bad[named:]
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"cannot be read ({error.strerror})"
                self.unreachable += 1
            self._skip(file, reason)
            self.bad_files += 1
            return
        _refuse_changed_text(file, stamp)
        if self.size + size > UNIT_BYTES:
            yield from self._end()
        self.waiting += texts
        self.files.append((file, len(texts)))
        self.size += size

    def _end(self) -> Iterator[Documents]:
        """The unit of the documents that wait, if any do."""
        if self.waiting:
            yield self._unit(self.waiting, self.files)
        self.waiting = []
        self.files = []
        self.size = 0

    def _unit(
        self, texts: list[bytes], files: list[tuple[TextInput, int]]
    ) -> Documents:
        documents = Documents(
            texts, files, self.part.held_out_share, self._spans(texts, files)
        )
        counts = tuple((self.numbers[file], count) for file, count in files)
        self.reports.append(UnitReport(name=documents.name, files=counts))
        return documents

    def _spans(
        self,
        texts: list[bytes],
        files: list[tuple[TextInput, int]],
    ) -> list[tuple[ByteSpan, ...]] | None:
        """The bytes of these texts that count, which are from these files; None: all."""
        rule = self.part.targets
        if rule is None:
            return None
        of_texts = _file_of_each(files)
        return [
            rule.spans(text, file) for text, file in zip(texts, of_texts, strict=True)
        ]

    def _documents(self, batch: Sequence[str | Fault], file: TextInput) -> list[bytes]:
        """The records that are documents, in UTF-8; the others are counted."""
        self.records += len(batch)
        shortest = max(1, self.filters.min_length)
        are_texts = set(map(type, batch)) == {str}
        if are_texts and min(map(len, batch)) >= shortest:  # type: ignore[arg-type]
            return [text.encode() for text in batch]  # type: ignore[union-attr]
        texts = list[bytes]()
        for record in batch:
            if isinstance(record, Fault):
                self._skip(file, record.reason)
                self.bad_records += 1
                if record.is_unreachable:
                    self.unreachable += 1
            elif not record:
                self.empty += 1
            elif len(record) < shortest:
                self.too_short += 1
            else:
                texts.append(record.encode())
        return texts

    def _skip(self, file: TextInput, reason: str) -> None:
        """Name a damaged record, or a file that is damaged as a whole, which is left out.

        Args:
            reason: completes '<file> …'.

        Raises:
            DataError: data.on_bad_input says that nothing is.
        """
        if not self.filters.skip_bad:
            verb = "convert" if "UTF-8" in reason else "repair"
            raise DataError(
                f"{file} {reason}; {verb} it, or remove it from {file.key}."
            ) from None
        self.bad.append(f"{file} {reason}")
        del self.bad[NAMED:]


def without_damaged_files(reports: Mapping[Part, PartReport]) -> dict[Part, PartReport]:
    """The reports, of which those on ranges of a damaged file have no text.

    A range does not know of the others, which are read by other workers. A file that is read as a
    whole is left out by `PartReader`.
    """
    ranges = {part: report for part, report in reports.items() if part.span is not None}
    # Of each damaged file, the first damaged range stands for it.
    damaged = {
        part.files[0]: part
        for part, report in reversed(ranges.items())
        if not report.is_readable
    }
    left_out = {
        part: PartReport(
            units=(),
            records=0,
            empty=0,
            too_short=0,
            bad_records=0,
            bad_files=int(damaged[part.files[0]] is part),
            bad=() if report.is_readable else report.bad,
            is_readable=False,
        )
        for part, report in ranges.items()
        if part.files[0] in damaged
    }
    return {**reports, **left_out}


def _refuse_changed_text(file: TextInput, stamp: Stamp | None) -> None:
    if stamp is not None and file.has_changed(stamp):
        raise DataError(
            f"{file} changed or was removed while it was being prepared; "
            "run the same command again. Where several machines prepare it, "
            f"all must see the same text at the same paths ({file.key})."
        )


class PartReports:
    """Reports of parts that were read before, in a folder of small files.

    What is damaged or missing is read again.
    """

    def __init__(self, folder: Path, filters: Filters) -> None:
        self.folder = folder
        self.filters = filters
        self.begun = time.time_ns()

    def get(self, part: Part) -> PartReport | None:
        """The report of a part; None: there is none that can be read."""
        record = self._record(part)
        if record is None or not record.exists():
            return None
        try:
            report = read_record(PartReport, record)
            mark_used(record)
            return report
        except (Damaged, OSError):
            return None

    def remember(self, part: Part, report: PartReport) -> None:
        """Remember a report, if a later change of the files would show in their times."""
        record = self._record(part)
        if record is not None and all(map(self._is_settled, part.files, part.stamps)):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_record(record, report)

    def _is_settled(self, file: TextInput, stamp: Stamp | None) -> bool:
        """Whether a later change of the file would change its stamp.

        It would if its times are old enough, or no part of the stamp.
        """
        return stamp is not None and file.last_change(stamp) + SETTLED < self.begun

    def _record(self, part: Part) -> Path | None:
        if any(stamp is None for stamp in part.stamps):
            return None
        files = [
            [file.place, file.text_column, file.reader_key(), stamp]
            for file, stamp in zip(part.files, part.stamps, strict=True)
        ]
        what = [
            PARTS_VERSION,
            UNIT_BYTES,
            self.filters.min_length,
            self.filters.skip_bad,
            part.held_out_share,
            repr(part.targets),
            part.span,
            files,
        ]
        return self.folder / f"{key_of(what)[:32]}.json"
