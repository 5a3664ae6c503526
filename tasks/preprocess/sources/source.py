"""A source of text, and its inputs.

A source is one module of this folder, named like its value of data.source, with a class `SOURCE`.
The keys of the configuration that it reads say so themselves (`read_by` in
configs/schema/sources.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from infini_llama.configs.schema.sources import NOT_STATED, TextConfig
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.texts import (
    Batch,
    Span,
    Stamp,
    TextRecords,
)


class TextInput(ABC):
    """One input of a source: a file, a split of a dataset, or texts that are generated.

    It is hashable, and its `str` is its place for messages.

    Attributes:
        name: the same everywhere, wherever the text lies.
        key: of the configuration that names it.
        text_column: field of a record that has the text.
        has_own_part: whether it is never read together with others, though it may be small.
    """

    name: str
    key: str
    text_column: str
    has_own_part = True

    @property
    @abstractmethod
    def place(self) -> str:
        """Its place on this machine or elsewhere, in full."""

    @property
    def is_read_by_python(self) -> bool:
        """Whether most of its reading is done by Python itself, which threads do not speed up."""
        return True

    @abstractmethod
    def batches(self, span: Span | None = None) -> Iterator[Batch]:
        """Its texts in order, several at a time, and a Fault for each bad record.

        Args:
            span: one of those that `spans` gave; None: all of it.

        Raises:
            Unreadable: as a whole it is damaged.
            OSError: the disk does not give it.
        """

    @abstractmethod
    def stamp(self) -> Stamp | None:
        """Values that change with its text, perhaps without it; None: nothing is known."""

    def has_changed(self, stamp: Stamp) -> bool:
        """Whether its text is another one now, as far as is known.

        Args:
            stamp: from when it was listed.

        Raises:
            PipelineError: its server is not reached.
        """
        now = self.stamp()
        return now is None or now[:2] != stamp[:2]

    def last_change(self, stamp: Stamp | None) -> int:
        """The newest time in its stamp, in nanoseconds; 0: the stamp has no times."""
        return 0

    def spans(self, most: int) -> list[Span] | None:
        """Ranges of about `most` bytes that it can be read in, found without reading it.

        None: it is read from its beginning.
        """
        return None

    def size(self) -> int:
        """Bytes to read; 0 where that is not known."""
        return 0

    def reader_key(self) -> list[str | int]:
        """The version and settings by which it is read.

        While they are the same, equal bytes are equal texts.
        """
        return []

    def without_validation_files(
        self, validation: Sequence["TextInput"]
    ) -> "TextInput":
        """The same input; one that takes its text from files does not use the given ones.

        Args:
            validation: held-out text of all sections.
        """
        return self

    def records(self) -> TextRecords:
        """The same as `batches`, one at a time."""
        return chain.from_iterable(self.batches())


@dataclass(frozen=True)
class Inputs:
    """The inputs of a section.

    Attributes:
        validation: the user's own held-out text.
    """

    training: Sequence[TextInput]
    validation: Sequence[TextInput]


class Source(ABC):
    """The text that one section names, `data` or one of data.sources.

    Args:
        section: whose `source` is this one.
        place: key of the section.
        validation_fraction: share of documents that are held out, where the section names no text
            for that.

    Attributes:
        license: of the text, where the section states none.
    """

    license = NOT_STATED

    def __init__(
        self, section: TextConfig, place: str, validation_fraction: float = 0.0
    ) -> None:
        self.section = section
        self.place = place
        self.validation_fraction = validation_fraction

    @abstractmethod
    def inputs(self, not_text: NotText) -> Inputs:
        """List the text, without reading it, each input once.

        Args:
            not_text: counts the files that are left out.

        Raises:
            ConfigError: keys of the section contradict one another.
            DataError: nothing matches, or there is no such dataset or split.
            PipelineError: it is elsewhere, and is not reached.
        """

    def facts(self) -> dict[str, str]:
        """Facts of the text that its section does not state, for the manifest."""
        return {}
