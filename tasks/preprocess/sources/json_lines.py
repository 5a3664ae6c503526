"""Files of JSON lines as texts, in order and in bounded memory; read again from the places where their lines begin."""

import json
from collections.abc import Iterable, Iterator
from typing import IO

import orjson

from infini_llama.tasks.preprocess.sources import texts as records
from infini_llama.tasks.preprocess.sources.texts import NOT_READ, Fault, Records, pieces, text_of


def lines(
    stream: IO[bytes], text_column: str, wanted: Iterator[int] | None = None, places: list[int] | None = None
) -> Records:
    """As `formats.read`, for lines of JSON."""
    number = record = end = 0
    following = next(wanted, None) if wanted is not None else None
    while line := stream.readline(records.LONGEST_RECORD + 1):
        number, begin, end = number + 1, end, end + len(line)
        if len(line) > records.LONGEST_RECORD and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(records.BLOCK)
                end += len(line)
            several: Iterable[str | Fault] = [
                Fault(f"has a line longer than {records.LONGEST_RECORD:,} bytes (line {number})")
            ]
        elif line.isspace():
            continue
        elif wanted is not None and record != following and len(line) <= records.LONGEST_DOCUMENT:  # that is one record
            several = [NOT_READ]
        else:
            text = _line(line, text_column, number)
            several = (text,) if isinstance(text, Fault) else pieces(text)
        for piece in several:
            if places is not None:
                places.append(begin)
            yield piece
            if wanted is not None and record == following:
                following = next(wanted, None)
            record += 1


def lines_at(stream: IO[bytes], text_column: str, places: Iterable[int]) -> Records:
    """The texts of the lines that begin at these bytes of a file, ascending, whatever lies between them."""
    end = 0
    for place in places:
        if place != end:
            stream.seek(place)
        line = stream.readline(records.LONGEST_RECORD + 1)
        end = place + len(line)
        yield _line(line, text_column, 2 if place else 1)


def _line(line: bytes, text_column: str, number: int) -> str | Fault:
    """The text of one line of JSON: by the faster parser, or, where that refuses it, as the standard one sees it."""
    try:
        value = orjson.loads(line)
    except ValueError:
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            return Fault(f"is not UTF-8 in line {number} (byte {error.start} of it)")
        except (ValueError, RecursionError):
            return Fault(f"has a line {number} that is not JSON")
    return text_of(value, text_column, f"line {number}")
