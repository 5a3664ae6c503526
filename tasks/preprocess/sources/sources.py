"""Sources of text: the sections of a configuration that name text, and the files of each."""

import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path

from infini_llama.configs.errors import ConfigError, portable, shown_path
from infini_llama.configs.reading import changed, expanded
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.schema.runtime import default_home
from infini_llama.configs.schema.sources import SourceConfig, TextConfig
from infini_llama.tasks.preprocess.sources import formats, hub
from infini_llama.tasks.preprocess.sources.formats import read
from infini_llama.tasks.preprocess.sources.hub import HubSplit, commit_of, texts_of
from infini_llama.tasks.preprocess.sources.passkey import MADE_VERSION, PasskeyTexts
from infini_llama.tasks.preprocess.sources.patterns import (
    NotText,
    RealPaths,
    matching_files,
    python_stdlib,
)
from infini_llama.tasks.preprocess.sources.remote import RemoteFile
from infini_llama.tasks.preprocess.sources.texts import (
    Batch,
    Fault,
    Span,
    Stamp,
    TextRecords,
    Unreadable,
    in_batches,
)
from infini_llama.tasks.records.manifest import Provenance

COMMIT = re.compile("[0-9a-f]{40}")
FILLER_CHARACTERS = 8 * 2**20  # of text that texts with something hidden are cut from


@dataclass(frozen=True)
class TextFile:
    """One file, one split of a Hugging Face dataset, or texts that are made.

    It has a place here, and a name that is the same everywhere.

    Attributes:
        filler: files with the text around what `made` hides.
    """

    path: Path | RemoteFile
    name: str
    text_column: str
    key: str = "data.files"
    dataset: HubSplit | None = None
    format: str = "auto"
    made: PasskeyTexts | None = None
    filler: tuple["TextFile", ...] = ()

    def __str__(self) -> str:
        """Its path, for messages."""
        return shown_path(self.path)

    def batches(self, span: Span | None = None) -> Iterator[Batch]:
        """Its texts in order, several at a time, and a Fault for each bad record.

        Args:
            span: one of those that `spans` gave; None: all of it.

        Raises:
            Unreadable: as a whole it is damaged.
            OSError: the disk does not give it.
        """
        if self.made:
            return in_batches(self.made.within(self._filler_words()))
        if self.dataset:
            return in_batches(texts_of(self.dataset, self.text_column, span))
        return read(self.path, self.text_column, self.format, span)

    def _filler_words(self) -> list[str]:
        """Words of the filler files, from their beginning on."""
        words = list[str]()
        left = FILLER_CHARACTERS
        for file in self.filler:
            try:
                for text in file.texts():
                    words += text[:left].split()
                    left -= len(text)
                    if left <= 0:
                        return words
            except Unreadable as fault:
                raise Unreadable(f"takes its filler from {file}, which {fault}") from None
        if self.filler and not words:
            raise Unreadable("has no filler: the files contain no word")
        return words

    def records(self) -> TextRecords:
        """The same as `batches`, one at a time."""
        return chain.from_iterable(self.batches())

    def texts(self) -> Iterator[str]:
        """Its texts in order, where none may be left out.

        Raises:
            Unreadable: it is damaged, or a record of it, or the disk does not give it.
        """
        try:
            for record in self.records():
                if isinstance(record, Fault):
                    raise Unreadable(record.reason)
                yield record
        except OSError as error:
            raise Unreadable(f"cannot be read ({error.strerror})") from None

    def spans(self, most: int) -> list[Span] | None:
        """Ranges of about `most` bytes that it can be read in, found without reading it.

        None: it is read from its beginning.
        """
        if self.made:
            return None
        if self.dataset:
            return hub.spans(self.dataset, most)
        return formats.spans(self.path, self.size(), self.format, most)

    @property
    def is_read_by_python(self) -> bool:
        """Whether most of its reading is done by Python itself, which threads do not speed up."""
        if self.dataset or self.made:
            return True
        return formats.format_of(self.path.name, self.format) in formats.BY_PYTHON

    @property
    def has_times(self) -> bool:
        """Whether it is a file on a disk.

        The `stamp` of such a file has its times: modified, and the inode changed.
        """
        return not self.made and not self.dataset and isinstance(self.path, Path)

    def size(self) -> int:
        """Size of its file; 0 where that is not known."""
        if isinstance(self.path, RemoteFile):
            return self.path.size or 0
        try:
            return 0 if self.made or self.dataset else self.path.stat().st_size
        except OSError:  # its reading raises a clear error
            return 0

    def reader_key(self) -> list[str | int]:
        """The version and settings by which it is read.

        While they are the same, equal bytes are equal texts.
        """
        return [] if self.made or self.dataset else formats.reader_key(self.path, self.format)

    def stamp(self) -> Stamp | None:
        """Values that stay the same while its text does; None where nothing is known.

        Those of a file on a disk are its size, times and inode.
        """
        if self.made:
            stamps = [(file.name, file.reader_key(), file.stamp()) for file in self.filler]
            if any(stamp is None for *_, stamp in stamps):
                return None
            return (MADE_VERSION, *astuple(self.made), *stamps)
        if self.dataset:
            is_commit = COMMIT.fullmatch(self.dataset.revision or "")
            return (self.dataset.revision,) if is_commit else None
        if isinstance(self.path, RemoteFile):
            return self.path.stamp
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


def sections(data: DataConfig) -> dict[str, TextConfig]:
    """The sections that name text.

    It is `data` itself, or each of data.sources by its name, in the order of names.
    """
    return {source.name: source for source in _by_name(data)} or {"": data}


def _by_name(data: DataConfig) -> list[SourceConfig]:
    return sorted(data.sources, key=lambda source: source.name)


def files_of(
    section: TextConfig,
    name: str = "",
    not_text: NotText | None = None,
) -> tuple[list[TextFile], list[TextFile]]:
    """The files that a section names, `data` or one of data.sources, each file once.

    Args:
        name: of the section in data.sources; "" for `data` itself.
        not_text: counts the files that are left out; None: those of the default home.

    Returns:
        training files, and the user's own validation files.

    Raises:
        ConfigError: a folder has no revisions, and one of save_to_disk no configurations.
        DataError: nothing matches.
    """
    place = f"data.sources.{name}" if name else "data"
    not_text = not_text or NotText(default_home())

    def text_files(paths: Iterable[tuple[Path | RemoteFile, str]], key: str) -> list[TextFile]:
        return [
            TextFile(path, portable(name), section.text_column, key, format=section.format)
            for path, name in paths
        ]

    def matching(patterns: list[str], key: str) -> list[TextFile]:
        return text_files(matching_files(patterns, key, section.format, not_text), key)

    match section.source:
        case "huggingface":
            splits = _hub_splits(section, place)
            for file in hub.unread_files(section.dataset, section.dataset_config):
                not_text.count_other(file)
            return splits[:1], splits[1:]
        case "passkey":
            made = PasskeyTexts(**section.passkey.model_dump())
            filler = list[TextFile]()
            if made.filler == "files":
                filler = matching(section.files, f"{place}.files")
            texts = TextFile(
                Path("passkey"),
                "passkey",
                section.text_column,
                f"{place}.passkey",
                made=made,
                filler=tuple(sorted(filler, key=lambda file: file.name)),
            )
            return [texts], []
        case "python-stdlib":
            training = text_files(python_stdlib(), f"{place}.files")
        case _:
            training = matching(section.files, f"{place}.files")
    held_out = matching(section.validation_files, f"{place}.validation_files")
    if not held_out:
        return training, held_out
    real = RealPaths()
    validation = {real.of(file.path) for file in held_out}
    return [file for file in training if real.of(file.path) not in validation], held_out


def _hub_splits(section: TextConfig, place: str) -> list[TextFile]:
    """The training split of a dataset, and its validation split if the section names one.

    Args:
        place: key of the section.

    Raises:
        ConfigError: see `files_of`.
    """
    if section.revision is not None and expanded(section.dataset).is_dir():
        raise ConfigError(
            f"{place}.revision={section.revision} is for a dataset of the Hub, "
            f"but {section.dataset} is a folder; remove it."
        )
    if section.dataset_config is not None and hub.is_saved(expanded(section.dataset)):
        raise ConfigError(
            f"{place}.dataset_config={section.dataset_config} is for a dataset with several "
            f"configurations, but {section.dataset} is a folder of save_to_disk, which has none; "
            "remove it."
        )
    revision = commit_of(section.dataset, section.revision)
    names = [section.dataset_split]
    if section.validation_split:
        names.append(section.validation_split)
    splits = list[TextFile]()
    for name in names:
        split = HubSplit(
            path=section.dataset,
            configuration=section.dataset_config,
            split=name,
            revision=revision,
            streaming=section.streaming,
        )
        splits.append(
            TextFile(
                path=Path(section.dataset),
                name=name,
                text_column=section.text_column,
                key=f"{place}.dataset",
                dataset=split,
            )
        )
    return splits


def describe(data: DataConfig) -> Provenance:
    """Provenance of the source or sources, for the manifest."""
    if not data.sources:
        return _provenance(data)
    sources = []
    for source in _by_name(data):
        provenance = _provenance(source)
        license = source.license if source.license != "not stated" else provenance.license
        of_source = changed(
            provenance,
            name=source.name,
            weight=source.weight,
            license=license,
        )
        sources.append(of_source)
    licenses = sorted({source.license for source in sources})
    return Provenance(
        source="mixture",
        sources=tuple(sources),
        license="; ".join(licenses),
    )


def _provenance(text: TextConfig) -> Provenance:
    match text.source:
        case "python-stdlib":
            provenance = Provenance(
                source=text.source,
                python=platform.python_version(),
                license="PSF-2.0",
            )
        case "huggingface":
            provenance = Provenance(
                source=text.source,
                dataset=text.dataset,
                dataset_config=text.dataset_config,
                dataset_split=text.dataset_split,
                revision=commit_of(text.dataset, text.revision),
                validation_split=text.validation_split,
                license="not stated",
            )
        case "passkey":
            made = text.passkey.model_dump(include={"documents", "repetitions"})
            made |= text.passkey.model_dump(include={"form", "filler"}, exclude_defaults=True)
            if text.passkey.filler == "files":
                made["files"] = tuple(text.files)
            provenance = Provenance(
                source=text.source,
                **made,
                license="none: made by this program",
            )
        case _:
            provenance = Provenance(
                source=text.source,
                files=tuple(text.files),
                license="not stated",
            )
    if text.loss_on == "all":
        return provenance
    return changed(provenance, loss_on=text.loss_on)
