"""Files of JSON lines that a run appends to: read with their types, whatever a kill or a disk has left of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

SHOWN = 5  # line numbers in a message


class Line(BaseModel):
    """The types of one line's fields; fields that are not named are kept as they are."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")


def read_lines(path: Path, kind: type[BaseModel]) -> list[dict[str, Any]]:
    """Every line that is of this kind, in their order; [] where there is no file."""
    return [record for _, _, record in scan(path, kind) if record is not None]


def unreadable(path: Path, kind: type[BaseModel]) -> str | None:
    """A sentence that names the lines that are not of this kind, without a last one that a kill has cut short; None without any."""
    numbers = [number for number, line, record in scan(path, kind) if record is None and line.endswith(b"\n")]
    if not numbers:
        return None
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"{path}: line {', '.join(map(str, numbers[:SHOWN]))}{more} cannot be read"


def scan(path: Path, kind: type[BaseModel]) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Number, bytes and record of each line; no record where it is not of this kind or has no end."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line, _record(line, kind) if line.endswith(b"\n") else None


def _record(line: bytes, kind: type[BaseModel]) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        kind.model_validate_json(line, strict=True)
    except (ValueError, RecursionError, ValidationError):
        return None
    return record
