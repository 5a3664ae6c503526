"""CSV and TSV files as texts. A CSV has quotes as RFC 4180 says; in a TSV they are either that or text, in all of the file."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import IO

from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.sources.columnar import named_column
from infini_llama.tasks.preprocess.sources.texts import Fault, Records, Unreadable

READ = 2**16  # bytes at once
Row = tuple[int, list[str]]  # number of its first line, from 1, and its fields
Reopen = Callable[[], AbstractContextManager[IO[bytes]]]
TO_CLOSING_QUOTE = re.compile(r'[^"]*+(?:""[^"]*+)*+"')
DOUBLED = re.compile(r'[^"](?:"")+[^"]')  # not at an edge, where """ begins and ends texts of some languages


def read_csv(stream: IO[bytes], text_column: str) -> Records:
    """The texts of a CSV file.

    Raises:
        Unreadable: it has no such column, or a quote or character that makes no sense; the line is named.
    """
    return _texts(_rows(_lines(stream), ",", is_quoted=True), text_column)


def read_tsv(stream: IO[bytes], text_column: str, reopen: Reopen) -> Records:
    """The texts of a TSV file.

    Args:
        reopen: the stream from its beginning once more, in which all quotes are looked at where there are some.

    Raises:
        Unreadable: as of `read_csv` and `quotes_are_syntax`.
    """
    return _texts(_tsv_rows(_lines(stream), text_column, reopen), text_column)


def _tsv_rows(lines: Iterator[str], text_column: str, reopen: Reopen) -> Iterator[Row]:
    first_quote: list[str] = []  # the line with it

    def until_quote() -> Iterator[str]:
        for line in lines:
            if '"' in line:
                first_quote.append(line)
                return
            yield line

    before = 0
    for line, row in _rows(until_quote(), "\t", is_quoted=False):
        before = line
        yield line, row
    if first_quote:
        with reopen() as stream:
            is_quoted = quotes_are_syntax(_lines(stream), text_column)
        for line, row in _rows(chain(first_quote, lines), "\t", is_quoted):
            yield before + line, row


def _texts(rows: Iterator[Row], text_column: str) -> Records:
    _, header = next(rows, (0, list[str]()))
    column = named_column(header, text_column)
    for line, row in rows:
        if len(row) == len(header):
            yield row[column]
        elif row:
            yield Fault(f"has {len(row)} fields instead of {len(header)} in line {line}")


def _rows(lines: Iterable[str], delimiter: str, is_quoted: bool) -> Iterator[Row]:
    csv.field_size_limit(texts.LONGEST_RECORD)
    quoting = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    rows, line = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True), 1
    try:
        for row in rows:
            yield line, row
            line = rows.line_num + 1
    except csv.Error as error:
        raise Unreadable(f"is damaged in the record that begins in line {line} ({error})") from None


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines with their ends: line feeds, carriage returns, or both."""
    before = 0  # lines
    while data := stream.read(READ):
        if not data.endswith(b"\n"):
            data += stream.readline(texts.LONGEST_RECORD + 1)
        if len(data) > texts.LONGEST_RECORD and len(data.rpartition(b"\n")[2]) > texts.LONGEST_RECORD:
            line = before + _count(data) + 1
            raise Unreadable(f"has a line longer than {texts.LONGEST_RECORD:,} bytes (line {line})")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            good = data[: error.start]
            start = max(good.rfind(b"\n"), good.rfind(b"\r")) + 1
            raise Unreadable(
                f"is not UTF-8 in line {before + _count(good) + 1} (byte {error.start - start} of it)"
            ) from None
        yield from io.StringIO(text, newline="")
        before += _count(data)


def _count(data: bytes) -> int:
    """How many lines end in it."""
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def quotes_are_syntax(lines: Iterable[str], text_column: str) -> bool:
    """Whether the quotes of a TSV are those that pandas, Excel and other writers of tables put around fields; else they are text.

    Quotes are syntax only if each stands at a field's edge, or is doubled within quotes. If so, what is a record in one reading alone,
    with as many fields as the header, decides (or the header, by the name of the text's column). Else doubled quotes say that they are
    syntax, and quotes around what needs none that they are text. Where lines are one record or as many, a column of numbers has to have
    them in all of these lines. The memory is that of one line.

    Raises:
        Unreadable: some quotes are syntax only, and others text only; or nothing decides. Lines are named.
    """
    seen, record, names, width = _Evidence(), None, list[str](), 0
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r\n")
        if record is None and '"' not in line:
            names = names or line.split("\t")
            width = width or len(names)
            seen.bare_comma = seen.bare_comma or ("," in line and number)
            continue
        if not names:
            names = line.split("\t")
            if text_column not in names and any(content == text_column for _, content in _fields(line, False)[0]):
                seen.only_syntax = 1
        record = record or _Record(number, len(names))
        if not record.add(line):
            seen.broken = number
            break
        if not record.is_open:
            width = width or record.fields
            seen.add(record, record.fields == width, names.index(text_column) if text_column in names else 0)
            record = None
    else:
        seen.broken = record.first if record else 0
    return seen.are_syntax()


def _fields(line: str, is_open: bool) -> tuple[list[tuple[bool, str]], bool | None]:
    """The fields of a line with quotes as syntax, and whether the last one goes on in the next line; None: a quote is no syntax.

    Args:
        is_open: its first field goes on from the line before.

    Returns:
        for each field whether it is quoted, and what it holds, with doubled quotes as they are.
    """
    fields: list[tuple[bool, str]] = []
    place = -1
    while place < len(line):
        if is_open or line.startswith('"', place + 1):
            start = place + 1 + (not is_open)
            closing = TO_CLOSING_QUOTE.match(line, start)
            if closing is None:
                return [*fields, (True, line[start:])], True
            fields.append((True, closing[0][:-1]))
            place = closing.end()
            if place < len(line) and line[place] != "\t":
                return fields, None
        else:
            start, tab = place + 1, line.find("\t", place + 1)
            place = tab if tab >= 0 else len(line)
            fields.append((False, line[start:place]))
            if '"' in fields[-1][1]:
                return fields, None
        is_open = False
    return fields, False


class _Record:
    """A record with quotes, line by line.

    Attributes:
        first, last: its lines.
        fields: how many it has with quotes as syntax, so far.
        is_open: whether the last of them goes on in the next line.
        is_lines: whether each line that is not blank is a record by itself, with quotes as text.
        lines: how many lines are not blank, while `is_lines`.
        numbers: in how many of them each field is a number, if it has several lines.
        is_doubled, is_needless, is_for_comma, has_bare_comma: as of `_Evidence`.
    """

    def __init__(self, first: int, width: int) -> None:
        """width: fields of the header, with quotes as text."""
        self.first, self.last, self.width = first, first - 1, width
        self.fields = self.lines = 0
        self.is_open, self.is_lines = False, True
        self.numbers = [0] * width
        self.is_doubled = self.is_needless = self.is_for_comma = self.has_bare_comma = False

    def add(self, line: str) -> bool:
        """Take the next line, without its end; False: it has a quote that is no syntax."""
        was_open, stays_open = self.is_open, self.is_open
        if '"' in line:
            fields, stays_open = _fields(line, was_open)
            self.fields += len(fields) - was_open
            last = len(fields) - 1
            for number, (is_quoted, content) in enumerate(fields):
                if not is_quoted:
                    self.has_bare_comma |= "," in content
                elif '"' in content:
                    self.is_doubled |= bool(DOUBLED.search(content))
                elif (
                    content
                    and "\t" not in content
                    and not ((was_open and number == 0) or (stays_open and number == last))
                ):
                    self.is_for_comma |= "," in content
                    self.is_needless |= "," not in content
        self.is_open, self.last = bool(stays_open), self.last + 1
        if line and self.is_lines:
            self.lines += 1
            self.is_lines = line.count("\t") + 1 == self.width
            if self.is_lines and (was_open or stays_open):
                cells = line.split("\t")
                self.numbers = [count + _is_number(cell) for count, cell in zip(self.numbers, cells, strict=True)]
        return stays_open is not None


def _is_number(text: str) -> bool:
    try:
        return bool(float(text)) or True
    except ValueError:
        return False


@dataclass
class _Evidence:
    """What the quotes of a TSV say about themselves: the first line that says it, 0 where none does.

    Attributes:
        broken: a quote where no writer of tables puts one: within a field, behind the closing one, or never closed.
        only_syntax, only_text: what is a record in this reading alone.
        doubled: two quotes for one.
        needless: quotes around a field that needs none.
        for_comma: quotes around a field that needs them in Excel alone, which puts them wherever there is a comma.
        bare_comma: a comma in a field without quotes.
        either: a record of several lines that are records by themselves with quotes as text; either_end: its last line.
        all_numbers, some_numbers: such a record, where another column than that of the text has numbers in all lines, or in some.
    """

    broken: int = 0
    only_syntax: int = 0
    only_text: int = 0
    doubled: int = 0
    needless: int = 0
    for_comma: int = 0
    bare_comma: int = 0
    either: int = 0
    either_end: int = 0
    all_numbers: int = 0
    some_numbers: int = 0

    def add(self, record: _Record, is_record: bool, text_place: int) -> None:
        """Take a whole record.

        Args:
            is_record: whether it has as many fields as the header, with quotes as syntax.
            text_place: of the column of the text, with quotes as text.
        """
        line = record.first
        self.doubled = self.doubled or record.is_doubled * line
        self.needless = self.needless or record.is_needless * line
        self.for_comma = self.for_comma or record.is_for_comma * line
        self.bare_comma = self.bare_comma or record.has_bare_comma * line
        if is_record != record.is_lines:
            self.only_syntax = self.only_syntax or is_record * line
            self.only_text = self.only_text or record.is_lines * line
        elif is_record and record.lines > 1:
            if not self.either:
                self.either, self.either_end = line, record.last
            numbers = {count for place, count in enumerate(record.numbers) if place != text_place and count}
            self.all_numbers = self.all_numbers or (record.lines in numbers) * line
            self.some_numbers = self.some_numbers or bool(numbers - {record.lines}) * line

    def are_syntax(self) -> bool:
        """As of `quotes_are_syntax`."""
        syntax, text = self.only_syntax or self.doubled, self.broken or self.only_text
        if syntax and text:
            raise Unreadable(
                f"has quotes that are neither all around fields, as pandas and Excel put them (line {text} has others), nor all text "
                f"(line {syntax} has others)"
            )
        is_needless = bool(self.needless or (self.for_comma and self.bare_comma)) and not self.doubled
        if text or self.only_syntax or is_needless or not self.either:
            return not (text or is_needless)
        if self.all_numbers and not self.some_numbers and not self.doubled:
            return False
        if not self.all_numbers and (self.some_numbers or self.doubled):
            return True
        raise Unreadable(
            f"can be read in two ways: the quote that line {self.either} opens is closed in line {self.either_end}, and each of these "
            "lines is a record by itself; save it as JSON lines"
        )
