"""Files of records: a JSON file has one, and a file of JSON lines is appended to.

Each record has a checksum, which every reader compares. In a JSON file the checksum is the first
line, in JSON lines it is the last field of the line, `crc32`, of the run's id and of the bytes
before it. A person who edits a record on purpose removes its checksum; the record is then used as
it is. In all functions about lines, `run` is the id of the run that the file is of.
"""

import json
import logging
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from infini_llama.configs.reading import JsonObject
from infini_llama.tasks.records.record import Record, first_fault
from infini_llama.tasks.storage.artifacts import (
    SELF_CHECKSUM,
    Damaged,
    checksum_of,
    readable,
)
from infini_llama.tasks.storage.files import write_atomic

SHOWN = 5  # line numbers in a message
CHECKSUM = re.compile(rb',\s*"crc32":\s*"([0-9a-f]{8})"\s*}\s*$')
RecordType = TypeVar("RecordType", bound=Record)
Kind = type[RecordType] | TypeAdapter[RecordType]
log = logging.getLogger("infini_llama.records")
_edited: set[Path] = set()  # files without a checksum that were named already
_named: set[str] = set()  # faults of lines that were logged already


def record_text(fields: JsonObject) -> str:
    """The text of a record's file: its checksum, and its fields."""
    return json.dumps({SELF_CHECKSUM: checksum_of(fields)} | fields, indent=1)


def write_fields(path: Path, fields: JsonObject) -> None:
    """Replace the record in `path`; a reader sees the old one or the new one."""
    write_atomic(path, record_text(fields))


def read_fields(path: Path) -> JsonObject:
    """The fields of a record's file, without its checksum.

    Raises:
        Damaged: there is no such file, it is no JSON object, or it is not as it was written.
    """
    with readable(path):
        text = path.read_bytes()
    try:
        fields: JsonValue = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(fields, dict):
            raise Damaged(f"{path} is not a JSON object.")
        stated = fields.pop(SELF_CHECKSUM, None)
        expected = stated if stated is None else checksum_of(fields)
    except (ValueError, RecursionError) as fault:
        reason = (
            "it is nested too deeply" if isinstance(fault, RecursionError) else fault
        )
        raise Damaged(f"{path} is not JSON ({reason}).") from None
    if stated != expected:
        raise Damaged(
            f"{path} does not match its own checksum. If you changed it on purpose, delete its "
            f'line "{SELF_CHECKSUM}"; otherwise it is damaged.'
        )
    if stated is None and path not in _edited:
        _edited.add(path)
        log.warning("%s has no checksum: it is used as it is.", path)
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def as_record(kind: type[RecordType], fields: JsonValue, path: Path) -> RecordType:
    """The record of this kind that was parsed from `path`.

    Raises:
        Damaged: a field is missing or has another type.
    """
    if not isinstance(fields, dict):
        raise Damaged(f"{path} has no {kind.__name__}.")
    try:
        return kind.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as fault:
        raise Damaged(f"{path}: {first_fault(fault)}.") from None


def write_record(path: Path, record: Record) -> None:
    """Replace the record in `path`."""
    write_fields(path, record.to_json())


def read_record(kind: type[RecordType], path: Path) -> RecordType:
    """The record in `path`.

    Raises:
        Damaged: there is none, or it is not as it was written.
    """
    return as_record(kind, read_fields(path), path)


def read_lines(path: Path, kind: Kind[RecordType], run: str) -> list[RecordType]:
    """Every line that is of this kind, in their order; [] without a file.

    Lines that are not read, also a last one that is cut short, are named in a warning, once.
    """
    records: list[RecordType] = []
    bad: list[int] = []
    try:
        for number, _, record in scan(path, kind, run):
            if record is not None:
                records.append(record)
            else:
                bad.append(number)
        fault = unreadable_lines(path, bad) if bad else None
    except Damaged as damaged:
        fault = str(damaged).rstrip(".")
    if fault and fault not in _named:
        _named.add(fault)
        log.warning("%s; what follows is without it.", fault)
    return records


def unreadable(path: Path, kind: Kind[RecordType], run: str) -> str | None:
    """A sentence that names the lines that are not of this kind; None without any.

    A last line that a kill has cut short is not among them.
    """
    numbers = [
        number
        for number, line, record in scan(path, kind, run)
        if record is None and line.endswith(b"\n")
    ]
    return unreadable_lines(path, numbers) if numbers else None


def unreadable_lines(path: Path, numbers: list[int]) -> str:
    """A sentence that names the first of these lines."""
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"{path}: line {', '.join(map(str, numbers[:SHOWN]))}{more} cannot be read"


def scan(
    path: Path,
    kind: Kind[RecordType],
    run: str,
) -> Iterator[tuple[int, bytes, RecordType | None]]:
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
            record = parse_line(line, adapter, run) if line.endswith(b"\n") else None
            yield number, line, record


def append_line(path: Path, record: Record, run: str) -> None:
    """Add a line of the fields that were set, and wait until it is on the disk.

    A line that a full disk has cut short stays its own.
    """
    if path.exists() and not path.is_file():
        raise Damaged(f"{path} is not a file; move it aside.")
    before = path.read_bytes() if path.exists() else b""
    is_cut = bool(before) and not before.endswith(b"\n")
    fields = json.dumps(record.model_dump(mode="json", exclude_unset=True))
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if is_cut else "") + with_checksum(fields, run) + "\n")
        file.flush()
        os.fsync(file.fileno())


def with_checksum(fields: str, run: str) -> str:
    """A JSON object, which is not empty, with its checksum as the last field."""
    before = fields.removesuffix("}")
    return f'{before},"crc32":"{_checksum(before.encode(), run)}"}}'


def parse_line(
    line: bytes,
    adapter: TypeAdapter[RecordType],
    run: str,
) -> RecordType | None:
    """The record in a line; None if it is not of this kind, or not as it was written."""
    stated = CHECKSUM.search(line)
    if stated is None and b'"crc32"' in line:
        return None
    if stated and stated[1].decode() != _checksum(line[: stated.start()], run):
        return None
    try:
        return adapter.validate_json(line, strict=True)
    except ValidationError:
        return None


def _checksum(before: bytes, run: str) -> str:
    return f"{zlib.crc32(before, zlib.crc32(run.encode())):08x}"
