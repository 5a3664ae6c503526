"""Sources are scanned by this process, by several of this machine, or by the workers of a cluster: the tables are the same."""

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Protocol
from uuid import uuid4

import numpy as np

from infini_llama.configs.errors import PipelineError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.tables import Rows
from infini_llama.tasks.preprocess.workers.clusters import Cluster, open_cluster, worker_name
from infini_llama.tasks.preprocess.workers.local import POLL, result_of, worker_processes

WORTH_WORKERS = 64 * 2**20  # bytes of text: less is scanned by this process
PASSING = ".passing-"
BATCHES_EACH = 8  # of files, for each worker
LARGEST_BATCH = 2**30  # bytes of text; after each batch, what was found is remembered


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
        suffix: which rows the tables have, of LAYOUTS.
    """

    def __init__(self, notes: Path | None, sink_for: SinkFor, suffix: str) -> None:
        self.notes, self.sink_for, self.suffix = notes, sink_for, suffix

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
        return folder / f"{key}-{uuid4().hex}{self.suffix}"


@dataclass(frozen=True)
class Workers:
    """Who scans. A cluster is connected when there is something for it, and until `until` is closed."""

    data: DataConfig
    until: ExitStack

    @cached_property
    def cluster(self) -> Cluster | None:
        return None if self.data.engine == "local" else self.until.enter_context(open_cluster(self.data))


@dataclass(frozen=True)
class Stale:
    """A source that is to be scanned. `size`: of its file here."""

    number: int  # of the source among all
    source: Source
    key: str  # of the notes it belongs to
    stamp: list[Any] | None
    size: int


@dataclass(frozen=True)
class Batch:
    """Sources whose documents are rows of one table."""

    stale: list[Stale]
    file: Path

    def __str__(self) -> str:
        return f"the files {self.stale[0].source} to {self.stale[-1].source}"


Scanned = Iterator[tuple[Batch, list[Found]]]


def scanned(stale: list[Stale], tables: Tables, scan: Scan, workers: Workers) -> Scanned:
    """The scans of each table; in any order where there are several workers."""
    if not stale:
        return
    sink = tables.sink_for([one.source for one in stale])
    total = sum(one.size for one in stale)
    cluster, count = None, workers.data.num_workers
    if len(stale) > 1 and total >= WORTH_WORKERS and tables.notes:
        cluster = workers.cluster
        count = cluster.workers if cluster else count
    else:
        count = 1
    batches = list(_batches(stale, tables, min(LARGEST_BATCH, total // (BATCHES_EACH * count) if count > 1 else total)))
    if cluster and tables.notes:
        yield from _by_cluster(cluster, batches, scan, tables.notes)
    elif count < 2:
        yield from ((batch, _scan_batch(scan, batch, sink)) for batch in batches)
    else:
        with worker_processes(min(count, len(batches))) as pool:
            pending = {pool.submit(_scan_batch, scan, batch, sink): batch for batch in batches}
            while pending:
                done, _ = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
                for future in done:
                    yield pending.pop(future), result_of(future)


def _batches(stale: list[Stale], tables: Tables, most: int) -> Iterator[Batch]:
    """Runs of sources of about `most` bytes."""
    for (key, stays), several in groupby(stale, key=lambda one: (one.key, one.stamp is not None)):
        batch, size = [], 0
        for one in several:
            batch.append(one)
            size += one.size
            if size > most:
                yield Batch(batch, tables.new(key, stays))
                batch, size = [], 0
        if batch:
            yield Batch(batch, tables.new(key, stays))


def _by_cluster(cluster: Cluster, batches: list[Batch], scan: Scan, notes: Path) -> Scanned:
    witness = notes / f"{PASSING}{uuid4().hex}"
    witness.touch()
    try:
        yield from cluster.run(_scan_elsewhere, scan, batches, witness)
    finally:
        witness.unlink(missing_ok=True)
        stems = {batch.file.stem for batch in batches}
        for left in notes.glob("*-*-*.*"):  # by a worker that was lost
            if "-".join(left.stem.split("-")[:2]) in stems:
                left.unlink(missing_ok=True)


def _scan_elsewhere(scan: Scan, batch: Batch) -> list[Found]:
    """On the worker of a cluster: as `_scan_batch`, of the text that the machine has which hands out the batches.

    Raises:
        PipelineError: this machine has other text.
    """
    if strange := next((one for one in batch.stale if size_here(one.source) != one.size), None):
        raise PipelineError(
            f"the worker on {worker_name()} does not have {strange.source} as the machine that runs preprocess has it; "
            f"all machines must see the same text at the same paths ({strange.source.key})."
        )
    return _scan_batch(scan, batch, None)


def size_here(source: Source) -> int:
    """What a worker compares: bytes of its file, or whether the folder of a dataset is there."""
    return int(source.path.exists()) if source.dataset and isinstance(source.path, Path) else source.size()


def _scan_batch(scan: Scan, batch: Batch, open_sink: OpenSink | None) -> list[Found]:
    """Writes the table under a name of its own and renames it: a worker of a cluster may do a batch that another one has done."""
    sink = open_sink(batch.file) if open_sink else None
    part = batch.file.with_name(f"{batch.file.stem}-{socket.gethostname()}-{os.getpid()}{batch.file.suffix}")
    with part.open("wb") as table:
        found = [scan(one.source, table, sink) for one in batch.stale]
    part.replace(batch.file)
    if sink:
        sink.close()
    return [replace(one, rows=replace(one.rows, file=batch.file)) for one in found]
