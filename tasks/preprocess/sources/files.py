"""`source: files`: the files that patterns name, on this machine or anywhere else."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.errors import portable, shown_path
from infini_llama.tasks.preprocess.sources import formats
from infini_llama.tasks.preprocess.sources.patterns import (
    NotText,
    matching_files,
    real_path,
)
from infini_llama.tasks.preprocess.sources.remote import RemoteFile
from infini_llama.tasks.preprocess.sources.source import Inputs, Source, TextInput
from infini_llama.tasks.preprocess.sources.texts import Batch, Span, Stamp


@dataclass(frozen=True)
class File(TextInput):
    """A file that is read by one of our formats.

    Attributes:
        format: auto: what its name says.
    """

    path: Path | RemoteFile
    name: str
    text_column: str
    key: str = "data.files"
    format: str = "auto"
    has_own_part = False

    def __str__(self) -> str:
        return shown_path(self.path)

    @property
    def place(self) -> str:
        """Its path as text, which the name of a file need not be, or its URL."""
        if isinstance(self.path, RemoteFile):
            return self.path.place
        path = self.path if self.path.is_absolute() else self.path.absolute()
        return portable(str(path))

    def batches(self, span: Span | None = None) -> Iterator[Batch]:
        return formats.read(self.path, self.text_column, self.format, span)

    def spans(self, most: int) -> list[Span] | None:
        path = (
            self.path.for_its_table()
            if isinstance(self.path, RemoteFile)
            else self.path
        )
        return formats.spans(path, self.size(), self.format, most)

    @property
    def is_read_by_python(self) -> bool:
        return formats.format_read(self.path, self.format).holds_lock

    def size(self) -> int:
        if isinstance(self.path, RemoteFile):
            return self.path.size or 0
        try:
            return self.path.stat().st_size
        except OSError:  # its reading raises a clear error
            return 0

    def reader_key(self) -> list[str | int]:
        # With `auto`, content that is not what the name says is refused.
        form = formats.format_read(self.path, self.format)
        compression = formats.compression_of(self.path)
        return [formats.READER_VERSION, self.format, form.name, compression]

    def stamp(self) -> Stamp | None:
        """Size, times and inode of a file on a disk, or what its server states."""
        if isinstance(self.path, RemoteFile):
            return self.path.stamp
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns

    def has_changed(self, stamp: Stamp) -> bool:
        if isinstance(self.path, RemoteFile):
            return self.path.has_changed()
        return super().has_changed(stamp)

    def last_change(self, stamp: Stamp | None) -> int:
        if isinstance(self.path, RemoteFile):
            return 0
        if stamp is None:
            return sys.maxsize
        _, modified, _, changed = stamp
        # Anyone can set the first one, also to the future; the system sets the second.
        return changed if modified > time.time_ns() else max(modified, changed)


class Files(Source):
    """The files of data.files; data.validation_files are held out."""

    def inputs(self, not_text: NotText) -> Inputs:
        training = matching(self, self.section.files, "files", not_text)
        return with_validation_files(self, training, not_text)


def named_files(
    source: Source,
    paths: Iterable[tuple[Path | RemoteFile, str]],
    key: str,
) -> list[File]:
    """Files of a source, each with its name.

    Args:
        key: of the section, which names them.
    """
    section = source.section
    return [
        File(
            path,
            portable(name),
            section.text_column,
            f"{source.place}.{key}",
            section.format,
        )
        for path, name in paths
    ]


def matching(
    source: Source,
    patterns: list[str],
    key: str,
    not_text: NotText,
) -> list[File]:
    """The files that the patterns match.

    Raises:
        DataError: see `matching_files`.
    """
    place = f"{source.place}.{key}"
    found = matching_files(patterns, place, source.section.format, not_text)
    return named_files(source, found, key)


def with_validation_files(
    source: Source, training: Sequence[File], not_text: NotText
) -> Inputs:
    """These files and those of data.validation_files, which are not trained on."""
    held_out = matching(
        source, source.section.validation_files, "validation_files", not_text
    )
    return Inputs(training=without_files(training, held_out), validation=held_out)


def without_files(
    files: Iterable[File], left_out: Iterable[TextInput]
) -> tuple[File, ...]:
    """These files without those that are also in `left_out`, by their real paths."""
    paths = {real_path(file.path) for file in left_out if isinstance(file, File)}
    return tuple(file for file in files if real_path(file.path) not in paths)


SOURCE = Files
