"""The documents of a corpus: counted, hashed, filtered and split before any of them is tokenized."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.sources.sources import Source, origins, sources
from infini_llama.tasks.preprocess.sources.survey_cache import Counts, Found, cached_scans
from infini_llama.tasks.preprocess.sources.texts import Fault, Records, Unreadable
from infini_llama.tasks.records.manifest import LeftOut

log = logging.getLogger("infini_llama.preprocess")
NAMED = 10  # bad places that the report names


@dataclass(frozen=True, eq=False)
class Documents:
    """What is kept of one source, in order: 56 bytes a document, whatever its length."""

    source: Source
    numbers: np.ndarray  # int64 [documents]: place among all records of the source
    sizes: np.ndarray  # int64 [documents]: UTF-8 bytes
    hashes: np.ndarray  # uint8 [documents, 32]: blake3 of those bytes
    places: np.ndarray  # int64 [documents]: byte of the file at which each begins; [0] where the file is read in order

    def keep(self, mask: np.ndarray) -> "Documents":
        places = self.places[mask] if len(self.places) else self.places
        return Documents(self.source, self.numbers[mask], self.sizes[mask], self.hashes[mask], places)

    def identity(self) -> list[Any]:
        """[name, bytes, hash], which stand for the text in the key."""
        joined = self.hashes.tobytes()
        return [
            self.source.name,
            int(self.sizes.sum()),
            joined.hex() if len(self.sizes) == 1 else blake3(joined).hexdigest(),
        ]

    def texts(self, first: int = 0) -> Iterator[tuple[str, int]]:
        """The text and the size of each document from the `first` on, read again.

        Raises:
            DataError: the source is not what it was when it was hashed.
        """
        at = first
        try:
            for record in self._records(first):
                if isinstance(record, Fault) or blake3(record.encode()).digest() != self.hashes[at].tobytes():
                    break
                yield record, int(self.sizes[at])
                at += 1
        except (Unreadable, FileNotFoundError):
            pass
        if at < len(self.numbers):
            raise DataError(
                f"{self.source} changed or was removed while it was being prepared; run the same command again."
            )

    def _records(self, first: int) -> Records:
        if len(self.places):
            yield from self.source.records_at(map(int, self.places[first:]))
            return
        wanted = map(int, self.numbers[first:])
        following = next(wanted, None)
        for number, record in enumerate(self.source.records(map(int, self.numbers[first:]))):
            if following is None:
                return
            if number == following:
                yield record
                following = next(wanted, None)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Both splits in the order in which they are tokenized, and what was left out on the way.

    Attributes:
        identity: names, sizes and hashes of the text, as the key of the dataset takes them.
    """

    train: list[Documents]
    validation: list[Documents]
    identity: dict[str, object]
    report: LeftOut


@dataclass
class Tally:
    """What one survey has counted so far; the fields are those of LeftOut. `seen`: 128 bits of each text's hash."""

    records: int = 0
    empty: int = 0
    too_short: int = 0
    duplicates: int = 0
    also_validation: int = 0
    bad_records: int = 0
    bad_files: int = 0
    bad: list[str] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)

    def add(self, found: Found) -> None:
        """Counts the records of one file."""
        self.records += found.counts.records
        self.empty += found.counts.empty
        self.too_short += found.counts.too_short
        self.bad_records += found.counts.bad_records
        self.bad += found.bad[: NAMED - len(self.bad)]

    def report(self, duplicates_dropped: bool) -> LeftOut:
        return LeftOut(
            records=self.records,
            empty=self.empty,
            too_short=self.too_short,
            duplicates=self.duplicates,
            also_validation=self.also_validation,
            bad_records=self.bad_records,
            bad_files=self.bad_files,
            bad=tuple(self.bad),
            duplicates_dropped=duplicates_dropped,
        )


def survey(data: DataConfig, notes: Path | None = None) -> Corpus:
    """Reads everything once: which documents there are, which are kept, and which are held out.

    Args:
        notes: folder that remembers what unchanged files hold, so that they are not read again.

    Raises:
        DataError: no text, or bad input where data.on_bad_input=fail.
    """
    tally = Tally()
    places = {name: sources(origin, name) for name, origin in origins(data).items()}
    own = {name: _scan_all(held_out, data, tally, notes) for name, (_, held_out) in places.items()}
    found = {name: _scan_all(training, data, tally, notes) for name, (training, _) in places.items()}
    found = _without(found, own, tally)
    identities = []
    for name, (_, held_out) in places.items():
        identity: dict[str, object] = {"documents": [documents.identity() for documents in found[name]]}
        if held_out:
            identity |= {"validation_documents": [documents.identity() for documents in own[name]]}
        else:
            masks = [is_validation(documents.hashes, data.validation_fraction) for documents in found[name]]
            own[name] = _some([documents.keep(mask) for documents, mask in zip(found[name], masks, strict=True)])
            found[name] = _some([documents.keep(~mask) for documents, mask in zip(found[name], masks, strict=True)])
        identities.append({"name": name} | identity if name else identity)
    if len(places) > 1:  # a text that one source holds out is not learned from another that holds out its own files
        found = _without(found, own, tally)
    return Corpus(
        train=list(chain.from_iterable(found.values())),
        validation=list(chain.from_iterable(own.values())),
        identity={"sources": identities} if data.sources else identities[0],
        report=tally.report(data.deduplicate),
    )


Several = dict[str, list[Documents]]


def _without(found: Several, held_out: Several, tally: Tally) -> Several:
    """Training documents whose text is not held out by any source."""
    texts = {row.tobytes() for several in held_out.values() for documents in several for row in documents.hashes}
    if not texts:
        return found
    kept = {}
    for name, several in found.items():
        masks = [np.array([row.tobytes() not in texts for row in each.hashes], dtype=bool) for each in several]
        tally.also_validation += int(sum((~mask).sum() for mask in masks))
        kept[name] = _some([documents.keep(mask) for documents, mask in zip(several, masks, strict=True)])
    return kept


def is_validation(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents, uint8 [n, 32], are held out: decided by content alone, so that adding files moves none."""
    leading = np.ascontiguousarray(hashes[:, :8]).view(">u8")[:, 0]
    return leading < np.uint64(math.ceil(fraction * 2**64))


def _scan_all(places: list[Source], data: DataConfig, tally: Tally, notes: Path | None) -> list[Documents]:
    ordered = sorted(places, key=lambda source: source.name)
    settings = {"min_length": data.min_length, "on_bad_input": data.on_bad_input}
    scan = partial(_scan, data=data, tally=tally)
    found_of = cached_scans(ordered, settings, notes, scan) if notes else map(scan, ordered)
    scanned = []
    for source, found in zip(ordered, found_of, strict=True):
        if found is not None:
            tally.add(found)
            scanned.append(Documents(source, found.numbers, found.sizes, found.hashes, found.places))
    # The order of documents is that of names; two files of one name are told apart by what they hold.
    scanned.sort(key=lambda documents: documents.identity()[::2])
    return _some([_distinct(documents, data.deduplicate, tally) for documents in scanned])


def _some(several: list[Documents]) -> list[Documents]:
    return [documents for documents in several if len(documents.sizes)]


def _scan(source: Source, data: DataConfig, tally: Tally) -> Found | None:
    """Counts and hashes; a file that turns out to be damaged half way contributes nothing."""
    numbers: list[int] = []
    places: list[int] = []
    sizes: list[int] = []
    hashes = bytearray()
    records = empty = too_short = bad_records = 0
    bad: list[str] = []
    skip = data.on_bad_input == "skip"
    try:
        for number, record in enumerate(source.records(places=places)):
            records += 1
            if isinstance(record, Fault):
                if not skip:
                    raise Unreadable(record.reason)
                bad_records += 1
                bad += [f"{source} {record.reason}"] * (len(bad) < NAMED)
            elif not record:
                empty += 1
            elif len(record) < data.min_length:
                too_short += 1
            else:
                encoded = record.encode()
                numbers.append(number)
                sizes.append(len(encoded))
                hashes += blake3(encoded).digest()
    except (Unreadable, OSError) as error:
        reason = f"{source} {error if isinstance(error, Unreadable) else f'cannot be read ({error.strerror})'}"
        if not skip:
            verb = "convert" if "UTF-8" in reason and not isinstance(error, OSError) else "repair"
            raise DataError(f"{reason}; {verb} it, or remove it from {source.key}.") from None
        tally.bad_files += 1
        tally.bad += [reason] * (len(tally.bad) < NAMED)
        return None
    columns = np.frombuffer(bytes(hashes), dtype=np.uint8).reshape(-1, 32)
    kept, lines = np.array(numbers, dtype=np.int64), np.array(places, dtype=np.int64)
    found_again = len(lines) > 0 and bool((np.diff(lines) > 0).all())  # not where a long line is several records
    where = lines[kept] if found_again else lines[:0]
    counts = Counts(records, empty, too_short, bad_records)
    return Found(kept, np.array(sizes, dtype=np.int64), columns, where, counts, bad)


def _distinct(documents: Documents, drop: bool, tally: Tally) -> Documents:
    """Counts the documents whose text came before (by 128 bits of its hash), and drops them where `drop`."""
    fresh = np.ones(len(documents.sizes), dtype=bool)
    for number, row in enumerate(documents.hashes):
        if (digest := row[:16].tobytes()) in tally.seen:
            fresh[number] = False
        tally.seen.add(digest)
    tally.duplicates += int((~fresh).sum())
    return documents.keep(fresh) if drop else documents


def log_left_out(report: LeftOut) -> None:
    """Logs which records are left out, and which copies are not."""
    left_out = {
        "empty": report.empty,
        "too short": report.too_short,
        "exact duplicates": report.duplicates if report.duplicates_dropped else 0,
        "also in the validation text": report.also_validation,
        "damaged records": report.bad_records,
        "damaged files": report.bad_files,
    }
    if found := ", ".join(f"{count} {name}" for name, count in left_out.items() if count):
        level = logging.WARNING if report.bad_records or report.bad_files else logging.INFO
        named = f"; {'; '.join(report.bad)}" if report.bad else ""
        log.log(level, "%d records read; skipped: %s%s", report.records, found, named)
    if report.duplicates and not report.duplicates_dropped:
        log.info(
            "%d of %d records are exact duplicates and are kept; data.deduplicate=true skips them",
            report.duplicates,
            report.records,
        )
