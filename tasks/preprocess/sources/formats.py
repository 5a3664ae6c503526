"""One file of any known format as texts, in order and in bounded memory.

Checked before the text is read: pointer to another file, archive, compression, byte order mark, and
whether the content is what the name says.
"""

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO

from infini_llama.configs.errors import (
    PASSING,
    DataError,
    PipelineError,
    one_line,
    shown_path,
)
from infini_llama.configs.pointers import LONGEST_POINTER, dangling, pointer_in
from infini_llama.configs.text_formats import BY_ENDING, TEXT_FORMATS, TextFormat
from infini_llama.tasks.preprocess.sources.compression import (
    COMPRESSED,
    DAMAGE,
    unpacked,
)
from infini_llama.tasks.preprocess.sources.first_bytes import (
    WINDOW,
    refuse_binary,
    refuse_page,
    refuse_records,
)
from infini_llama.tasks.preprocess.sources.remote import RemoteFile
from infini_llama.tasks.preprocess.sources.text_format import Content, Format
from infini_llama.tasks.preprocess.sources.texts import Batch, Refused, Span, Unreadable

READER_VERSION = 5  # increased by a change after which the same file has other texts
ARCHIVES = (".tar", ".tgz", ".zip")
ARCHIVE = "is an archive; unpack it, and name its files"
READ_AHEAD = 2**20
BEGINNING = 64  # bytes of a text in which another encoding shows
GZIP = b"\x1f\x8b"
PACKED = {
    GZIP: "gz",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zst",
    b"BZh91AY&SY": "bz2",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xff\x06\0\0sNaPpY": "snappy",
    b"LZIP\x01": "lzip",
}
ARCHIVE_KINDS = ("zip", "7z", "rar")
TAR = b"ustar"
TAR_PLACE = 257
# In this order: the first one begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def format_of(name: str, form: str = "auto") -> TextFormat | None:
    """The format by the file's name, without the compression, unless `form` says it.

    None for a name that says none.
    """
    if form != "auto":
        return TEXT_FORMATS[form]
    parts = name.lower().split(".")[1:]
    if parts and parts[-1] in COMPRESSED:
        parts.pop()
    return BY_ENDING.get(parts[-1]) if parts else None


def read(
    path: Path | RemoteFile,
    text_column: str,
    form: str = "auto",
    span: Span | None = None,
) -> Iterator[Batch]:
    """Every text of the file, and a Fault for each bad record, several at a time.

    Args:
        form: the file's format; auto: see `format_read`.
        span: one of those that `spans` gave; None: the whole file.

    Raises:
        Unreadable: the file is damaged, or has no such column.
        DataError: the file is not damaged, and yet its text is not here: it is an archive, a
            pointer to a file that was not downloaded, or cannot be unpacked with the memory that is
            given.
        PipelineError: it cannot be read just now, which is no damage.
        OSError: the disk does not give it.
    """
    kind = format_read(path, form)
    reader = _object_of(kind)
    with _faults(path, reader), _content(path, kind, span) as stream:
        if form == "auto" and not kind.is_binary and not (span and span[0]):
            _refuse_other_content(stream, path, kind, text_column)
        reopen = partial(_content, path, kind)
        yield from reader.read(Content(stream, text_column, span, reopen))


def spans(
    path: Path | RemoteFile,
    size: int,
    form: str,
    most: int,
) -> list[Span] | None:
    """Ranges of about `most` bytes that a large file can be read in, found without reading it.

    What they count is the format's. None: the file is read from its beginning.

    Args:
        size: bytes of the file.

    Raises:
        Unreadable, OSError: see `read`.
    """
    if size <= most or compression_of(path):
        return None
    reader = _object_of(format_read(path, form))
    with _faults(path, reader):
        return reader.spans(partial(_opened, path), size, most)


def format_read(path: Path | RemoteFile, form: str) -> TextFormat:
    """The format that the file is read as: one text, if its name says no other."""
    return format_of(path.name, form) or TEXT_FORMATS["txt"]


def _object_of(kind: TextFormat) -> Format:
    module = import_module(f"{__package__}.{kind.module}")
    return module.FORMATS[kind.name]


def _uncompressed_name(path: Path | RemoteFile) -> str:
    """The file's name in small letters, without the ending of its compression."""
    return path.name.lower().removesuffix(f".{compression_of(path)}")


def compression_of(path: Path | RemoteFile) -> str:
    """The compression that the file's name says, one of COMPRESSED; "": none."""
    ending = Path(path.name).suffix.lower().lstrip(".")
    return ending if ending in COMPRESSED else ""


@contextmanager
def _faults(path: Path | RemoteFile, reader: Format) -> Iterator[None]:
    """Raise errors of the reader and of unpackers as Unreadable or DataError.

    Those that pass are raised as PipelineError.
    """
    try:
        yield
    except (*DAMAGE, *reader.damage, OSError) as error:
        # Pyarrow's and zlib's error for a bad stream has no number; errors of the disk have one.
        if not isinstance(error, OSError) or error.errno is None:
            raise Unreadable(f"is damaged ({one_line(error)})") from None
        if error.errno in PASSING:
            raise PipelineError(
                f"{shown_path(path)} cannot be read now ({error.strerror}); "
                "run the same command again."
            ) from None
        raise
    except Refused as fault:
        raise DataError(f"{shown_path(path)} {fault}.") from None


@contextmanager
def _content(
    path: Path | RemoteFile,
    kind: TextFormat,
    span: Span | None = None,
) -> Iterator[IO[bytes]]:
    """The content of the file, unpacked, after the byte order mark of a text.

    Raises:
        Refused: it is an archive, or a pointer, whatever its name; also one that was compressed as
            if it were the text.
        Unreadable: it is a text in another encoding.
    """
    if _uncompressed_name(path).endswith(ARCHIVES):
        raise Refused(ARCHIVE)
    with _opened(path) as file:
        if span and span[0]:
            # Its beginning is another one's, and that of a remote file would be one more request.
            yield file
            return
        _refuse_pointer(file, path)
        _refuse_unpacked_on_the_way(file, path)
        with unpacked(file, compression_of(path)) as stream:
            _refuse_pointer(stream, path)
            if not kind.is_binary:
                _refuse_packed(stream)
                _skip_mark(stream)
            yield stream


def _opened(path: Path | RemoteFile) -> IO[bytes]:
    try:
        if isinstance(path, RemoteFile):
            return path.open()
        return path.open("rb", READ_AHEAD)
    except FileNotFoundError:
        if isinstance(path, Path) and (fault := dangling(path)):
            raise Refused(fault) from None
        raise


def _refuse_pointer(stream: IO[bytes], path: Path | RemoteFile) -> None:
    # The first bytes of a long remote file would be one more request.
    if isinstance(path, RemoteFile) and (path.size or 0) > LONGEST_POINTER:
        return
    fault = pointer_in(_first(stream, LONGEST_POINTER + 1))
    if fault:
        raise Refused(fault)


def _refuse_unpacked_on_the_way(stream: IO[bytes], path: Path | RemoteFile) -> None:
    """Refuse a .gz over HTTP that does not begin as one.

    The HTTP client unpacks what has the header Content-Encoding. The reader of gz would call the
    file damaged.

    Raises:
        Unreadable: it does not, and has bytes.
    """
    if not isinstance(path, RemoteFile) or not path.url.startswith("http"):
        return
    first = _first(stream, len(GZIP))
    if compression_of(path) == "gz" and first and first != GZIP:
        raise Unreadable(
            "arrives without the compression that its name says: its server has it unpacked on the "
            "way (Content-Encoding: gzip), or sends another file; download it, and name the "
            "downloaded file"
        )


def _refuse_packed(stream: IO[bytes]) -> None:
    """Refuse what is packed, though its name does not say it; of a tar, the bytes can be UTF-8."""
    first = _first(stream, TAR_PLACE + len(TAR))
    kind = next(
        (kind for begin, kind in PACKED.items() if first.startswith(begin)), None
    )
    if kind in ARCHIVE_KINDS or first[TAR_PLACE:] == TAR:
        raise Refused(ARCHIVE)
    if kind and kind not in COMPRESSED:
        raise Refused(
            f"is compressed with {kind}, which is not unpacked here; "
            f"unpack it, or compress it with {', '.join(COMPRESSED[:-1])} or {COMPRESSED[-1]}"
        )
    if kind:
        raise Refused(
            f"is compressed with {kind}, which its name does not say; "
            f"unpack it, or let its name end with .{kind}"
        )


def _refuse_other_content(
    stream: IO[bytes],
    path: Path | RemoteFile,
    kind: TextFormat,
    text_column: str,
) -> None:
    """Refuse content that is not what the file's name says; see `first_bytes`."""
    uncompressed = _uncompressed_name(path)
    ending = uncompressed.rpartition(".")[2] if "." in uncompressed else ""
    is_served_as_page = isinstance(path, RemoteFile) and path.is_page
    first = _first(stream, WINDOW)
    refuse_page(first, ending, is_served_as_page)
    refuse_binary(first)
    if kind.is_document:
        refuse_records(first, uncompressed, ending, text_column)


def _skip_mark(stream: IO[bytes]) -> None:
    first = _first(stream, BEGINNING)
    if first.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    for mark, name in MARKS.items():
        if first.startswith(mark):
            raise Unreadable(f"is {name}, not UTF-8, by its byte order mark")
    most_zeros = max(
        first[0::2].count(0),
        first[1::2].count(0),
    )
    if most_zeros * 4 > len(first):  # more than half of them
        raise Unreadable(
            "is not UTF-8: every second byte at its beginning is zero, as in UTF-16 and UTF-32"
        )


def _first(stream: IO[bytes], count: int) -> bytes:
    return stream.peek(count)[:count]  # type: ignore[attr-defined]
