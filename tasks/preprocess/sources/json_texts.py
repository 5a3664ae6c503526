"""JSON as texts: lines of it, an array, or values one after the other.

They are read in order and in bounded memory.
"""

import io
import json
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import IO, Any

import msgspec
import numpy as np

from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.sources.text_format import Content, Format, Open
from infini_llama.tasks.preprocess.sources.texts import (
    Batch,
    Fault,
    Span,
    TextRecords,
    Unreadable,
    are_short,
    in_batches,
    text_of,
)

LINE_END = ord("\n")
# Errors of msgspec: it is not JSON with such a text, not UTF-8, or the field's name has a quote, a
# backslash or a control character.
REFUSED = (msgspec.DecodeError, ValueError, RecursionError)
# Numbers are no text, and Python refuses to convert one of thousands of digits.
DECODER = json.JSONDecoder(parse_int=lambda _: 0)
BETWEEN = " \t\r\n,["  # values
BETWEEN_IN_ARRAY = " \t\r\n,]"


class Json(Format):
    """An array of records, one record, or one after the other; decoded value by value."""

    def read(self, content: Content) -> Iterator[Batch]:
        return in_batches(_texts_of_values(content.stream, content.text_column))


def _texts_of_values(stream: IO[bytes], text_column: str) -> TextRecords:
    text = io.TextIOWrapper(stream, encoding="utf-8")
    buffer = ""
    position = 0  # in the buffer
    number = 0  # of values so far
    characters = texts.BLOCK  # to read at once
    is_array = False
    is_end = False  # of the text
    while True:
        while position < len(buffer) and buffer[position] in (
            BETWEEN_IN_ARRAY if is_array else BETWEEN
        ):
            if buffer[position] in "[]":
                is_array = not is_array
            position += 1
        try:
            found = _value_at(buffer, position, is_end)
        except RecursionError:
            raise Unreadable(f"is nested too deeply after its value {number}") from None
        if found is not None:
            value, position = found
            number += 1
            characters = texts.BLOCK
            yield text_of(value, text_column, f"value {number}")
            continue
        buffer = buffer[position:]
        position = 0
        if is_end and not buffer and not is_array:
            return
        if is_end or len(buffer) > texts.LONGEST_RECORD:
            raise Unreadable(f"is not JSON after its value {number}")
        try:
            more = text.read(characters)
        except UnicodeDecodeError as error:
            raise Unreadable(f"is not UTF-8 ({error.reason})") from None
        is_end = not more
        characters = max(texts.BLOCK, len(buffer))
        buffer += more


def _value_at(buffer: str, position: int, ended: bool) -> tuple[Any, int] | None:
    """The value at this position and where it ends; None: no whole one is there.

    Args:
        ended: no text follows the buffer.
    """
    if position == len(buffer):
        return None
    try:
        value, end = DECODER.raw_decode(buffer, position)
    except ValueError:
        return None
    may_continue = (
        not ended and end == len(buffer) and not isinstance(value, dict | str)
    )
    return None if may_continue else (value, end)  # a number may continue


class JsonLines(Format):
    """JSON lines. Spans are bytes: that of a line is the one with its first byte."""

    def read(self, content: Content) -> Iterator[Batch]:
        stream = content.stream
        first, last = content.span or (0, None)
        if first:
            stream.seek(first - 1)
            _skip_line(stream)
            first = stream.tell()
        elif last is not None:
            # A byte order mark was read, with which the first line begins.
            first = min(stream.tell(), last - 1)
        return _texts_of_lines(stream, content.text_column, first, last)

    def spans(self, open_file: Open, size: int, most: int) -> list[Span] | None:
        return [(first, min(first + most, size)) for first in range(0, size, most)]


def _texts_of_lines(
    stream: IO[bytes],
    text_column: str,
    first: int,
    last: int | None,
) -> Iterator[Batch]:
    """The records of lines, about a megabyte of lines at a time.

    Args:
        first: byte at which the stream stands.
        last: the byte before which the last line begins; None: the end.
    """
    number = 0  # of lines from `first` on
    for block in _whole_lines(stream, first, last):
        if isinstance(block, int):
            number += 1
            place = _line(stream, first, number)
            yield [
                Fault(
                    f"has a line longer than {texts.LONGEST_RECORD:,} bytes ({place})"
                )
            ]
            continue
        records = _parsed_together(block, text_column)
        if records is None:
            lines = enumerate(block.split(b"\n"), number + 1)
            yield from in_batches(
                _parsed(line, text_column, partial(_line, stream, first, line_number))
                for line_number, line in lines
                if line.strip()
            )
            number += block.count(b"\n") + 1
            continue
        if are_short(records):
            yield records
        else:
            yield from in_batches(iter(records))
        number += len(records)


def _skip_line(stream: IO[bytes]) -> int:
    """Read past the end of a line; the result is how many bytes that are."""
    skipped = 0
    while line := stream.readline(texts.BLOCK):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def _whole_lines(
    stream: IO[bytes],
    place: int,
    last: int | None,
) -> Iterator[bytes | int]:
    """Lines that begin before byte `last`, about a megabyte at a time.

    Args:
        place: byte at which the stream stands.

    Yields:
        lines without the last one's end; or a number for a line that is too long.
    """
    while last is None or place < last:
        data = stream.read(
            texts.BLOCK if last is None else min(texts.BLOCK, last - place)
        )
        if not data:
            return
        if not data.endswith(b"\n"):
            data += stream.readline(texts.LONGEST_RECORD + 1)
        place += len(data)
        lines = data.removesuffix(b"\n")
        begin = lines.rfind(b"\n") + 1
        if len(lines) - begin <= texts.LONGEST_RECORD:
            yield lines
            continue
        if begin:
            yield lines[: begin - 1]
        if not data.endswith(b"\n"):
            place += _skip_line(stream)
        yield place


def _line(stream: IO[bytes], first: int, number: int) -> str:
    """The name of a line for a message.

    Args:
        first: byte from which lines are counted.
        number: of the line, from there on.
    """
    if first:
        place = stream.tell()
        left = first
        stream.seek(0)
        while left and (data := stream.read(min(left, texts.BLOCK))):
            number += data.count(b"\n")
            left -= len(data)
        stream.seek(place)
    return f"line {number}"


def _parsed_together(block: bytes, text_column: str) -> list[str] | None:
    """The texts of lines each of which is an object with text; None where one is not.

    The decoder takes white space between values for a line's end, and a line's end within a value
    for white space. No JSON value has "}", a line's end and "{" one after the other: where each
    line begins and ends like that, each has an object or several.
    """
    if not (block.startswith(b"{") and block.endswith(b"}")):
        return None
    # bytes.count takes several times as long.
    characters = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(characters == LINE_END)
    is_between_objects = (characters[ends - 1] == ord("}")) & (
        characters[ends + 1] == ord("{")
    )
    if not is_between_objects.all():
        return None
    try:
        records = [record.text for record in _decoder(text_column).decode_lines(block)]
    except REFUSED:
        return None
    if len(records) != len(ends) + 1 or set(map(type, records)) != {str}:
        return None
    return records


@lru_cache(maxsize=8)
def _decoder(text_column: str) -> Any:
    fields = [("text", str | None | msgspec.UnsetType, msgspec.UNSET)]
    return msgspec.json.Decoder(
        msgspec.defstruct("Line", fields, rename={"text": text_column})
    )


def _parsed(line: bytes, text_column: str, name: Callable[[], str]) -> str | Fault:
    """The text of one line.

    It is what the faster parser gives, or, where that refuses it, the standard one.
    """
    try:
        text = _decoder(text_column).decode(line).text
        if isinstance(text, str):
            return text
    except REFUSED:
        pass
    try:
        value = DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return Fault(f"is not UTF-8 in {name()} (byte {error.start} of it)")
    except RecursionError:
        return Fault(f"has a {name()} that is nested too deeply")
    except ValueError:
        return Fault(f"has a {name()} that is not JSON")
    text = text_of(value, text_column, "this line")
    return text if isinstance(text, str) else text_of(value, text_column, name())


FORMATS = {"json": Json(), "jsonl": JsonLines()}
