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
        if (end := data.rfind(b"\n")) >= 0:
            several = b"".join((b"[", rest, memoryview(data)[:end], b"]"))
            batch, count = _batch(several, text_column, mark, (number, begin))
            yield batch
            number, begin, rest = number + count, begin + len(several) - 1, data[end + 1 :]
            continue
        rest += data
        if len(rest) > records.LONGEST_RECORD:
            skipped = len(rest)
            while (data := stream.readline(records.BLOCK)) and not data.endswith(b"\n"):
                skipped += len(data)
            number += 1
            yield [_too_long(number)], np.array([begin])
            rest, begin = b"", begin + skipped + len(data)
    if rest:
        yield _batch(b"[%b]" % rest, text_column, mark, (number, begin))[0]


def _batch(several: bytes, text_column: str, mark: int, before: tuple[int, int]) -> tuple[Batch, int]:
    """The records of whole lines in brackets, and the number of these lines; `before`: lines and bytes that come before them."""
    if (texts := _ordinary(several, text_column, mark)) is None:
        places: list[int] = []
        slowly = list(lines(io.BytesIO(several[1:-1]), text_column, places=places, before=before))
        return (slowly, np.array(places, np.int64)), several.count(b"\n") + 1
    lengths = np.fromiter(map(len, several.split(b"\n")), np.int64, len(texts)) + 1
    lengths[0] -= 1  # its bracket
    return (texts, before[1] + lengths.cumsum() - lengths), len(texts)


def _ordinary(several: bytes, text_column: str, mark: int) -> list[str] | None:
    """The texts of whole lines in brackets where each is a record with one document; None where one is not.

    All are parsed together, with `mark` between them. It is a random number, so no file has it: where marks and values alternate,
    each value is that of one line.
    """
    if len(several) * 4 > records.LONGEST_DOCUMENT and b"\n" not in several:
        return None  # one long line, which would be parsed twice
    between = b",%d," % mark
    marked = several.replace(b"\n", between)
    marks = (len(marked) - len(several)) // (len(between) - 1)
    try:
        values = orjson.loads(marked)
        texts = [value[text_column] for value in values[::2]]
    except (ValueError, KeyError, TypeError):
        return None
    if len(values) != 2 * marks + 1 or values[1::2].count(mark) != marks or set(map(type, texts)) != {str}:
        return None
    longest = max(map(len, texts))
    fits = longest * 4 <= records.LONGEST_DOCUMENT and longest <= records.LONGEST_WORD
    return texts if fits and len(several) <= records.LONGEST_RECORD else None


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
        if isinstance(value, dict) and isinstance(text := value.get(text_column), str):
            return text  # in which this parser leaves no half characters
    except ValueError:
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            return Fault(f"is not UTF-8 in line {number} (byte {error.start} of it)")
        except (ValueError, RecursionError):
            return Fault(f"has a line {number} that is not JSON")
    return text_of(value, text_column, f"line {number}")
