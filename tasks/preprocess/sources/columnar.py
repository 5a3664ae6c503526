"""Parquet and Arrow files as texts: one column, in order and in bounded memory.

Read is the whole file, or some of its row groups or batches.
"""

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from infini_llama.configs.errors import one_line
from infini_llama.tasks.batches import batches
from infini_llama.tasks.machine import Machine, memory
from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.sources.remote import Ranges
from infini_llama.tasks.preprocess.sources.text_format import Content, Format, Open
from infini_llama.tasks.preprocess.sources.texts import (
    Batch,
    Span,
    TextRecords,
    Unreadable,
    as_text,
    in_batches,
    named_column,
)

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

AT_ONCE = 256  # rows
ARROW_FILE = b"ARROW1"
# Of available memory, a file that fits into it: a compressed batch is larger than the file.
LARGEST_PART = 16


class Parquet(Format):
    """Parquet. Spans are row groups."""

    damage = (pa.ArrowException,)

    def read(self, content: Content) -> Iterator[Batch]:
        return in_batches(_texts_of_row_groups(content))

    def spans(self, open_file: Open, size: int, most: int) -> list[Span] | None:
        with open_file() as file:
            table = _opened(file)
        groups = [_columns(table, number) for number in range(table.num_row_groups)]
        sizes = [
            sum(column.total_compressed_size for column in columns)
            for columns in groups
        ]
        return _ranges(sizes, most)


def _ranges(sizes: list[int], most: int) -> list[Span] | None:
    """Consecutive row groups or batches, together of about `most` bytes; None: all of them."""
    groups = list(batches(range(len(sizes)), sizes.__getitem__, most))
    return [(group[0], group[-1] + 1) for group in groups] if len(groups) > 1 else None


def _texts_of_row_groups(content: Content) -> TextRecords:
    with _seekable(content.stream) as file:
        table = _opened(file)
        _require_column(table.schema_arrow, content.text_column)
        first, last = content.span or (0, table.num_row_groups)

        def before() -> int:
            return sum(
                table.metadata.row_group(number).num_rows for number in range(first)
            )

        rows = table.iter_batches(
            batch_size=AT_ONCE,
            row_groups=list(range(first, last)),
            columns=[content.text_column],
        )
        yield from _texts(rows, content.text_column, before)


def _opened(file: IO[bytes]) -> "ParquetFile":
    """The file, whose pages are compared with their checksums where it has these.

    Raises:
        Unreadable: several parquet files one after another, of which the last footer would give the
            first file's rows.
    """
    # Only where there is such a file: it imports file systems.
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file, page_checksum_verification=True)
    except UnicodeDecodeError as error:
        raise _unreadable_name(error) from None
    column_ends = [
        (column.dictionary_page_offset or column.data_page_offset)
        + column.total_compressed_size
        for number in range(table.num_row_groups)
        for column in _columns(table, number)
    ]
    footer = file.seek(0, os.SEEK_END) - 8 - table.metadata.serialized_size
    start = min(max(column_ends, default=0), footer)
    file.seek(start)
    # One file's last bytes and the next one's first.
    if b"PAR1PAR1" in file.read(footer - start):
        raise Unreadable(
            "holds several parquet files, one after another; give each as a file of its own"
        )
    return table


def _columns(table: "ParquetFile", group_number: int) -> list[Any]:
    """The facts of each column of a row group."""
    group = table.metadata.row_group(group_number)
    return [group.column(number) for number in range(group.num_columns)]


class Arrow(Format):
    """Arrow files, whose spans are record batches, and streams, which have no table of these."""

    damage = (pa.ArrowException, EOFError)

    def read(self, content: Content) -> Iterator[Batch]:
        return in_batches(_texts_of_batches(content))

    def spans(self, open_file: Open, size: int, most: int) -> list[Span] | None:
        with open_file() as file:
            if not _is_arrow_file(file):
                return None
            count = pa.ipc.open_file(file).num_record_batches
        return _ranges([size // max(1, count)] * count, most)


def _texts_of_batches(content: Content) -> TextRecords:
    text_column = content.text_column
    with _seekable(content.stream) as file, _damaged_lengths(file):
        if not _is_arrow_file(file):
            yield from _texts(_streamed(file, text_column), text_column)
            return
        table = pa.ipc.open_file(file)
        _require_column(table.schema, text_column)
        first, last = content.span or (0, table.num_record_batches)

        def before() -> int:
            return sum(table.get_batch(number).num_rows for number in range(first))

        yield from _texts(map(table.get_batch, range(first, last)), text_column, before)


@contextmanager
def _damaged_lengths(file: IO[bytes]) -> Iterator[None]:
    """Tell a length in the file that no file of its size can have from too little memory.

    Raises:
        Unreadable: Arrow asks for more memory than there is, and the file is much smaller.
    """
    try:
        yield
    except MemoryError:
        size = file.seek(0, os.SEEK_END)
        if size < memory(Machine()).available // LARGEST_PART:
            raise Unreadable(
                "is damaged (it states a length beyond this machine's memory)"
            ) from None
        raise


def _is_arrow_file(file: IO[bytes]) -> bool:
    file.seek(0)
    is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
    file.seek(0)
    return is_file


def _streamed(file: IO[bytes], text_column: str) -> Iterator[pa.RecordBatch]:
    """The record batches of a stream, or of several streams one after the other."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    while True:
        reader = pa.ipc.open_stream(file)
        _require_column(reader.schema, text_column)
        while True:
            position = file.tell()
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                break
            yield batch
        if file.tell() == position:
            raise EOFError("an Arrow stream ends without its end-of-stream marker")
        if file.tell() >= end:
            return


def _texts(
    record_batches: Iterable[pa.RecordBatch],
    text_column: str,
    before: Callable[[], int] = int,
) -> TextRecords:
    """The texts of record batches.

    Args:
        before: counts the rows before the first one, for messages.
    """
    number = 0
    for batch in record_batches:
        column = batch.column(text_column)
        try:
            # to_pylist follows any offset, also out of the buffer.
            column.validate(full=True)
        except pa.ArrowException as error:
            place = f"in the rows from {before() + number + 1}"
            raise Unreadable(
                f"is damaged, or is not UTF-8, {place} ({one_line(error)})"
            ) from None
        for start in range(0, len(column), AT_ONCE):
            try:
                values = column.slice(start, AT_ONCE).to_pylist()
            except (ValueError, OverflowError, LookupError):
                # Python has no such time, time zone or dictionary.
                raise Unreadable(f"has {column.type} instead of text") from None
            for value in values:
                number += 1
                text = "" if value is None else value
                if isinstance(text, str):
                    yield text
                else:
                    yield as_text(text, f"row {before() + number}")


def _seekable(stream: IO[bytes]) -> IO[bytes]:
    """The file itself, or what it holds unpacked on disk: parquet is read from its end."""
    if isinstance(stream, io.BufferedReader) and isinstance(
        stream.raw, io.FileIO | Ranges
    ):
        return stream
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115  its reader closes it
    shutil.copyfileobj(stream, unpacked, texts.BLOCK)
    unpacked.seek(0)
    return unpacked


def _require_column(schema: pa.Schema, text_column: str) -> None:
    try:
        names = schema.names
    except UnicodeDecodeError as error:
        raise _unreadable_name(error) from None
    named_column(names, text_column)


def _unreadable_name(error: UnicodeDecodeError) -> Unreadable:
    return Unreadable(f"has a column whose name is not UTF-8 ({error.reason})")


FORMATS = {"parquet": Parquet(), "arrow": Arrow()}
