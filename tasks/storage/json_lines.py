"""Files of JSON lines that a run appends to: each line is read as a record, or not at all."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from infini_llama.tasks.records.record import Record

SHOWN = 5  # line numbers in a message
Line = TypeVar("Line", bound=Record)
Kind = type[Line] | TypeAdapter[Line]


def read_lines(path: Path, kind: Kind[Line]) -> list[Line]:
    """Every line that is of this kind, in their order; [] without a file."""
    return [record for _, _, record in scan(path, kind) if record is not None]


def unreadable(path: Path, kind: Kind[Line]) -> str | None:
    """A sentence that names the lines that are not of this kind, without a last one that a kill has cut short; None without any."""
    numbers = [number for number, line, record in scan(path, kind) if record is None and line.endswith(b"\n")]
    if not numbers:
        return None
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"{path}: line {', '.join(map(str, numbers[:SHOWN]))}{more} cannot be read"


def scan(path: Path, kind: Kind[Line]) -> Iterator[tuple[int, bytes, Line | None]]:
    """Number, bytes and record of each line; no record where it is not of this kind or has no end."""
    if not path.exists():
        return
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line, parse_line(line, adapter) if line.endswith(b"\n") else None


def append_line(path: Path, record: Record) -> None:
    """Add a line of the fields that were set, and wait until it is on the disk; a line that a full disk has cut short stays its own."""
    before = path.read_bytes() if path.exists() else b""
    cut = bool(before) and not before.endswith(b"\n")
    fields = record.model_dump(mode="json", exclude_unset=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + json.dumps(fields) + "\n")
        file.flush()
        os.fsync(file.fileno())


def parse_line(line: bytes, adapter: TypeAdapter[Line]) -> Line | None:
    """The record in a line; None if it is not of this kind."""
    try:
        return adapter.validate_json(line, strict=True)
    except ValidationError:
        return None
