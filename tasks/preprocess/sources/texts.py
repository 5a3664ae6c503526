"""The result of reading a file: texts in order, and what is wrong with some.

A text that is too long is several.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from infini_llama.configs.errors import escaped
from infini_llama.tasks.batches import batches

LONGEST_DOCUMENT = 16 * 2**20  # bytes; a longer text is read as several documents
# Characters without whitespace: `tokenizers` takes 145 bytes of memory for each.
LONGEST_UNBROKEN = 4 * 2**20
LONGEST_RECORD = 256 * 2**20  # bytes of one line or JSON value
BLOCK = 2**20
FIELDS_NAMED = 10  # of an object without text, in the message


class Unreadable(Exception):
    """The file as a whole is bad: nothing of it is used. The message completes '<file> …'."""


class Refused(Exception):
    """The file is not bad, and yet its text is not here: it is not skipped.

    The message completes '<file> …'.
    """


@dataclass(frozen=True)
class Fault:
    """One bad record among good ones.

    Attributes:
        reason: completes '<file> …'.
        is_unreachable: it could not be read, and may be at another time.
    """

    reason: str
    is_unreachable: bool = False


TextRecords = Iterator[str | Fault]
Batch = Sequence[str | Fault]  # records in order
# A range of bytes, row groups, record batches or rows: the first, and the one after the last.
Span = tuple[int, int]
Stamp = tuple[Any, ...]  # values of a file that change with its text
# Bytes that a record counts in a batch beside its text, so that short ones fill it.
PER_RECORD = BLOCK // 1024


def are_short(texts: Iterable[str]) -> bool:
    """Whether each text is one document by its number of characters, whatever they are."""
    return max(map(len, texts), default=0) <= min(
        LONGEST_DOCUMENT // 4, LONGEST_UNBROKEN
    )


def documents_of(text: str) -> Iterator[str | Fault]:
    """The text, or several where it is longer than a document may be.

    A Fault stands for one that no tokenizer can take in parts.
    """
    most_bytes = len(text) if text.isascii() else len(text) * 4
    if most_bytes <= LONGEST_DOCUMENT or len(text.encode()) <= LONGEST_DOCUMENT:
        yield _refuse_unbroken(text)
        return
    data = text.encode()
    while data:
        end = (
            cut(data[: LONGEST_DOCUMENT + 1])
            if len(data) > LONGEST_DOCUMENT
            else len(data)
        )
        yield _refuse_unbroken(data[:end].decode())
        data = data[end:]


def _refuse_unbroken(text: str) -> str | Fault:
    """The text, or a Fault where more than LONGEST_UNBROKEN of its characters have no whitespace.

    So many characters would fill one of the windows that are looked at first: splitting takes a
    hundred bytes per word.
    """
    if len(text) <= LONGEST_UNBROKEN:
        return text
    window = LONGEST_UNBROKEN // 2
    is_unbroken = any(
        text.find(" ", first, first + window) < 0
        and text.find("\n", first, first + window) < 0
        for first in range(0, len(text) - window + 1, window)
    )
    if is_unbroken and max(map(len, text.split()), default=0) > LONGEST_UNBROKEN:
        return Fault(
            f"has a text with more than {LONGEST_UNBROKEN:,} characters without whitespace"
        )
    return text


def cut(data: bytes) -> int:
    """The place at which a text that is too long ends.

    It is after the last line that fits, or else between two characters.
    """
    line_end = data.rfind(b"\n", 0, LONGEST_DOCUMENT)
    if line_end >= 0:
        return line_end + 1
    end = LONGEST_DOCUMENT
    while end > LONGEST_DOCUMENT - 4 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def in_batches(records: TextRecords) -> Iterator[Batch]:
    """The same records, about a megabyte at a time.

    A text that is too long for one document is several.
    """

    def size(document: str | Fault) -> int:
        return PER_RECORD + (len(document) if isinstance(document, str) else 0)

    documents = (
        (record,) if isinstance(record, Fault) else documents_of(record)
        for record in records
    )
    return batches(chain.from_iterable(documents), size, BLOCK)


def text_of(value: Any, text_column: str, place: str) -> str | Fault:
    """The text of one JSON value: a string, or the named field of an object."""
    if isinstance(value, dict):
        if text_column not in value:
            fields = ", ".join(islice(value, FIELDS_NAMED)) or "none"
            return Fault(
                f"has no field '{text_column}' in {place} (it has {escaped(fields)}); "
                "name the one with the text in data.text_column"
            )
        value = value[text_column]
    return as_text("" if value is None else value, place)


def as_text(value: Any, place: str) -> str | Fault:
    """The value, or a Fault where it is no text, or no Unicode text."""
    if not isinstance(value, str):
        return Fault(f"has {type(value).__name__} instead of text in {place}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return Fault(f"has half a character (a lone surrogate) in {place}")
    return value


def named_column(names: list[str], text_column: str) -> int:
    """The place of the column with this name.

    Raises:
        Unreadable: there is none, or several.
    """
    if text_column not in names:
        columns = escaped(", ".join(f"'{name}'" for name in names)) or "none"
        raise Unreadable(
            f"has no column '{text_column}' (it has {columns}); "
            "name the one with the text in data.text_column"
        )
    count = names.count(text_column)
    if count > 1:
        raise Unreadable(
            f"has {count} columns '{text_column}'; rename all but the one with the text"
        )
    return names.index(text_column)
