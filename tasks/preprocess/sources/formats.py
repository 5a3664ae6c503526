"""One file of any known format as texts, in order and in bounded memory."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any

import pyarrow as pa

from infini_llama.configs.errors import escaped
from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.sources.columnar import (
    arrow_sizes,
    named_column,
    parquet_sizes,
    read_arrow,
    read_parquet,
)
from infini_llama.tasks.preprocess.sources.json_lines import line_batches
from infini_llama.tasks.preprocess.sources.remote import RemoteFile
from infini_llama.tasks.preprocess.sources.texts import Batch, Fault, Records, Unreadable, cut, in_batches, text_of

Span = tuple[int, int]  # of bytes, row groups or record batches: the first, and the one after the last
PLAIN = ("txt", "md", "rst", "py")
RECORDS = ("json", "jsonl", "ndjson", "csv", "tsv", "parquet", "arrow", "tar")
COMPRESSED = ("gz", "xz", "zst", "bz2")
READ_AHEAD = 2**20
EOFHeaderError, HeaderError = tarfile.EOFHeaderError, tarfile.HeaderError  # type: ignore[attr-defined]
EmptyHeaderError = tarfile.EmptyHeaderError  # type: ignore[attr-defined]
COMPRESSED_READ = 2**16
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, csv.Error, tarfile.TarError)


def format_of(name: str) -> str | None:
    """The format by the file's name, without the compression; None for a name that says none."""
    parts = name.lower().split(".")[1:]
    if parts and parts[-1] in COMPRESSED:
        parts.pop()
    return parts[-1] if parts and parts[-1] in PLAIN + RECORDS else None


def read(path: Path | RemoteFile, text_column: str, form: str = "auto", span: Span | None = None) -> Iterator[Batch]:
    """Every text of the file, and a Fault for each bad record, several at a time.

    Args:
        form: the file's format; auto: what its name says, and a name without a known ending is one text. Of a tar file, it selects
            the files in it.
        span: one of those that `spans` gave; None: the whole file.

    Raises:
        Unreadable: the file is damaged, or has no such column.
        OSError: the disk does not give it.
    """
    known = _format(path, form)
    with _damage_as_unreadable(), _opened(path) as file, _unpacked(file, _compression(path)) as stream:
        match known:
            case "jsonl" | "ndjson":
                yield from line_batches(stream, text_column, span)
            case "parquet":
                yield from in_batches(read_parquet(stream, text_column, span))
            case "arrow":
                yield from in_batches(read_arrow(stream, text_column, span))
            case "tar":
                yield from in_batches(_tar(stream, text_column, form))
            case _:
                yield from in_batches(READERS.get(known, _plain)(stream, text_column))


def spans(path: Path | RemoteFile, size: int, form: str, most: int) -> list[Span] | None:
    """Ranges of about `most` bytes that a large file can be read in, found without reading it; None: it is read from its beginning.

    They are bytes of JSON lines, row groups of parquet, and record batches of an Arrow file.

    Args:
        size: bytes of the file.

    Raises:
        Unreadable, OSError: as of `read`.
    """
    known = _format(path, form)
    if size <= most or _compression(path):
        return None
    if known in ("jsonl", "ndjson"):
        return [(first, min(first + most, size)) for first in range(0, size, most)]
    if known not in ("parquet", "arrow"):
        return None
    with _damage_as_unreadable(), _opened(path) as file:
        sizes = parquet_sizes(file) if known == "parquet" else arrow_sizes(file)
    found, first, together = list[Span](), 0, 0
    for number, own in enumerate(sizes):
        together += own
        if together >= most or number + 1 == len(sizes):
            found.append((first, number + 1))
            first, together = number + 1, 0
    return found if len(found) > 1 else None


def _format(path: Path | RemoteFile, form: str) -> str:
    by_name = format_of(path.name) or "txt"
    return by_name if form == "auto" or by_name == "tar" else form


def _compression(path: PurePath | RemoteFile) -> str:
    ending = path.suffix.lower().lstrip(".")
    return ending if ending in COMPRESSED else ""


def _opened(path: Path | RemoteFile) -> IO[bytes]:
    return path.open() if isinstance(path, RemoteFile) else path.open("rb", READ_AHEAD)


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


class _Archive(tarfile.TarFile):
    """A tar file that is read past its first block of zeros (`ignore_zeros`), where nothing but zeros may follow.

    Attributes:
        has_ended: whether a block of zeros was read.
    """

    has_ended = False


class _Member(tarfile.TarInfo):
    """A file in a tar file. `tarfile` takes a damaged or missing header after the first for the end, and so a block of zeros."""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> "_Member":
        begin = tarfile.offset
        try:
            found = super().fromtarfile(tarfile)
        except EOFHeaderError:
            tarfile.has_ended = True
            raise
        except HeaderError as error:
            if tarfile.has_ended and isinstance(error, EmptyHeaderError):
                raise  # the end of the file
            raise EOFError(f"after {begin:,} bytes: {error}") from None
        if tarfile.has_ended:
            raise EOFError(
                f"after {begin:,} bytes: there are files behind the end of the archive, which a header of zeros or a second "
                "archive causes"
            )
        return found


def _tar(stream: IO[bytes], text_column: str, form: str = "auto") -> Records:
    """The texts of its files in order, as webdataset has them; files with other endings are passed over.

    A hard link to a file that was read is that file. One to a file that was passed over has a text that is not read: a Fault.
    """
    seen: set[int] = set()  # hashes of the names that were read
    with _Archive.open(fileobj=stream, mode="r|", tarinfo=_Member, ignore_zeros=True) as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            name = PurePosixPath(member.name)
            known = format_of(name.name)
            if known in (None, "tar") or form not in ("auto", known) or name.name[0] == ".":
                continue
            if member.islnk() and hash(member.linkname) not in seen:
                target = escaped(f"{member.name} is a hard link to {member.linkname}")
                yield Fault(f"has a file that is not read ({target}, which is passed over)")
            if not member.isfile():
                continue
            seen.add(hash(member.name))
            inner: Any = archive.extractfile(member)
            try:
                yield from READERS.get(known or "", _plain)(_unpacked(inner, _compression(name)), text_column)
            except Unreadable as error:
                raise Unreadable(f"{error}, in its file {escaped(member.name)}") from None
    while stream.read(texts.BLOCK):  # a checksum at its end is looked at
        pass


def _plain(stream: IO[bytes], text_column: str) -> Iterator[str]:
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
    buffer, position, number, wanted, depth, ended = "", 0, 0, texts.BLOCK, 0, False
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
                ended = not (more := text.read(wanted))
                buffer, wanted = buffer + more, max(texts.BLOCK, len(buffer))
                continue
            number, position, wanted = number + 1, end, texts.BLOCK
            yield text_of(value, text_column, f"value {number}")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 ({error.reason})") from None


def _csv(stream: IO[bytes], text_column: str, delimiter: str = ",") -> Records:
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


def _lines(stream: IO[bytes], text_column: str) -> Records:
    return chain.from_iterable(line_batches(stream, text_column))


# Each takes a stream and the column; a new format is one more of these, and an ending in PLAIN or RECORDS.
READERS: dict[str, Callable[[IO[bytes], str], Records]] = {
    "jsonl": _lines,
    "ndjson": _lines,
    "json": _json,
    "csv": _csv,
    "tsv": partial(_csv, delimiter="\t"),
    "parquet": read_parquet,
    "arrow": read_arrow,
}
