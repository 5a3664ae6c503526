"""Tokens of documents that were encoded while their files were surveyed, so that text is read once.

The survey decides last which documents are kept, and in which split they are; so all are encoded, and shards are copied together from
what was found. The tokens of one table of documents are two files: the tokens, each document with its end, and where in them each
document begins. They are deleted when the dataset is complete.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import FileIO
from pathlib import Path
from uuid import uuid4

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.texts import BATCH_BYTES, Unreadable, batches
from infini_llama.tasks.preprocess.tokenizers.encoder import first_special, special_ids
from infini_llama.tasks.preprocess.tokenizers.engines import (
    WORTH_A_CHECK,
    Encode,
    EngineDiffers,
    choose_engine,
    open_engine,
    refuse,
)
from infini_llama.tasks.preprocess.tokenizers.tokenizer import description_of, end_of_text, is_given, load, tokenizer_of
from infini_llama.tasks.preprocess.tokens.shards import Stream, dtype_for
from infini_llama.tasks.records.manifest import EngineChoice
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.artifacts import checksum_of, file_checksum

log = logging.getLogger("infini_llama.preprocess")
LEFT_BEHIND = 7 * 86_400.0  # seconds after which files that were not used are deleted
UNFINISHED = 3600.0  # seconds after which a file that is not written to is one of a killed process


class NotKept(Exception):
    """These texts are left to the build, which reads them again."""


class SpoolFacts(Record):
    """Written last, beside the tokens of one table. session: of the process that surveyed; checksums: of tokens and places."""

    session: str
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class Spool:
    """Where the tokens of surveyed documents are, and what encodes them: plain values, which go to other processes.

    Attributes:
        tokenizer: its tokenizer.json.
        vocab_size: number of its ids.
        eos: the token that ends a document.
        engine: name of what encodes.
        version: of the engine.
        folder: of the files.
        checks: folder that remembers which engines are refused.
        session: unique to the process that surveys; what another one has left is verified before it is used.
    """

    tokenizer: str
    vocab_size: int
    eos: int
    engine: str
    version: str
    folder: Path
    checks: Path
    session: str

    @cached_property
    def key(self) -> str:
        """Of what decides the tokens."""
        return checksum_of([self.tokenizer, self.eos, self.engine, self.version])

    def encodes_by(self, engine: EngineChoice) -> bool:
        """Whether its tokens are those of this engine, which the build has chosen."""
        return (self.engine, self.version) == (engine.name, engine.version)

    @property
    def dtype(self) -> np.dtype:
        return dtype_for(self.vocab_size)

    def writer(self, table: Path) -> "SpoolWriter":
        return SpoolWriter(self, table)

    def files(self, table: Path) -> tuple[Path, Path, Path]:
        """Tokens, places and facts of a table's documents."""
        stem = self.folder / f"{table.stem}-{self.key.removeprefix('blake3:')[:16]}"
        return Path(f"{stem}.tokens"), Path(f"{stem}.places"), Path(f"{stem}.json")

    def remove(self, tables: set[Path]) -> None:
        """Deletes the files of these tables, and old ones that no build has used."""
        for file in (file for table in tables for file in self.files(table)):
            file.unlink(missing_ok=True)
        for file in self.folder.glob("*"):
            with suppress(FileNotFoundError):  # another build deletes as well
                if time.time() - file.stat().st_mtime > (UNFINISHED if file.suffix == ".part" else LEFT_BEHIND):
                    file.unlink()


def open_spool(data: DataConfig, home: Path, sources: list[Source]) -> Spool | None:
    """Where the tokens of these sources go while they are surveyed; None where they are encoded later.

    That is so where the tokenizer is learned from the text, the text is small, prompts are encoded apart, or a cluster encodes.

    Raises:
        ConfigError: there is no such tokenizer or engine.
    """
    is_small = sum(source.size() for source in sources) < WORTH_A_CHECK
    if is_small or not is_given(data.tokenizer) or data.engine != "local" or data.loss_on == "answer":
        return None
    tokenizer, checks = load(data.tokenizer), home / "engine-checks"
    engine = choose_engine(data.tokenizer_engine, tokenizer, lambda: _first_texts(sources), checks)
    return spool_of(home, tokenizer, end_of_text(tokenizer, data.tokenizer), engine)


def spool_of(home: Path, tokenizer: Tokenizer, eos: int, engine: EngineChoice) -> Spool:
    """Where tokens of this tokenizer and engine are, also those that a killed process has found."""
    folder = home / "surveys" / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    checks = home / "engine-checks"
    description, size = description_of(tokenizer), tokenizer.get_vocab_size()
    return Spool(description, size, eos, engine.name, engine.version, folder, checks, uuid4().hex)


def _first_texts(sources: list[Source]) -> list[str]:
    texts = ((text, len(text)) for source in sources for text in source.records() if isinstance(text, str) and text)
    try:
        return next(batches(texts), ([], 0))[0]
    except (Unreadable, OSError):  # the survey says what is wrong
        return []


@lru_cache(maxsize=1)
def _opened(description: str, engine: str) -> tuple[Tokenizer, Encode, np.ndarray]:
    tokenizer = tokenizer_of(description)
    return tokenizer, open_engine(engine, tokenizer), special_ids(tokenizer)


class SpoolWriter:
    """Encodes the documents of one table in another thread, while the next ones are read.

    Where something is wrong with them, the files are deleted and the build encodes the text, which says what it is.
    """

    def __init__(self, spool: Spool, table: Path) -> None:
        self.spool, self.table = spool, table
        self.pending: list[str] = []
        self.size = 0
        self.documents, self.end = 0, 0  # written
        self.running: Future[None] | None = None
        self.tokens, self.places = (file.with_name(f"{file.name}.part").open("wb+") for file in spool.files(table)[:2])
        self.places.write(np.zeros(1, np.int64).tobytes())
        self.thread = ThreadPoolExecutor(1)
        self.failed = False

    def add(self, texts: list[str], sizes: np.ndarray) -> None:
        if self.failed:
            return
        self.pending += texts
        self.size += int(sizes.sum())
        if self.size >= BATCH_BYTES:
            self._flush()

    def truncate(self, documents: int) -> None:
        self._flush()
        self._settle()
        if not self.failed and documents < self.documents:
            self.places.seek(documents * 8)
            [self.end] = np.frombuffer(self.places.read(8), np.int64).tolist()
            self.documents = documents
            self.places.truncate()
            self.tokens.seek(self.end * self.spool.dtype.itemsize)
            self.tokens.truncate()

    def close(self) -> None:
        self._flush()
        self._settle()
        self.thread.shutdown()
        files = self.spool.files(self.table)
        parts = [file.with_name(f"{file.name}.part") for file in files[:2]]
        for file in (self.tokens, self.places):
            file.close()
        if self.failed:
            for part in parts:
                part.unlink(missing_ok=True)
            return
        facts = SpoolFacts(session=self.spool.session, checksums=tuple(map(file_checksum, parts)))
        for part, file in zip(parts, files, strict=False):
            part.replace(file)
        files[2].write_text(facts.model_dump_json(), encoding="utf-8")  # last; another process verifies the checksums

    def _flush(self) -> None:
        self._settle()
        texts, self.pending, self.size = self.pending, [], 0
        if texts and not self.failed:
            self.running = self.thread.submit(self._write, texts)

    def _settle(self) -> None:
        running, self.running = self.running, None
        try:
            if running:
                running.result()
        except EngineDiffers as fault:
            self.failed = True
            refuse(
                self.spool.engine, _opened(self.spool.tokenizer, self.spool.engine)[0], self.spool.checks, str(fault)
            )
        except (NotKept, DataError, OSError) as fault:
            self.failed = True
            log.info("tokens found by the survey are not kept (%s)", fault)

    def _write(self, texts: list[str]) -> None:
        _, encode, special = _opened(self.spool.tokenizer, self.spool.engine)
        ids, offsets = encode(texts)
        if first_special(special, ids) is not None:
            raise NotKept("a text becomes a special token")
        stream = Stream(self.spool.dtype, len(ids) + len(texts))
        stream.add(ids, offsets, self.spool.eos)
        self.tokens.write(stream.values.data)
        self.places.write((np.concatenate(stream.lengths).cumsum() + self.end).astype(np.int64).tobytes())
        self.documents, self.end = self.documents + len(texts), self.end + stream.filled


class SpoolReader:
    """The tokens of tables' documents."""

    def __init__(self, spool: Spool) -> None:
        _opened.cache_clear()  # an engine has a hundred megabytes of words
        self.spool, self.opened = spool, dict[Path, tuple[FileIO, FileIO] | None]()

    def has(self, table: Path) -> bool:
        """Whether the tokens of the documents of this table are known."""
        if table not in self.opened:
            self.opened[table] = self._open(table)
        return self.opened[table] is not None

    def _open(self, table: Path) -> tuple[FileIO, FileIO] | None:
        *files, facts = self.spool.files(table)
        try:
            known = SpoolFacts.model_validate_json(facts.read_bytes())
            if known.session != self.spool.session and known.checksums != tuple(map(file_checksum, files)):
                return None
            return FileIO(files[0]), FileIO(files[1])
        except (OSError, ValueError):  # none yet, or a damaged record
            return None

    def gather(self, parts: list[tuple[Path, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of documents, joined, and how many each has.

        Args:
            parts: tables and the ascending numbers of rows in them, int64 [several] each.
        """
        runs: list[tuple[FileIO, int, int]] = []
        lengths = []
        for table, rows in parts:
            tokens, places = self._files(table)
            first, last = int(rows[0]), int(rows[-1]) + 1
            known = np.empty(last - first + 1, np.int64)
            _read(places, known, first)
            begins, ends = known[rows - first], known[rows - first + 1]
            breaks = np.flatnonzero(begins[1:] != ends[:-1]) + 1
            lengths.append(ends - begins)
            starts, stops = begins[np.concatenate(([0], breaks))], ends[np.concatenate((breaks - 1, [-1]))]
            runs += ((tokens, start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))
        values, filled = np.empty(sum(stop - start for _, start, stop in runs), self.spool.dtype), 0
        for tokens, start, stop in runs:
            _read(tokens, values[filled : filled + stop - start], start)
            filled += stop - start
        return values, np.concatenate(lengths)

    def _files(self, table: Path) -> tuple[FileIO, FileIO]:
        found = self.opened[table]
        assert found is not None
        return found


def _read(file: FileIO, into: np.ndarray, first: int) -> None:
    """Fills `into` with the elements of the file from number `first` on."""
    view = into.data.cast("B")
    file.seek(first * into.itemsize)
    while len(view):
        if not (count := file.readinto(view)):
            raise OSError(f"{file.name} ends too early")
        view = view[count:]
