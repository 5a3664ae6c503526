"""Parquet and Arrow files as texts: one column, row by row, in bounded memory."""

import io
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from infini_llama.configs.errors import escaped
from infini_llama.tasks.preprocess.sources import texts as records
from infini_llama.tasks.preprocess.sources.remote import Ranges
from infini_llama.tasks.preprocess.sources.texts import Records, Unreadable, as_text

AT_ONCE = 256  # rows
ARROW_FILE = b"ARROW1"


def read_parquet(stream: IO[bytes], text_column: str) -> Records:
    with _seekable(stream) as file:
        table = _opened(file)
        _refuse_concatenated(file, table.metadata)
        named_column(table.schema_arrow.names, text_column)
        yield from _batches(table.iter_batches(batch_size=AT_ONCE, columns=[text_column]), text_column)


def _opened(file: IO[bytes]) -> pyarrow.parquet.ParquetFile:
    """The file, whose pages are compared with their checksums where it has these."""
    return pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)


def _refuse_concatenated(file: IO[bytes], metadata: pyarrow.parquet.FileMetaData) -> None:
    """Raise Unreadable for several parquet files behind one another: the last footer's offsets would give the first file's rows."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    ends = [(c.dictionary_page_offset or c.data_page_offset) + c.total_compressed_size for c in columns]
    start = max(ends, default=len(b"PAR1"))
    footer = file.seek(0, os.SEEK_END) - 8 - metadata.serialized_size
    file.seek(min(start, footer))
    if b"PAR1PAR1" in file.read(max(0, footer - start)):  # of one file's end and the next one's start
        raise Unreadable("holds several parquet files behind one another; give each as a file of its own")


def parquet_rows(file: IO[bytes], text_column: str, rows: Iterator[int]) -> Records:
    """These rows, ascending; row groups without one are not read."""
    table = _opened(file)
    named_column(table.schema_arrow.names, text_column)
    sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    ends = np.cumsum(sizes)
    for group, several in groupby(rows, key=lambda row: int(np.searchsorted(ends, row, side="right"))):
        first = int(ends[group]) - sizes[group]
        batches = table.iter_batches(batch_size=AT_ONCE, row_groups=[group], columns=[text_column])
        yield from _rows(batches, text_column, several, first)


def arrow_rows(file: IO[bytes], text_column: str, rows: Iterator[int]) -> Records:
    """These rows, ascending; batches without one are not decoded."""
    yield from _rows(_arrow_batches(file, text_column), text_column, rows)


def _rows(batches: Iterable[pa.RecordBatch], text_column: str, rows: Iterator[int], first: int = 0) -> Records:
    """These rows of the batches, ascending; `first`: number of the first batch's first row."""
    following = next(rows, None)
    for batch in batches:
        if following is None:
            return
        if following < first + len(batch):
            values = list(_batches([batch], text_column, first))
            while following is not None and following < first + len(batch):
                yield values[following - first]
                following = next(rows, None)
        first += len(batch)


def read_arrow(stream: IO[bytes], text_column: str) -> Records:
    with _seekable(stream) as file:
        yield from _batches(_arrow_batches(file, text_column), text_column)


def _arrow_batches(file: IO[bytes], text_column: str) -> Iterator[pa.RecordBatch]:
    """The record batches of an Arrow file, of a stream, or of several streams one after the other."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(len(ARROW_FILE)) == ARROW_FILE:
        pa.ipc.open_file(file)  # checks the footer
        file.seek(end - len(ARROW_FILE) - 4)
        end -= int.from_bytes(file.read(4), "little") + len(ARROW_FILE) + 4
        file.seek(8)  # an Arrow file is one stream between its first 8 bytes and its footer
    else:
        file.seek(0)
    while True:
        reader = pa.ipc.open_stream(file)
        named_column(reader.schema.names, text_column)
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


def _batches(batches: Iterable[pa.RecordBatch], text_column: str, number: int = 0) -> Records:
    for batch in batches:
        column = batch.column(text_column)
        for start in range(0, len(column), AT_ONCE):
            try:
                values = column.slice(start, AT_ONCE).to_pylist()
            except UnicodeDecodeError as error:
                raise Unreadable(f"is not UTF-8 in the rows from {number + 1} ({error.reason})") from None
            for value in values:
                number += 1
                yield as_text("" if value is None else value, f"row {number}")


def _seekable(stream: IO[bytes]) -> IO[bytes]:
    """The file itself, or what it holds unpacked on disk: parquet is read from its end."""
    if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO | Ranges):
        return stream
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115  its reader closes it
    shutil.copyfileobj(stream, unpacked, records.BLOCK)
    unpacked.seek(0)
    return unpacked


def named_column(names: list[str], text_column: str) -> int:
    if text_column not in names:
        known = escaped(", ".join(names)) or "none"
        raise Unreadable(
            f"has no column '{text_column}' (it has {known}); name the one with the text in data.text_column"
        )
    if (count := names.count(text_column)) > 1:
        raise Unreadable(f"has {count} columns '{text_column}'; rename all but the one with the text")
    return names.index(text_column)
