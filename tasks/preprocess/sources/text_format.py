"""A text format: the object that reads its files.

A module of this folder has the objects of its formats in `FORMATS`, by their names. The facts of
each format are in configs/text_formats.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO

from infini_llama.tasks.preprocess.sources.texts import Batch, Span

Open = Callable[[], AbstractContextManager[IO[bytes]]]


@dataclass(frozen=True)
class Content:
    """The content of a file, or a part of it.

    Attributes:
        stream: unpacked and after its byte order mark; `peek` gives its first bytes.
        text_column: column or field with the text of a record.
        span: one of those that `Format.spans` gave; None: all of it.
        reopen: gives the stream from its beginning once more.
    """

    stream: IO[bytes]
    text_column: str
    span: Span | None
    reopen: Open


class Format(ABC):
    """A text format.

    Attributes:
        damage: errors of its libraries that mean that a file is damaged.
    """

    damage: tuple[type[Exception], ...] = ()

    @abstractmethod
    def read(self, content: Content) -> Iterator[Batch]:
        """Every text of a file, and a Fault for each bad record, several at a time.

        Raises:
            Unreadable: the file is damaged, or has no such column.
        """

    def spans(self, open_file: Open, size: int, most: int) -> list[Span] | None:
        """Ranges of about `most` bytes that a file can be read in, found without reading it.

        Args:
            open_file: opens the file, which is not compressed.
            size: bytes of the file, which are more than `most`.

        Returns:
            None: it is read from its beginning.
        """
        return None
