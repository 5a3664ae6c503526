"""CSV and TSV files as texts.

A CSV has quotes as RFC 4180 says. In a TSV they are either that or text, in all of the file.
"""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from functools import cache
from itertools import chain
from typing import IO

from infini_llama.configs.errors import escaped
from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.sources.text_format import Content, Format
from infini_llama.tasks.preprocess.sources.texts import (
    Batch,
    Fault,
    Unreadable,
    are_short,
    in_batches,
    named_column,
)

READ = 2**16  # bytes at once
DELIMITERS = {"\t": "tabs", ";": "semicolons", "|": "vertical bars", ",": "commas"}
OF_FORMATS = {",": "csv", "\t": "tsv"}
HEADER_SHOWN = 100  # characters in a message
Block = tuple[int, str]  # number of its first line, from 1, and whole lines
# The number of each one's first line, and its fields; none of an empty line.
Rows = tuple[Sequence[int], list[list[str]]]
TO_CLOSING_QUOTE = re.compile(r'[^"]*+(?:""[^"]*+)*+"')
# Not at an edge, where """ begins and ends texts of some languages.
DOUBLED = re.compile(r'[^"](?:"")+[^"]')


class Delimited(Format):
    """Rows of fields. Quotes of a CSV are syntax; for those of a TSV, see `quotes_are_syntax`."""

    def __init__(self, delimiter: str) -> None:
        self.delimiter = delimiter

    def read(self, content: Content) -> Iterator[Batch]:
        @cache
        def are_syntax() -> bool:
            if self.delimiter == ",":
                return True
            with content.reopen() as again:
                return quotes_are_syntax(_blocks(again), text_column)

        text_column = content.text_column
        blocks = _of_delimiter(_blocks(content.stream), self.delimiter, text_column)
        return _texts(_rows(blocks, self.delimiter, are_syntax), text_column)


def _of_delimiter(
    blocks: Iterator[Block], delimiter: str, text_column: str
) -> Iterator[Block]:
    """The same blocks, from the header on: before it, too, empty lines are no rows.

    Raises:
        Unreadable: see `_refuse_other_delimiter`.
    """
    for number, block in blocks:
        text = block.lstrip("\r\n")
        if text:
            _refuse_other_delimiter(text.splitlines()[0], delimiter, text_column)
            empty_lines = block.removesuffix(text).splitlines()
            yield number + len(empty_lines), text
            break
    yield from blocks


def _refuse_other_delimiter(header: str, delimiter: str, text_column: str) -> None:
    """Refuse a file whose header has another delimiter.

    Raises:
        Unreadable: the header is one field by this delimiter, and several by another one; or the
            text's column is among these alone.
    """
    if header.lower().startswith("sep="):
        raise Unreadable(
            "begins with Excel's line 'sep=', which is no header; remove this line"
        )
    columns = {
        mark: [column.strip().strip('"') for column in header.split(mark)]
        for mark in DELIMITERS
    }
    own = columns.pop(delimiter)
    for other, names in columns.items():
        has_text_alone = text_column in names and text_column not in own
        if len(names) == 1 or (len(own) > 1 and not has_text_alone):
            continue
        cure = f"save it with {DELIMITERS[delimiter]}, or as JSON lines"
        if other in OF_FORMATS:
            form = OF_FORMATS[other]
            cure = f"set data.format={form}, or let its name end with .{form}"
        raise Unreadable(
            f"has fields between {DELIMITERS[other]}, not {DELIMITERS[delimiter]} "
            f"(its first line is '{escaped(header[:HEADER_SHOWN])}'); {cure}"
        )


def _texts(table: Iterator[Rows], text_column: str) -> Iterator[Batch]:
    """The texts of rows, of which the first one is the header."""
    first_lines, first_rows = next(table, ([0], [list[str]()]))
    header = first_rows[0]
    column = named_column(header, text_column)
    width = len(header)

    def record(number: int, row: list[str]) -> str | Fault:
        if len(row) != width:
            return Fault(f"has {len(row)} fields instead of {width} in line {number}")
        # In a single column, it may be a word of the text.
        if width > 1 and row == header:
            return Fault(f"repeats the header in line {number}, as joined files do")
        return row[column]

    for numbers, rows in chain([(first_lines[1:], first_rows[1:])], table):
        if set(map(len, rows)) == {width} and header not in rows:
            batch = [row[column] for row in rows]
            if are_short(batch):
                yield batch
                continue
        yield from in_batches(
            record(number, row)
            for number, row in zip(numbers, rows, strict=True)
            if row
        )


def _rows(
    blocks: Iterator[Block],
    delimiter: str,
    are_syntax: Callable[[], bool],
) -> Iterator[Rows]:
    """The rows of blocks, several at a time.

    A line in which no quote is syntax is a row, which needs no reader of quotes.

    Args:
        are_syntax: whether quotes are; called only where there are some.
    """
    for number, text in blocks:
        if '"' in text and are_syntax():
            yield from _quoted_rows(number, text, blocks, delimiter)
        else:
            yield _plain_rows(number, text, delimiter)


def _plain_rows(number: int, text: str, delimiter: str) -> Rows:
    """The rows of lines in which no quote is syntax; the first line has this number."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.removesuffix("\n").split("\n")
    rows = [line.split(delimiter) if line else [] for line in lines]
    return range(number, number + len(lines)), rows


def _quoted_rows(
    first: int,
    text: str,
    blocks: Iterator[Block],
    delimiter: str,
) -> Iterator[Rows]:
    """The rows of a block with quotes, and of those after it.

    The last one is the first block with which a row ends.
    """
    csv.field_size_limit(texts.LONGEST_RECORD)
    lines_read = 0
    lines_at_yield = 0

    def lines() -> Iterator[str]:
        nonlocal lines_read
        for _, block in chain([(first, text)], blocks):
            of_block = list(io.StringIO(block, newline=""))
            lines_read += len(of_block)
            yield from of_block

    numbers = list[int]()
    rows = list[list[str]]()
    number = first
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            numbers.append(number)
            rows.append(row)
            number = first + reader.line_num
            if reader.line_num == lines_read:
                break
            lines_at_yield = lines_at_yield or lines_read
            if lines_read > lines_at_yield:
                # A row is open across blocks, perhaps at the end of each one.
                yield numbers, rows
                numbers = []
                rows = []
                lines_at_yield = lines_read
    except csv.Error as error:
        raise Unreadable(
            f"is damaged in the record that begins in line {number} ({error})"
        ) from None
    yield numbers, rows


def _blocks(stream: IO[bytes]) -> Iterator[Block]:
    """Lines with their ends, about READ bytes at a time: line feeds, carriage returns, or both."""
    longest = texts.LONGEST_RECORD
    number = 1
    while data := stream.read(READ):
        if not data.endswith(b"\n"):
            data += stream.readline(longest + 1)
        if len(data) > longest and len(data.rpartition(b"\n")[2]) > longest:
            raise Unreadable(
                f"has a line longer than {texts.LONGEST_RECORD:,} bytes "
                f"(line {number + _count(data)})"
            )
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            good = data[: error.start]
            start = max(good.rfind(b"\n"), good.rfind(b"\r")) + 1
            raise Unreadable(
                f"is not UTF-8 in line {number + _count(good)} (byte {error.start - start} of it)"
            ) from None
        yield number, text
        number += _count(data)


def _count(data: bytes) -> int:
    """Number of lines that end in `data`."""
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def quotes_are_syntax(blocks: Iterator[Block], text_column: str) -> bool:
    """Whether the quotes of a TSV are syntax: those that writers of tables put around fields.

    Such writers are pandas, Excel and others. Else the quotes are text.

    Quotes are syntax only if each stands at a field's edge, or is doubled within quotes. If so,
    what is a record in one reading alone, with as many fields as the header, decides (or the
    header, by the name of the text's column). Else doubled quotes say that they are syntax, and
    quotes around what needs none that they are text. Where lines are one record or as many, a
    column of numbers has to have them in all of these lines. The memory is that of one line.
    No shorter rule with the same outcome is known: to compare with what a writer would write again
    needs the same signs.

    Raises:
        Unreadable: some quotes are syntax only, and others text only; or nothing decides. Lines are
            named.
    """
    seen = _Evidence()
    record: _Record | None = None
    names = list[str]()
    width = 0

    def is_plain(first: int, text: str) -> bool:
        if record or not names or '"' in text:
            return False
        comma = -1 if _Sign.BARE_COMMA in seen.lines else text.find(",")
        if comma >= 0:
            seen.lines[_Sign.BARE_COMMA] = first + _count(text[:comma].encode())
        return True

    of_interest = (block for block in blocks if not is_plain(*block))
    lines = chain.from_iterable(
        enumerate(io.StringIO(text, newline=""), first) for first, text in of_interest
    )
    for number, line in lines:
        line = line.rstrip("\r\n")
        if record is None and '"' not in line:
            names = names or line.split("\t")
            width = width or len(names)
            if "," in line:
                seen.lines.setdefault(_Sign.BARE_COMMA, number)
            continue
        if not names:
            names = line.split("\t")
            quoted_names = [content for _, content in _fields(line, False)[0]]
            if text_column in quoted_names and text_column not in names:
                seen.lines[_Sign.ONLY_SYNTAX] = 1
        record = record or _Record(number, len(names))
        if not record.add(line):
            seen.lines[_Sign.BROKEN] = number
            break
        if not record.is_open:
            width = width or record.fields
            text_place = names.index(text_column) if text_column in names else 0
            seen.add(record, record.fields == width, text_place)
            record = None
    else:
        if record:
            seen.lines[_Sign.BROKEN] = record.first
    return seen.are_syntax()


def _fields(line: str, is_open: bool) -> tuple[list[tuple[bool, str]], bool | None]:
    """The fields of a line with quotes as syntax.

    Args:
        is_open: its first field continues one of the line before.

    Returns:
        for each field whether it is quoted, and what it holds, with doubled quotes as they are; and
        whether the last one continues in the next line (None: a quote is no syntax).
    """
    fields: list[tuple[bool, str]] = []
    place = -1
    while place < len(line):
        if is_open or line.startswith('"', place + 1):
            start = place + 1 if is_open else place + 2
            closing = TO_CLOSING_QUOTE.match(line, start)
            if closing is None:
                return [*fields, (True, line[start:])], True
            fields.append((True, closing[0][:-1]))
            place = closing.end()
            if place < len(line) and line[place] != "\t":
                return fields, None
        else:
            start = place + 1
            tab = line.find("\t", start)
            place = tab if tab >= 0 else len(line)
            content = line[start:place]
            fields.append((False, content))
            if '"' in content:
                return fields, None
        is_open = False
    return fields, False


class _Record:
    """A record with quotes, line by line.

    Attributes:
        first, last: its lines.
        fields: how many it has with quotes as syntax, so far.
        is_open: whether the last of them continues in the next line.
        is_lines: whether each line that is not empty is a record by itself, with quotes as text.
        lines: how many lines are not empty, while `is_lines`.
        numbers: in how many of them each field is a number, if it has several lines.
        signs: what its quotes and commas say, of `_Sign`.
    """

    def __init__(self, first: int, width: int) -> None:
        """Begin a record in line `first`.

        Args:
            width: fields of the header, with quotes as text.
        """
        self.first = first
        self.last = first - 1
        self.width = width
        self.fields = 0
        self.lines = 0
        self.is_open = False
        self.is_lines = True
        self.numbers = [0] * width
        self.signs = set[_Sign]()

    def add(self, line: str) -> bool:
        """Take the next line, without its end; False: it has a quote that is no syntax."""
        was_open = self.is_open
        stays_open: bool | None = was_open
        if '"' in line:
            fields, stays_open = _fields(line, was_open)
            self.fields += len(fields) - 1 if was_open else len(fields)
            last = len(fields) - 1
            for number, (is_quoted, content) in enumerate(fields):
                continues = (was_open and number == 0) or (
                    stays_open and number == last
                )
                if is_quoted and '"' in content:
                    if DOUBLED.search(content):
                        self.signs.add(_Sign.DOUBLED)
                elif is_quoted and content and "\t" not in content and not continues:
                    self.signs.add(
                        _Sign.FOR_COMMA if "," in content else _Sign.NEEDLESS
                    )
                elif not is_quoted and "," in content:
                    self.signs.add(_Sign.BARE_COMMA)
        self.is_open = bool(stays_open)
        self.last += 1
        if line and self.is_lines:
            self.lines += 1
            self.is_lines = line.count("\t") + 1 == self.width
            if self.is_lines and (was_open or stays_open):
                for place, cell in enumerate(line.split("\t")):
                    if _is_number(cell):
                        self.numbers[place] += 1
        return stays_open is not None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Sign(Enum):
    """A sign of what the quotes of a TSV are."""

    # A quote where no writer of tables puts one: within a field, after the closing one, or never
    # closed.
    BROKEN = auto()
    # A record in this reading alone.
    ONLY_SYNTAX = auto()
    ONLY_TEXT = auto()
    # Two quotes for one.
    DOUBLED = auto()
    # Quotes around a field that needs none.
    NEEDLESS = auto()
    # Quotes around a field that needs them in Excel alone, which puts them wherever there is a
    # comma, and a comma in a field without quotes.
    FOR_COMMA = auto()
    BARE_COMMA = auto()
    # A record of several lines that are records by themselves with quotes as text, and such a
    # record where another column than that of the text has numbers in all lines, or in some.
    EITHER = auto()
    ALL_NUMBERS = auto()
    SOME_NUMBERS = auto()


class _Evidence:
    """Evidence about the quotes of a TSV.

    Attributes:
        lines: the first line with each sign.
        either_end: the last line of the first record with `EITHER`.
    """

    def __init__(self) -> None:
        self.lines: dict[_Sign, int] = {}
        self.either_end = 0

    def add(self, record: _Record, is_record: bool, text_place: int) -> None:
        """Take a whole record.

        Args:
            is_record: whether it has as many fields as the header, with quotes as syntax.
            text_place: of the column of the text, with quotes as text.
        """
        signs = set(record.signs)
        if is_record and not record.is_lines:
            signs.add(_Sign.ONLY_SYNTAX)
        elif record.is_lines and not is_record:
            signs.add(_Sign.ONLY_TEXT)
        elif is_record and record.lines > 1:
            signs.add(_Sign.EITHER)
            self.either_end = self.either_end or record.last
            counts = [*record.numbers[:text_place], *record.numbers[text_place + 1 :]]
            if record.lines in counts:
                signs.add(_Sign.ALL_NUMBERS)
            if any(count not in (0, record.lines) for count in counts):
                signs.add(_Sign.SOME_NUMBERS)
        for sign in signs:
            self.lines.setdefault(sign, record.first)

    def are_syntax(self) -> bool:
        """Whether the quotes are syntax; see `quotes_are_syntax`."""
        line = defaultdict[_Sign, int](int, self.lines)
        only_syntax = line[_Sign.ONLY_SYNTAX]
        is_doubled = _Sign.DOUBLED in self.lines
        syntax = only_syntax or line[_Sign.DOUBLED]
        text = line[_Sign.BROKEN] or line[_Sign.ONLY_TEXT]
        if syntax and text:
            raise Unreadable(
                "has quotes that are neither all around fields, as pandas and Excel put them "
                f"(line {text} has others), nor all text (line {syntax} has others)"
            )
        is_bare_in_part = {_Sign.FOR_COMMA, _Sign.BARE_COMMA} <= self.lines.keys()
        is_needless = (
            _Sign.NEEDLESS in self.lines or is_bare_in_part
        ) and not is_doubled
        if text or only_syntax:
            return not text
        if is_needless or _Sign.EITHER not in self.lines:
            return not is_needless
        is_text = _Sign.ALL_NUMBERS in self.lines
        is_syntax = _Sign.SOME_NUMBERS in self.lines or is_doubled
        if is_text != is_syntax:
            return is_syntax
        raise Unreadable(
            f"can be read in two ways: the quote that line {line[_Sign.EITHER]} opens is closed in "
            f"line {self.either_end}, and each of these lines is a record by itself; "
            "save it as JSON lines"
        )


FORMATS = {"csv": Delimited(","), "tsv": Delimited("\t")}
