"""Compressed files as streams of what they hold.

Read is every frame, member or stream of gz, xz, zst and bz2, one after the other.
"""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from typing import IO, Any

import pyarrow as pa

from infini_llama.tasks.preprocess.sources.texts import Refused

COMPRESSED = ("gz", "xz", "zst", "bz2")
COMPRESSED_READ = 2**16  # bytes
BUFFER = 2**17  # bytes
# Magic numbers of RFC 8878.
ZSTD_FRAME = 0xFD2FB528
ZSTD_SKIPPABLE = 0x184D2A50
# The window is what an unpacker keeps in memory, in bytes; Arrow's zstd, as the command zstd, gives
# up above this.
LARGEST_WINDOW = 2**27


def unpacked(file: IO[bytes], compression: str) -> IO[bytes]:
    """The content of the file.

    A `peek` at its beginning gives as many bytes as are wanted, if there are so many.

    Args:
        compression: one of COMPRESSED, or "".

    Raises:
        EOFError, OSError without a number, zlib.error, lzma.LZMAError: it is damaged, now or while
            it is read.
        Refused: it is not damaged, and cannot be unpacked here.
    """
    if compression and not file.peek(1):  # type: ignore[attr-defined]
        raise EOFError("it has no bytes, but a compressed file has a header even if it is empty")
    match compression:
        case "gz":
            raw: Any = gzip.GzipFile(fileobj=file)
        case "zst":
            raw = _Zstd(file)
        case "xz":
            raw = _Streams(file, lzma.LZMADecompressor, 4)
        case "bz2":
            raw = _Streams(file, bz2.BZ2Decompressor, 1)
        case _:
            return file
    return io.BufferedReader(raw, BUFFER)


class _Streams(io.RawIOBase):
    """All streams of an .xz or .bz2 file.

    `lzma.open` ends without an error at a later stream that is damaged.

    Args:
        padding: zeros between and after streams come in multiples of this; the format of xz demands
            4.
    """

    def __init__(
        self,
        file: IO[bytes],
        opened: Callable[[], Any],
        padding: int,
    ) -> None:
        self._file = file
        self._opened = opened
        self._padding = padding
        self._stream = opened()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        filled = 0
        while filled < len(buffer):
            compressed = b""
            if self._stream.eof:
                compressed = self._next()
                if not compressed:
                    break
                self._stream = self._opened()
            elif self._stream.needs_input:
                compressed = self._file.read(COMPRESSED_READ)
                if not compressed:
                    raise EOFError("the last stream is incomplete")
            data = self._stream.decompress(compressed, len(buffer) - filled)
            buffer[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def _next(self) -> bytes:
        """The first bytes of the next stream, after its padding; none at the file's end."""
        data = self._stream.unused_data or self._file.read(COMPRESSED_READ)
        zeros = 0
        stream = b""
        while data and not stream:
            stream = data.lstrip(b"\0")
            zeros += len(data) - len(stream)
            data = b"" if stream else self._file.read(COMPRESSED_READ)
        if zeros % self._padding:
            raise EOFError(
                f"{zeros} zeros follow a stream, which are no multiple of {self._padding}"
            )
        return stream


class _Zstd(io.RawIOBase):
    """All frames of a .zst file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            if error.errno is not None:
                raise
            need = _zstd_need(self._file)
            if need is None:
                raise
            raise Refused(need) from None
        buffer[: len(data)] = data
        return len(data)


def _zstd_need(file: IO[bytes]) -> str | None:
    """The need of the first frame that Arrow does not unpack, though it is whole.

    The text completes '<file> …'.
    """
    file.seek(0)
    while len(head := file.read(4)) == 4:
        magic = int.from_bytes(head, "little")
        if magic & ~0xF == ZSTD_SKIPPABLE:
            file.seek(_number(file, 4), io.SEEK_CUR)
            continue
        if magic != ZSTD_FRAME:
            return None
        descriptor = _number(file, 1)
        is_single = descriptor >> 5 & 1
        has_checksum = descriptor >> 2 & 1
        exponent, mantissa = divmod(0 if is_single else _number(file, 1), 8)
        window = 2 ** (10 + exponent) // 8 * (8 + mantissa)
        dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
        dictionary = _number(file, dictionary_bytes)
        size_bytes = (is_single, 2, 4, 8)[descriptor >> 6]
        size = _number(file, size_bytes)
        if is_single:
            # A size of two bytes is stored less 256.
            window = size + 256 if size_bytes == 2 else size
        if dictionary:
            return (
                f"was compressed with zstd dictionary {dictionary}, which is not here; "
                "compress it again without it"
            )
        if window > LARGEST_WINDOW:
            return (
                f"was compressed with a zstd window of {window / 2**20:,.0f} MiB, "
                f"and at most {LARGEST_WINDOW / 2**20:.0f} MiB are unpacked; "
                "compress it again (zstd -dc --long=31 FILE | zstd -o NEW)"
            )
        _skip_blocks(file)
        if has_checksum:
            file.seek(4, io.SEEK_CUR)
    return None


def _skip_blocks(file: IO[bytes]) -> None:
    """Read past the blocks of a zstd frame."""
    while len(header := file.read(3)) == 3:
        block = int.from_bytes(header, "little")
        is_repeated = block >> 1 & 3 == 1  # one byte
        file.seek(1 if is_repeated else block >> 3, io.SEEK_CUR)
        if block & 1:
            break


def _number(file: IO[bytes], size: int) -> int:
    return int.from_bytes(file.read(size), "little")
