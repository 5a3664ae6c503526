"""One file of any known format as texts, in order and in bounded memory."""

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa

from infini_llama.configs.errors import DataError, escaped, portable
from infini_llama.configs.pointers import LONGEST as LONGEST_POINTER
from infini_llama.configs.pointers import dangling, pointer_in
from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.sources.columnar import (
    arrow_sizes,
    named_column,
    parquet_sizes,
    read_arrow,
    read_parquet,
)
from infini_llama.tasks.preprocess.sources.remote import RemoteFile
from infini_llama.tasks.preprocess.sources.texts import Batch, Fault, Records, Unreadable, cut, in_batches, text_of

Span = tuple[int, int]  # of bytes, row groups or record batches: the first, and the one after the last
PLAIN = ("txt", "md", "rst", "py")
RECORDS = ("json", "jsonl", "ndjson", "csv", "tsv", "parquet", "arrow")
ARCHIVES = (".tar", ".tgz", ".zip")
COMPRESSED = ("gz", "xz", "zst", "bz2")
READ_AHEAD = 2**20
COMPRESSED_READ = 2**16
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, csv.Error)


def format_of(name: str) -> str | None:
    """The format by the file's name, without the compression; None for a name that says none."""
    parts = name.lower().split(".")[1:]
    if parts and parts[-1] in COMPRESSED:
        parts.pop()
    return parts[-1] if parts and parts[-1] in PLAIN + RECORDS else None


def read(path: Path | RemoteFile, text_column: str, form: str = "auto", span: Span | None = None) -> Iterator[Batch]:
    """Every text of the file, and a Fault for each bad record, several at a time.

    Args:
        form: the file's format; auto: what its name says, and a name without a known ending is one text.
        span: one of those that `spans` gave; None: the whole file.

    Raises:
        Unreadable: the file is damaged, or has no such column.
        DataError: the file is not here: it is a pointer to one that was not downloaded.
        OSError: the disk does not give it.
    """
    if any(f"{ending}." in f"{path.name.lower()}." for ending in ARCHIVES):
        raise Unreadable("is an archive; unpack it, and name its files")
    with _damage_as_unreadable(), _opened(path) as file:
        _refuse_pointer(file, path)
        with _unpacked(file, _compression(path)) as stream:
            _refuse_pointer(stream, path)
            yield from _records(stream, text_column, _format(path, form), span)


def _records(stream: IO[bytes], text_column: str, form: str, span: Span | None) -> Iterator[Batch]:
    match form:
        case "jsonl" | "ndjson":
            yield from _lines(stream, text_column, span)
        case "parquet":
            yield from in_batches(read_parquet(stream, text_column, span))
        case "arrow":
            yield from in_batches(read_arrow(stream, text_column, span))
        case "json":
            yield from in_batches(_json(stream, text_column))
        case "csv":
            yield from in_batches(_csv(stream, text_column, ","))
        case "tsv":
            yield from in_batches(_csv(stream, text_column, "\t"))
        case _:
            yield from in_batches(_plain(stream))


def spans(path: Path | RemoteFile, size: int, form: str, most: int) -> list[Span] | None:
    """Ranges of about `most` bytes that a large file can be read in, found without reading it; None: it is read from its beginning.

    They are bytes of JSON lines, row groups of parquet, and record batches of an Arrow file.

    Args:
        size: bytes of the file.

    Raises:
        Unreadable, OSError: as of `read`.
    """
    kind = _format(path, form)
    if size <= most or _compression(path):
        return None
    if kind in ("jsonl", "ndjson"):
        return [(first, min(first + most, size)) for first in range(0, size, most)]
    if kind not in ("parquet", "arrow"):
        return None
    with _damage_as_unreadable(), _opened(path) as file:
        sizes = parquet_sizes(file) if kind == "parquet" else arrow_sizes(file)
    ranges, first, together = list[Span](), 0, 0
    for number, group_size in enumerate(sizes):
        together += group_size
        if together >= most or number + 1 == len(sizes):
            ranges.append((first, number + 1))
            first, together = number + 1, 0
    return ranges if len(ranges) > 1 else None


def _format(path: Path | RemoteFile, form: str) -> str:
    return format_of(path.name) or "txt" if form == "auto" else form


def _compression(path: Path | RemoteFile) -> str:
    ending = path.suffix.lower().lstrip(".")
    return ending if ending in COMPRESSED else ""


def _opened(path: Path | RemoteFile) -> IO[bytes]:
    try:
        return path.open() if isinstance(path, RemoteFile) else path.open("rb", READ_AHEAD)
    except FileNotFoundError:
        if isinstance(path, Path) and (fault := dangling(path)):
            raise _not_here(path, fault) from None
        raise


def _refuse_pointer(stream: IO[bytes], path: Path | RemoteFile) -> None:
    """Refuse a file that is a pointer, whatever its name; also one that was compressed as if it were the text."""
    size = path.size if isinstance(path, RemoteFile) else None
    if size is not None and size > LONGEST_POINTER:  # of a remote file, the first bytes cost a request
        return
    if fault := pointer_in(stream.peek(LONGEST_POINTER + 1)[: LONGEST_POINTER + 1]):  # type: ignore[attr-defined]
        raise _not_here(path, fault)


def _not_here(path: Path | RemoteFile, fault: str) -> DataError:
    return DataError(f"{escaped(portable(str(path)))} {fault}.")


@contextmanager
def _damage_as_unreadable() -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise _damaged(error) from None
    except OSError as error:
        if error.errno is None:  # how pyarrow and zlib tell of a bad stream; the disk's own errors have a number
            raise _damaged(error) from None
        raise


def _damaged(error: Exception) -> Unreadable:
    return Unreadable(f"is damaged ({' '.join(str(error).split())})")  # thrift's words have several lines


def _unpacked(file: IO[bytes], compression: str) -> IO[bytes]:
    if compression and not file.peek(1):  # type: ignore[attr-defined]
        raise EOFError("it has no bytes, but a compressed file has a header even if it is empty")
    match compression:
        case "gz":
            return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
        case "zst":
            return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"), texts.BLOCK)  # type: ignore[arg-type]
        case "xz" | "bz2":
            opened = lzma.LZMADecompressor if compression == "xz" else bz2.BZ2Decompressor
            return io.BufferedReader(_Streams(file, opened), texts.BLOCK)
    return file


class _Streams(io.RawIOBase):
    """All streams of an .xz or .bz2 file, one after the other. `lzma.open` ends without an error at a later stream that is damaged."""

    def __init__(self, file: IO[bytes], opened: Callable[[], Any]) -> None:
        self._file, self._opened = file, opened
        self._stream = opened()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            compressed = b""
            if self._stream.eof:
                compressed = self._stream.unused_data or self._file.read(COMPRESSED_READ)
                if not compressed:
                    return 0
                self._stream = self._opened()
            elif self._stream.needs_input and not (compressed := self._file.read(COMPRESSED_READ)):
                raise EOFError("the last stream is incomplete")
            data = self._stream.decompress(compressed, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _plain(stream: IO[bytes]) -> Iterator[str]:
    """The file as one text, or as several that end at a line where it is longer than one document may be."""
    rest, base = b"", 0
    while True:
        data = rest + stream.read(texts.LONGEST_DOCUMENT + 1 - len(rest))
        end = cut(data) if len(data) > texts.LONGEST_DOCUMENT else len(data)
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
    buffer, position, number, characters, depth, ended = "", 0, 0, texts.BLOCK, 0, False
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
                if ended or depth not in (0, 1) or len(buffer) > texts.LONGEST_RECORD:
                    raise Unreadable(f"is not JSON after its value {number}") from None
                ended = not (more := text.read(characters))
                buffer, characters = buffer + more, max(texts.BLOCK, len(buffer))
                continue
            number, position, characters = number + 1, end, texts.BLOCK
            yield text_of(value, text_column, f"value {number}")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 ({error.reason})") from None


def _csv(stream: IO[bytes], text_column: str, delimiter: str) -> Records:
    csv.field_size_limit(texts.LONGEST_RECORD)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(rows, [])
        column = named_column(header, text_column)
        for row in rows:
            if len(row) == len(header):
                yield row[column]
            elif row:
                yield Fault(f"has {len(row)} fields instead of {len(header)} in line {rows.line_num}")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 ({error.reason})") from None


def _lines(stream: IO[bytes], text_column: str, span: Span | None = None) -> Iterator[Batch]:
    """The records of lines of JSON, about a megabyte of lines at a time.

    Args:
        span: only the lines that begin in these bytes of a seekable stream; two spans that meet share no line and lose none.
    """
    first, last = span or (0, None)
    if first:
        stream.seek(first - 1)
        first += _skip_line(stream) - 1
    number = 0  # of lines from `first` on
    for block in _whole_lines(stream, first, last):
        if isinstance(block, int):
            number += 1
            place = _line(stream, first, number)
            yield [Fault(f"has a line longer than {texts.LONGEST_RECORD:,} bytes ({place})")]
            continue
        lines = block.split(b"\n")
        if (records := _parsed_together(lines, text_column)) is not None:
            yield from in_batches(iter(records))
        else:
            named = ((line, partial(_line, stream, first, place)) for place, line in enumerate(lines, number + 1))
            yield from in_batches(_parsed(line, text_column, name) for line, name in named if line.strip())
        number += len(lines)


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


def _parsed_together(lines: list[bytes], text_column: str) -> list[str] | None:
    """The texts of lines each of which is an object with text; None where one is not."""
    decode = _decoder(text_column).decode
    try:
        records = [decode(line).text for line in lines]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return records if set(map(type, records)) == {str} else None


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
    text = text_of(value, text_column, "this line")
    return text if isinstance(text, str) else text_of(value, text_column, name())
