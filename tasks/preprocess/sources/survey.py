"""The documents of a corpus: counted, hashed, filtered and split before any of them is tokenized."""

import logging
import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.sources.documents import Documents, blocks_of, identities_of, select
from infini_llama.tasks.preprocess.sources.near_duplicates import in_words, unlike_earlier
from infini_llama.tasks.preprocess.sources.near_duplicates import version as sketches_version
from infini_llama.tasks.preprocess.sources.scan import NAMED, scan_source
from infini_llama.tasks.preprocess.sources.scanning import Found, SinkFor, Tables, Workers
from infini_llama.tasks.preprocess.sources.sources import Source, origins, sources
from infini_llama.tasks.preprocess.sources.survey_cache import cached_scans
from infini_llama.tasks.preprocess.sources.tables import Condition, by_first
from infini_llama.tasks.records.manifest import LeftOut

log = logging.getLogger("infini_llama.preprocess")
SHOWN = 3  # near-duplicates that the log names


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
    """What one survey has counted so far; the fields are those of LeftOut."""

    records: int = 0
    empty: int = 0
    too_short: int = 0
    duplicates: int = 0
    near_duplicates: int = 0
    near: list[str] = field(default_factory=list)
    also_validation: int = 0
    bad_records: int = 0
    bad_files: int = 0
    bad: list[str] = field(default_factory=list)
    other_files: dict[str, int] = field(default_factory=dict)

    def add(self, found: Found) -> None:
        """Counts the records of one file."""
        self.bad_files += not found.is_readable
        self.records += found.counts.records
        self.empty += found.counts.empty
        self.too_short += found.counts.too_short
        self.bad_records += found.counts.bad_records
        self.bad += found.bad[: NAMED - len(self.bad)]

    def report(self, duplicates_dropped: bool) -> LeftOut:
        return LeftOut(**asdict(self), duplicates_dropped=duplicates_dropped)


def survey(data: DataConfig, notes: Path | None = None, sink_for: SinkFor = lambda sources: None) -> Corpus:
    """Reads everything once: which documents there are, which are kept, and which are held out.

    Args:
        notes: folder that remembers what unchanged files hold, so that they are not read again.
        sink_for: what takes the texts of these sources while they are read.

    Raises:
        DataError: no text, or bad input where data.on_bad_input=fail.
    """
    tally = Tally()
    near = data.near_duplicates
    tables = Tables(notes, sink_for, ".rows" if near is None else ".sketched")
    places = {name: sources(origin, name, tally.other_files) for name, origin in origins(data).items()}
    with ExitStack() as until:
        workers = Workers(data, until)
        own = {name: _scan_all(held_out, tally, tables, workers) for name, (_, held_out) in places.items()}
        found = {name: _scan_all(training, tally, tables, workers) for name, (training, _) in places.items()}
    found = _without(found, own, tally)
    is_distinct = data.deduplicate or near is not None
    if is_distinct:
        own, found = _distinct(own, found, True, tally)
    if near is not None:
        own, found = _unlike(own, found, near, tally)
    identities = []
    for name, (_, held_out) in places.items():
        identity: dict[str, object] = {"documents": identities_of(found[name])}
        if held_out:
            identity |= {"validation_documents": identities_of(own[name])}
        else:
            mask = _validation_mask(found[name], data.validation_fraction)
            own[name], found[name] = select(found[name], mask), select(found[name], ~mask)
        identities.append({"name": name} | identity if name else identity)
    if len(places) > 1:  # a text that one source holds out is not learned from another that holds out its own files
        found = _without(found, own, tally)
    if not is_distinct:
        _distinct(own, found, False, tally)
    return Corpus(
        train=list(chain.from_iterable(found.values())),
        validation=list(chain.from_iterable(own.values())),
        identity={"sources": identities} if data.sources else identities[0],
        report=tally.report(is_distinct),
    )


Several = dict[str, list[Documents]]


def _members(*groups: Several) -> list[Documents]:
    return [documents for group in groups for several in group.values() for documents in several]


def _by_first(holds: Condition, *groups: Several) -> np.ndarray:
    """bool: what `holds` of each document of all groups and the first one with the same text, by their numbers."""
    members = _members(*groups)
    hashes = (block["hash"] for block in blocks_of(members))
    folder = members[0].rows.file.parent if members else Path()
    return by_first(hashes, sum(map(len, members)), folder, holds)


def _kept(group: Several, mask: np.ndarray) -> Several:
    """The documents of a group for which `mask`, bool over all of them in order, holds."""
    ends = np.cumsum([0, *(sum(map(len, several)) for several in group.values())]).tolist()
    return {
        name: select(several, mask[first:last])
        for (name, several), (first, last) in zip(group.items(), pairwise(ends), strict=True)
    }


def _distinct(own: Several, found: Several, drop: bool, tally: Tally) -> tuple[Several, Several]:
    """Counts the documents whose text came before, and drops them where `drop`."""
    fresh = _by_first(lambda number, first: number == first, own, found)
    tally.duplicates += int((~fresh).sum())
    if not drop:
        return own, found
    return _split(own, found, fresh)


def _split(own: Several, found: Several, mask: np.ndarray) -> tuple[Several, Several]:
    """The documents of both groups for which `mask`, bool over all of them in order, holds."""
    held_out = sum(map(len, _members(own)))
    return _kept(own, mask[:held_out]), _kept(found, mask[held_out:])


def _unlike(own: Several, found: Several, threshold: float, tally: Tally) -> tuple[Several, Several]:
    """Counts, names and drops the documents that are like one that came before."""
    members = _members(own, found)
    unlike, pairs = unlike_earlier(members, threshold)
    tally.near_duplicates, tally.near = int((~unlike).sum()), in_words(members, pairs)
    return _split(own, found, unlike)


def _without(found: Several, held_out: Several, tally: Tally) -> Several:
    """Training documents whose text is not held out by any source."""
    if not (count := sum(map(len, _members(held_out)))):
        return found
    mask = _by_first(lambda _, first: first >= count, held_out, found)[count:]
    tally.also_validation += int((~mask).sum())
    return _kept(found, mask)


def is_validation(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents, uint8 [n, 32], are held out: decided by content alone, so that adding files moves none."""
    leading = np.ascontiguousarray(hashes[:, :8]).view(">u8")[:, 0]
    return leading < np.uint64(math.ceil(fraction * 2**64))


def _validation_mask(several: list[Documents], fraction: float) -> np.ndarray:
    masks = [is_validation(block["hash"], fraction) for block in blocks_of(several)]
    return np.concatenate(masks) if masks else np.zeros(0, dtype=bool)


def _scan_all(places: list[Source], tally: Tally, tables: Tables, workers: Workers) -> list[Documents]:
    data, ordered = workers.data, sorted(places, key=lambda source: source.name)
    sketched = {} if data.near_duplicates is None else {"sketches": sketches_version()}
    settings = {"min_length": data.min_length, "on_bad_input": data.on_bad_input} | sketched
    scan = partial(scan_source, min_length=data.min_length, skip=data.on_bad_input == "skip")
    scanned = []
    for source, found in zip(ordered, cached_scans(ordered, settings, tables, scan, workers), strict=True):
        tally.add(found)
        if found.rows.count:
            scanned.append(Documents(source, found.rows, found.can_seek, found.rows.count, found.size))
    # The order of documents is that of names; two files of one name are told apart by what they hold.
    names = Counter(source.name for source in ordered)
    scanned.sort(
        key=lambda one: (one.source.name, *(identities_of([one])[0][2:] if names[one.source.name] > 1 else ()))
    )
    return scanned


def log_left_out(report: LeftOut) -> None:
    """Logs which records are left out, and which copies are not."""
    left_out = {
        "empty": report.empty,
        "too short": report.too_short,
        "exact duplicates": report.duplicates if report.duplicates_dropped else 0,
        "near-duplicates": report.near_duplicates,
        "also in the validation text": report.also_validation,
        "damaged records": report.bad_records,
        "damaged files": report.bad_files,
    }
    if found := ", ".join(f"{count} {name}" for name, count in left_out.items() if count):
        level = logging.WARNING if report.bad_records or report.bad_files else logging.INFO
        examples = [*report.bad, *report.near[:SHOWN]]
        named = f"; {'; '.join(examples)}" if examples else ""
        log.log(level, "%d records read; skipped: %s%s", report.records, found, named)
    if report.other_files:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.other_files.items()))
        log.info("other files in the folders, which are not read: %s", kinds)
    if report.duplicates and not report.duplicates_dropped:
        log.info(
            "%d of %d records are exact duplicates and are kept; data.deduplicate=true skips them",
            report.duplicates,
            report.records,
        )
