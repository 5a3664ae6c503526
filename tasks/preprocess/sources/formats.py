"""One file of any known format as texts, in order and in bounded memory."""

import csv
import gzip
import io
import json
import lzma
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet

from infini_llama.tasks.preprocess.sources import texts as records
from infini_llama.tasks.preprocess.sources.json_lines import lines
from infini_llama.tasks.preprocess.sources.texts import Fault, Records, Unreadable, as_text, cut, pieces, text_of

PLAIN = ("txt", "md", "rst", "py")
RECORDS = ("json", "jsonl", "csv", "parquet", "arrow")
COMPRESSED = ("gz", "xz", "zst")
READ_AHEAD = 2**20
XZ_READ = 2**16
ARROW_FILE = b"ARROW1"


def format_of(path: Path) -> str | None:
    """The format by the file's name, without the compression; None for a name that says none."""
    parts = path.name.lower().split(".")[1:]
    if parts and parts[-1] in COMPRESSED:
        parts.pop()
    return parts[-1] if parts and parts[-1] in PLAIN + RECORDS else None


def read(
    path: Path,
    text_column: str,
    form: str = "auto",
    wanted: Iterator[int] | None = None,
    places: list[int] | None = None,
) -> Records:
    """Every text of the file and a Fault for each bad record.

    Args:
        form: the file's format; auto: what its name says, and a name without a known ending is one text.
        wanted: ascending numbers of records; others may be NOT_READ where that saves time.
        places: takes the byte at which each record's line begins, where the file is one of plain lines.

    Raises:
        Unreadable: the file is damaged, or has no such column.
        OSError: the disk does not give it.
    """
    reader = READERS.get(form if form != "auto" else format_of(path) or "txt", _plain)
    if reader is lines:
        packed = path.suffix.lower().lstrip(".") in COMPRESSED
        reader = partial(lines, wanted=wanted, places=None if packed else places)
    try:
        with _opened(path) as stream:
            for record in reader(stream, text_column):
                yield from (record,) if isinstance(record, Fault) else pieces(record)
    except (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, csv.Error) as error:
        raise _damaged(error) from None
    except OSError as error:
        if error.errno is None:  # how pyarrow and zlib tell of a bad stream; the disk's own errors have a number
            raise _damaged(error) from None
        raise


def _damaged(error: Exception) -> Unreadable:
    return Unreadable(f"is damaged ({' '.join(str(error).split())})")  # thrift's words have several lines


def _opened(path: Path) -> IO[bytes]:
    if path.suffix.lower().lstrip(".") in COMPRESSED and not path.stat().st_size:
        raise EOFError("it has no bytes, and even nothing takes some when it is compressed")
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path, "rb")  # type: ignore[return-value]
        case ".xz":
            return io.BufferedReader(_XzStreams(path), records.BLOCK)
        case ".zst":
            return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(os.fsencode(path)), "zstd"), records.BLOCK)  # type: ignore[arg-type]
    return path.open("rb", READ_AHEAD)


class _XzStreams(io.RawIOBase):
    """All streams of an .xz file, one after the other. `lzma.open` ends without an error at a later stream that is damaged."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._stream = lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            compressed = b""
            if self._stream.eof:
                compressed = self._stream.unused_data or self._file.read(XZ_READ)
                if not compressed:
                    return 0
                self._stream = lzma.LZMADecompressor()
            elif self._stream.needs_input and not (compressed := self._file.read(XZ_READ)):
                raise EOFError("the last stream has no end")
            data = self._stream.decompress(compressed, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _plain(stream: IO[bytes], text_column: str) -> Iterator[str]:
    """The file as one text, or as several that end at a line where it is longer than one document may be."""
    rest, base = b"", 0
    while True:
        data = rest + stream.read(records.LONGEST_DOCUMENT + 1 - len(rest))
        end = cut(data) if len(data) > records.LONGEST_DOCUMENT else len(data)
        yield _decoded(data[:end], base)
        rest, base = data[end:], base + end
        if not rest:
            return


def _decoded(data: bytes, base: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 (byte {base + error.start}: 0x{data[error.start]:02x})") from None


def _json(stream: IO[bytes], text_column: str) -> Records:
    """An array of records, one record, or one after the other; decoded value by value."""
    decode = json.JSONDecoder().raw_decode
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    buffer, position, number, wanted, depth, ended = "", 0, 0, records.BLOCK, 0, False
    try:
        while True:
            while position < len(buffer) and (separator := buffer[position]) in " \t\r\n,[]":
                depth += (separator == "[") - (separator == "]")
                position += 1
            try:
                if position == len(buffer):
                    raise ValueError
                value, end = decode(buffer, position)
                if end == len(buffer) and not ended and not isinstance(value, dict | str):
                    raise ValueError  # a number may go on
            except (ValueError, RecursionError):
                buffer, position = buffer[position:], 0
                if ended and not buffer and depth == 0:
                    return
                if ended or depth not in (0, 1) or len(buffer) > records.LONGEST_RECORD:
                    raise Unreadable(f"is not JSON after its value {number}") from None
                ended = not (more := text.read(wanted))
                buffer, wanted = buffer + more, max(records.BLOCK, len(buffer))
                continue
            number, position, wanted = number + 1, end, records.BLOCK
            yield text_of(value, text_column, f"value {number}")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 ({error.reason})") from None


def _csv(stream: IO[bytes], text_column: str) -> Records:
    csv.field_size_limit(records.LONGEST_RECORD)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        rows = csv.reader(text, strict=True)
        header = next(rows, [])
        column = named_column(header, text_column)
        for row in rows:
            if len(row) == len(header):
                yield row[column]
            elif row:
                yield Fault(f"has {len(row)} fields instead of {len(header)} in line {rows.line_num}")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 ({error.reason})") from None


def _parquet(stream: IO[bytes], text_column: str) -> Records:
    with _seekable(stream) as file:
        table = pyarrow.parquet.ParquetFile(file)
        _refuse_concatenated(file, table.metadata)
        named_column(table.schema_arrow.names, text_column)
        yield from _batches(table.iter_batches(batch_size=256, columns=[text_column]), text_column)


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


def _arrow(stream: IO[bytes], text_column: str) -> Records:
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


def _batches(batches: Iterable[pa.RecordBatch], text_column: str) -> Records:
    number = 0
    for batch in batches:
        column = batch.column(text_column)
        for start in range(0, len(column), 256):
            try:
                values = column.slice(start, 256).to_pylist()
            except UnicodeDecodeError as error:
                raise Unreadable(f"is not UTF-8 in the rows from {number + 1} ({error.reason})") from None
            for value in values:
                number += 1
                yield as_text("" if value is None else value, f"row {number}")


def _seekable(stream: IO[bytes]) -> IO[bytes]:
    """The file itself, or what it holds unpacked on disk: parquet is read from its end."""
    if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO):
        return stream
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115  its reader closes it
    shutil.copyfileobj(stream, unpacked, records.BLOCK)
    unpacked.seek(0)
    return unpacked


def named_column(names: list[str], text_column: str) -> int:
    if text_column not in names:
        known = ", ".join(names) or "none"
        raise Unreadable(
            f"has no column '{text_column}' (it has {known}); name the one with the text in data.text_column"
        )
    if (count := names.count(text_column)) > 1:
        raise Unreadable(f"has {count} columns '{text_column}'; rename all but the one with the text")
    return names.index(text_column)


READERS: dict[str, Callable[[IO[bytes], str], Records]] = {
    "jsonl": lines,
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
}
