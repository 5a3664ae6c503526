"""Files of JSON lines as texts, in order and in bounded memory; read again from the places where their lines begin."""

import io
import json
import secrets
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np
import orjson

from infini_llama.tasks.preprocess.sources import texts as records
from infini_llama.tasks.preprocess.sources.texts import NOT_READ, Batch, Fault, Records, pieces, text_of


def line_batches(stream: IO[bytes], text_column: str) -> Iterator[Batch]:
    """The records of lines of JSON, about a megabyte at a time, and the byte at which the line of each begins."""
    mark, rest, number, begin = secrets.randbits(60), b"", 0, 0
    while data := stream.read(max(records.BLOCK, len(rest))):
        block, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield _batch(block + newline, text_column, mark, number, begin)
            number, begin = number + block.count(b"\n") + 1, begin + len(block) + 1
        elif len(rest) > records.LONGEST_RECORD:
            skipped = len(rest)
            while (data := stream.readline(records.BLOCK)) and not data.endswith(b"\n"):
                skipped += len(data)
            number += 1
            yield [_too_long(number)], np.array([begin])
            rest, begin = b"", begin + skipped + len(data)
    if rest:
        yield _batch(rest, text_column, mark, number, begin)


def _batch(block: bytes, text_column: str, mark: int, number: int, begin: int) -> Batch:
    """The records of whole lines; `number` of lines and `begin` of bytes come before them."""
    if (texts := _ordinary(block, text_column, mark)) is None:
        places: list[int] = []
        return [*lines(io.BytesIO(block), text_column, places=places, before=(number, begin))], np.array(
            places, np.int64
        )
    ends = np.flatnonzero(np.frombuffer(block, np.uint8, len(block) - 1) == ord("\n")) + (begin + 1)
    return texts, np.concatenate(([begin], ends))


def _ordinary(block: bytes, text_column: str, mark: int) -> list[str] | None:
    """The texts of whole lines where each is a record with one document; None where one is not.

    All are parsed together, with `mark` between them. It is a random number, so no file has it: where marks and values alternate,
    each value is that of one line.
    """
    whole = block.removesuffix(b"\n")
    try:
        values = orjson.loads(b"[" + whole.replace(b"\n", b",%d," % mark) + b"]")
        texts = [value[text_column] for value in values[::2]]
    except (ValueError, KeyError, TypeError):
        return None
    count = whole.count(b"\n") + 1
    if len(values) != 2 * count - 1 or values[1::2].count(mark) != count - 1 or set(map(type, texts)) != {str}:
        return None
    is_short = max(map(len, texts)) * 4 <= records.LONGEST_DOCUMENT and len(block) <= records.LONGEST_RECORD
    return texts if is_short and max(map(len, texts)) <= records.LONGEST_WORD else None


def _too_long(number: int) -> Fault:
    return Fault(f"has a line longer than {records.LONGEST_RECORD:,} bytes (line {number})")


def lines(
    stream: IO[bytes],
    text_column: str,
    wanted: Iterator[int] | None = None,
    places: list[int] | None = None,
    before: tuple[int, int] = (0, 0),
) -> Records:
    """As `formats.read`, for lines of JSON; `before`: lines and bytes that come before the stream."""
    (number, end), record = before, 0
    following = next(wanted, None) if wanted is not None else None
    while line := stream.readline(records.LONGEST_RECORD + 1):
        number, begin, end = number + 1, end, end + len(line)
        if len(line) > records.LONGEST_RECORD and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(records.BLOCK)
                end += len(line)
            several: Iterable[str | Fault] = [_too_long(number)]
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
