"""What of an unfinished dataset is done: one line a finished file, so that a killed build carries on."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infini_llama.tasks.storage.artifacts import NESTED, file_checksum, sync


def line_of(path: Path, name: str, **facts: Any) -> dict[str, Any]:
    """The line of a finished file that will stand at `name` below the working folder."""
    return {"file": name, "checksum": file_checksum(path)} | facts


class Journal:
    """The lines of one build, in a file beside its working folder.

    A line is written when its file is whole and on the disk. Several processes may append: a line is one write.
    """

    def __init__(self, file: Path, work: Path) -> None:
        self.file, self.work = file, work

    def record(self, name: str, **facts: Any) -> None:
        self.append(line_of(self.work / name, name, **facts))

    def append(self, line: dict[str, Any]) -> None:
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lines(self) -> dict[str, dict[str, Any]]:
        """The record of each finished file; a line that a kill cut short is none."""
        if not self.file.exists():
            return {}
        text = self.file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1].decode()
        return {line["file"]: line for line in map(json.loads, whole.splitlines())}

    def resume(self) -> dict[str, dict[str, Any]]:
        """Keeps the finished files whose bytes are those of their lines, and removes every other file."""
        kept = {
            name: line
            for name, line in self.lines().items()
            if (self.work / name).is_file() and file_checksum(self.work / name) == line["checksum"]
        }
        for path in [path for path in self.work.rglob("*") if path.is_file()]:
            relative = path.relative_to(self.work)
            if relative.as_posix() not in kept and relative.parts[0] != NESTED:  # tables that repair put back are whole
                path.unlink()
        self._replace(kept)
        return kept

    def forget(self, names: Iterable[str]) -> None:
        """These files are not finished after all: their lines go first, so that a kill in between leaves none that counts."""
        wrong = set(names)
        self._replace({name: line for name, line in self.lines().items() if name not in wrong})
        for name in wrong:
            (self.work / name).unlink(missing_ok=True)

    def _replace(self, lines: dict[str, dict[str, Any]]) -> None:
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text("".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8")
        sync(part)
        part.replace(self.file)

    def close(self) -> None:
        """After the commit, or to begin anew: nothing is left."""
        self.file.unlink(missing_ok=True)
        self.file.with_name(f"{self.file.name}.part").unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
