"""Files of JSON lines that a run appends to: each line is read as a record, or not at all.

The last field of a line, `crc32`, is the checksum of the run's id and of the bytes before it. A line without this field is used as it
is, so that a person who edits one on purpose removes it. In all functions, `run` is the id of the run that the file is of.
"""

import json
import logging
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.artifacts import Damaged, readable

SHOWN = 5  # line numbers in a message
CHECKSUM = re.compile(rb',\s*"crc32":\s*"([0-9a-f]{8})"\s*}\s*$')
Line = TypeVar("Line", bound=Record)
Kind = type[Line] | TypeAdapter[Line]
log = logging.getLogger("infini_llama.records")
_named: set[str] = set()  # faults that were logged already


def read_lines(path: Path, kind: Kind[Line], run: str) -> list[Line]:
    """Every line that is of this kind, in their order; [] without a file.

    Lines that are not read, also a last one that is cut short, are named in a warning, once.
    """
    records: list[Line] = []
    bad: list[int] = []
    try:
        for number, _, record in scan(path, kind, run):
            if record is not None:
                records.append(record)
            else:
                bad.append(number)
        fault = _sentence(path, bad) if bad else None
    except Damaged as damaged:
        fault = str(damaged).rstrip(".")
    if fault and fault not in _named:
        _named.add(fault)
        log.warning("%s; what follows is without it.", fault)
    return records


def unreadable(path: Path, kind: Kind[Line], run: str) -> str | None:
    """A sentence that names the lines that are not of this kind, without a last one that a kill has cut short; None without any."""
    numbers = [number for number, line, record in scan(path, kind, run) if record is None and line.endswith(b"\n")]
    return _sentence(path, numbers) if numbers else None


def _sentence(path: Path, numbers: list[int]) -> str:
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"{path}: line {', '.join(map(str, numbers[:SHOWN]))}{more} cannot be read"


def scan(path: Path, kind: Kind[Line], run: str) -> Iterator[tuple[int, bytes, Line | None]]:
    """Number, bytes and record of each line; no record where it is not of this kind or has no end.

    Raises:
        Damaged: the file cannot be read, or something else has its name.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise Damaged(f"{path} is not a file; move it aside.")
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    with readable(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line, parse_line(line, adapter, run) if line.endswith(b"\n") else None


def append_line(path: Path, record: Record, run: str) -> None:
    """Add a line of the fields that were set, and wait until it is on the disk; a line that a full disk has cut short stays its own."""
    if path.exists() and not path.is_file():
        raise Damaged(f"{path} is not a file; move it aside.")
    before = path.read_bytes() if path.exists() else b""
    cut = bool(before) and not before.endswith(b"\n")
    fields = record.model_dump(mode="json", exclude_unset=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + with_checksum(json.dumps(fields), run) + "\n")
        file.flush()
        os.fsync(file.fileno())


def with_checksum(fields: str, run: str) -> str:
    """A JSON object, which is not empty, with its checksum as the last field."""
    before = fields.removesuffix("}")
    return f'{before},"crc32":"{_checksum(before.encode(), run)}"}}'


def parse_line(line: bytes, adapter: TypeAdapter[Line], run: str) -> Line | None:
    """The record in a line; None if it is not of this kind, or not as it was written."""
    stated = CHECKSUM.search(line)
    if (stated is None and b'"crc32"' in line) or (
        stated and stated[1].decode() != _checksum(line[: stated.start()], run)
    ):
        return None
    try:
        return adapter.validate_json(line, strict=True)
    except ValidationError:
        return None


def _checksum(before: bytes, run: str) -> str:
    return f"{zlib.crc32(before, zlib.crc32(run.encode())):08x}"
