"""A file as one text."""

from collections.abc import Iterator
from typing import IO

from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.sources.text_format import Content, Format
from infini_llama.tasks.preprocess.sources.texts import (
    Batch,
    Unreadable,
    cut,
    in_batches,
)


class Plain(Format):
    """A file that is one document; several that end at a line where it is too long for one."""

    def read(self, content: Content) -> Iterator[Batch]:
        return in_batches(_texts(content.stream))


def _texts(stream: IO[bytes]) -> Iterator[str]:
    rest = b""
    base = 0  # byte of the file
    while True:
        data = rest + stream.read(texts.LONGEST_DOCUMENT + 1 - len(rest))
        end = cut(data) if len(data) > texts.LONGEST_DOCUMENT else len(data)
        yield _decoded(data[:end], base)
        rest = data[end:]
        base += end
        if not rest:
            return


def _decoded(data: bytes, base: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"is not UTF-8 (byte {base + error.start}: 0x{data[error.start]:02x})"
        ) from None


FORMATS = {"txt": Plain()}
