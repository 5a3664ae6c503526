"""Files of JSON lines as texts, in order and in bounded memory: the whole file, or the lines that begin in a range of its bytes."""

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import IO, Any

import msgspec
import numpy as np

from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.sources.texts import Batch, Fault, in_batches, text_of

Bytes = tuple[int, int]  # first byte, and the byte after the last
NEWLINE, OPEN, CLOSE = b"\n{}"


def line_batches(stream: IO[bytes], text_column: str, span: Bytes | None = None) -> Iterator[Batch]:
    """The records of lines of JSON, about a megabyte of lines at a time.

    Args:
        span: only the lines that begin in these bytes of a seekable stream; two spans that meet share no line and lose none.
    """
    first, last = span or (0, None)
    if first:
        stream.seek(first - 1)
        first += _skip_line(stream) - 1
    number = 0  # of lines from `first` on
    for lines in _whole_lines(stream, first, last):
        if isinstance(lines, int):
            number += 1
            place = _line(stream, first, number)
            yield [Fault(f"has a line longer than {texts.LONGEST_RECORD:,} bytes ({place})")]
            continue
        if (found := _parsed_together(lines, text_column)) is not None:
            longest = max(map(len, found))
            is_short = longest * 4 <= texts.LONGEST_DOCUMENT and longest <= texts.LONGEST_WORD
            yield from (found,) if is_short else in_batches(iter(found))
            number += len(found)
        else:
            several = lines.split(b"\n")
            named = ((line, partial(_line, stream, first, own)) for own, line in enumerate(several, number + 1))
            yield from in_batches(_parsed(line, text_column, name) for line, name in named if line.strip())
            number += len(several)


def _skip_line(stream: IO[bytes]) -> int:
    """Reads past the end of a line; returns how many bytes that are."""
    skipped = 0
    while line := stream.readline(texts.BLOCK):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def _whole_lines(stream: IO[bytes], place: int, last: int | None) -> Iterator[bytes | int]:
    """Lines that begin before byte `last`, about a megabyte at a time, without the last one's end; a number for a line that is too long.

    Args:
        place: byte at which the stream stands.
    """
    while last is None or place < last:
        data = stream.read(texts.BLOCK if last is None else min(texts.BLOCK, last - place))
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
    """Names a line for a message: the `number`th of those from byte `first` on."""
    if first:
        place, left = stream.tell(), first
        stream.seek(0)
        while left and (data := stream.read(min(left, texts.BLOCK))):
            number, left = number + data.count(b"\n"), left - len(data)
        stream.seek(place)
    return f"line {number}"


def _parsed_together(lines: bytes, text_column: str) -> list[str] | None:
    """The texts of lines each of which is an object with text; None where one is not, or may not be.

    The parser takes any white space between values. No value has `}`, a line end and `{` in a row: not in a string, which has no line
    end, and not between two members, which have a comma between them. So where all lines meet like that, none is part of a value,
    and where there are as many values as lines, each line is one.
    """
    characters = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(characters == NEWLINE)
    if not lines.startswith(b"{") or not lines.endswith(b"}"):
        return None
    if not (characters[ends - 1] == CLOSE).all() or not (characters[ends + 1] == OPEN).all():
        return None
    try:
        found = [record.text for record in _decoder(text_column).decode_lines(lines)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if len(found) == len(ends) + 1 and set(map(type, found)) == {str} else None


@lru_cache(maxsize=8)
def _decoder(text_column: str) -> Any:
    fields = [("text", str | None | msgspec.UnsetType, msgspec.UNSET)]
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, rename={"text": text_column}))


def _parsed(line: bytes, text_column: str, name: Callable[[], str]) -> str | Fault:
    """The text of one line: by the faster parser, or, where that refuses it, as the standard one sees it."""
    try:
        if isinstance(text := _decoder(text_column).decode(line).text, str):
            return text
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        value = json.loads(line.decode("utf-8-sig" if line.startswith(BOM_UTF8) and name() == "line 1" else "utf-8"))
    except UnicodeDecodeError as error:
        return Fault(f"is not UTF-8 in {name()} (byte {error.start} of it)")
    except (ValueError, RecursionError):
        return Fault(f"has a {name()} that is not JSON")
    found = text_of(value, text_column, "this line")
    return found if isinstance(found, str) else text_of(value, text_column, name())
