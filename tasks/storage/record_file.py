"""Small JSON files that decide something: each has a checksum of itself, which every reader compares.

The checksum is the first line of the file, so that a person who edits the file on purpose can delete that line.
"""

import json
import logging
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import JsonValue, ValidationError

from infini_llama.configs.reading import JsonObject
from infini_llama.tasks.records.record import Record, first_fault
from infini_llama.tasks.storage.artifacts import SELF_CHECKSUM, Damaged, checksum_of, readable
from infini_llama.tasks.storage.files import write_atomic

RecordType = TypeVar("RecordType", bound=Record)
log = logging.getLogger("infini_llama.records")
_edited: set[Path] = set()  # files without a checksum that were named already


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
        reason = "it is nested too deeply" if isinstance(fault, RecursionError) else fault
        raise Damaged(f"{path} is not JSON ({reason}).") from None
    if stated != expected:
        raise Damaged(
            f"{path} does not match its own checksum. If you changed it on purpose, delete its line "
            f'"{SELF_CHECKSUM}"; otherwise it is damaged.'
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
