"""What of an unfinished dataset is done: one line a finished file, so that a killed build carries on."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.artifacts import NESTED, file_checksum, sync


class JournalEntry(Record):
    """A finished file; a shard also has the key that it was written under and its counts."""

    file: str
    checksum: str
    key: str = ""
    documents: int = 0
    tokens: int = 0


def entry_of(path: Path, name: str, key: str = "", documents: int = 0, tokens: int = 0) -> JournalEntry:
    """The entry of the finished file at `path`, which will be at `name` below the working folder."""
    return JournalEntry(file=name, checksum=file_checksum(path), key=key, documents=documents, tokens=tokens)


class Journal:
    """The lines of one build, in a file beside its working folder.

    A line is written when its file is whole and on the disk. Several processes may append: a line is one write.
    """

    def __init__(self, file: Path, work: Path) -> None:
        self.file, self.work = file, work

    def record(self, name: str, key: str = "", documents: int = 0, tokens: int = 0) -> None:
        self.append(entry_of(self.work / name, name, key, documents, tokens))

    def append(self, entry: JournalEntry) -> None:
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, _line(entry))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def entries(self) -> dict[str, JournalEntry]:
        """The finished files by name; a line that a kill cut short is none."""
        if not self.file.exists():
            return {}
        text = self.file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1].splitlines()
        return {entry.file: entry for entry in map(JournalEntry.model_validate_json, whole)}

    def resume(self) -> dict[str, JournalEntry]:
        """Keeps the finished files whose bytes are those of their lines, and removes every other file."""
        kept = {
            name: entry
            for name, entry in self.entries().items()
            if (self.work / name).is_file() and file_checksum(self.work / name) == entry.checksum
        }
        for path in [path for path in self.work.rglob("*") if path.is_file()]:
            relative = path.relative_to(self.work)
            if relative.as_posix() not in kept and relative.parts[0] != NESTED:  # tables that repair put back are whole
                path.unlink()
        self._replace(kept)
        return kept

    def discard(self, names: Iterable[str]) -> None:
        """These files are not finished after all: their lines go first, so that a kill in between leaves none that counts."""
        wrong = set(names)
        self._replace({name: entry for name, entry in self.entries().items() if name not in wrong})
        for name in wrong:
            (self.work / name).unlink(missing_ok=True)

    def _replace(self, entries: dict[str, JournalEntry]) -> None:
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_bytes(b"".join(map(_line, entries.values())))
        sync(part)
        part.replace(self.file)

    def close(self) -> None:
        """After the commit, or to begin anew: nothing is left."""
        self.file.unlink(missing_ok=True)
        self.file.with_name(f"{self.file.name}.part").unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)


def _line(entry: JournalEntry) -> bytes:
    return entry.model_dump_json(exclude_defaults=True).encode() + b"\n"
