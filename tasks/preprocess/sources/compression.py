"""Compressed files as streams of what they hold.

Read is every frame, member or stream of gz, xz, zst and bz2, one after the other.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any

import pyarrow as pa

from infini_llama.tasks.preprocess.sources.texts import Refused

COMPRESSED = ("gz", "xz", "zst", "bz2")
# Errors of what is damaged, beside an OSError without a number.
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException)
COMPRESSED_READ = 2**16  # bytes
BUFFER = 2**17  # bytes
# Arrow gives the reasons of the zstd library, and up to this size unpacks what a frame needs.
LARGEST_WINDOW = "128 MiB"
ZSTD_NEEDS = {
    "Frame requires too much memory": (
        f"was compressed with a zstd window above {LARGEST_WINDOW}, which is not unpacked; "
        "compress it again (zstd -dc --long=31 FILE | zstd -o NEW)"
    ),
    "Dictionary mismatch": (
        "was compressed with a zstd dictionary, which is not here; compress it again without it"
    ),
}


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
        raise EOFError(
            "it has no bytes, but a compressed file has a header even if it is empty"
        )
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
            for reason, need in ZSTD_NEEDS.items():
                if reason in str(error):
                    raise Refused(need) from None
            raise
        buffer[: len(data)] = data
        return len(data)
