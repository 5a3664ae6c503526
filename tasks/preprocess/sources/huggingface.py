"""`source: huggingface`: a dataset of the Hugging Face Hub, or a folder of one.

`datasets` decides which configurations and splits it has, and which files are of each. Files of
records in a format of ours are read as those of data.files are; all else is read by `datasets`.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import (
    ConfigError,
    DataError,
    PipelineError,
    portable,
    shown_path,
)
from infini_llama.configs.pointers import dangling, refuse_pointer
from infini_llama.configs.reading import expanded
from infini_llama.configs.text_formats import TEXT_FORMATS
from infini_llama.tasks.preprocess.sources.files import File
from infini_llama.tasks.preprocess.sources.folders import refuse_tables
from infini_llama.tasks.preprocess.sources.formats import format_of
from infini_llama.tasks.preprocess.sources.hub import (
    COMMIT,
    Revision,
    hub_files,
    revision_of,
)
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.remote import RemoteFile
from infini_llama.tasks.preprocess.sources.source import Inputs, Source, TextInput
from infini_llama.tasks.preprocess.sources.texts import (
    Batch,
    Span,
    Stamp,
    TextRecords,
    Unreadable,
    as_text,
    in_batches,
    named_column,
)

AT_ONCE = 256  # rows
# Builders of `datasets` for files of our formats. Not `text`: its documents are lines.
OUR_BUILDERS = ("arrow", "csv", "json", "parquet")
# Settings of a builder that are not about how a file is read; the separator is looked at by itself.
NOT_OF_READING = ("name", "version", "data_dir", "data_files", "description", "sep")
# Other than an expression, as train[:10%] or a+b.
NAME_OF_SPLIT = re.compile(r"\w+(\.\w+)*")
ALL_SPLITS = "all"  # an expression, too
# Files of a folder that `datasets` reads to know its splits.
DESCRIPTIONS = ("README.md", "dataset_infos.json", ".huggingface.yaml")


def is_saved(folder: Path) -> bool:
    """Whether save_to_disk wrote the folder: one dataset, or its splits."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


class HuggingFace(Source):
    """The split data.dataset_split; data.validation_split is held out."""

    def inputs(self, not_text: NotText) -> Inputs:
        self._refuse_keys_without_effect()
        section = self.section
        folder = expanded(section.dataset)
        self._refuse_no_folder(folder)
        names = {"dataset_split": section.dataset_split}
        if section.validation_split is not None:
            names["validation_split"] = section.validation_split
        for key, name in names.items():
            if section.streaming and "[" in name:
                raise ConfigError(
                    f"{self.place}.{key}={name} is a part of a split, and "
                    f"{self.place}.streaming=true reads whole ones; set streaming=false, or name a "
                    "split."
                )
        if folder.is_dir():
            paths = sorted(folder.rglob("[!.]*.*"))
            refuse_tables(map(str, paths), f"{self.place}.dataset: '{section.dataset}'")
            _refuse_pointers_before_opening(folder, paths)
        builder = None if is_saved(folder) else self._builder()
        files: dict[str, list[str]] = (builder and builder.config.data_files) or {}
        for key, name in names.items():
            self._refuse_unknown_split(key, name, files)
        if builder and folder.is_dir():
            for path in _paths_read(builder, names.values(), files):
                refuse_pointer(Path(path))
            used = [files[name] for name in names.values() if name in files]
            is_known = len(used) == len(names)  # not of an expression
            _count_unread(folder, used if is_known else files.values(), not_text)
        training, *validation = [
            self._inputs_of(builder, name, files.get(name, []))
            for name in names.values()
        ]
        return Inputs(training, [*chain.from_iterable(validation)])

    def facts(self) -> dict[str, str]:
        commit = self._revision().commit
        return {"revision": commit} if commit else {}

    def _revision(self) -> Revision:
        return revision_of(self.section.dataset, self.section.revision)

    def _refuse_no_folder(self, folder: Path) -> None:
        """Refuse a file, and a path to nothing that no name of the Hub looks like."""
        key = f"{self.place}.dataset={self.section.dataset}"
        if folder.is_file():
            raise DataError(
                f"{key} is a file; name its folder, or set {self.place}.source=files and name it "
                f"in {self.place}.files."
            )
        if self.section.dataset.startswith((".", "~", "/")) and not folder.exists():
            raise DataError(f"{key}: there is no such folder.")

    def _refuse_keys_without_effect(self) -> None:
        section = self.section
        folder = expanded(section.dataset)
        if section.revision is not None and folder.is_dir():
            raise ConfigError(
                f"{self.place}.revision={section.revision} is for a dataset of the Hub, "
                f"but {section.dataset} is a folder; remove it."
            )
        if section.dataset_config is not None and is_saved(folder):
            raise ConfigError(
                f"{self.place}.dataset_config={section.dataset_config} is for a dataset with "
                f"several configurations, but {section.dataset} is a folder of save_to_disk, "
                "which has none; remove it."
            )

    def _builder(self) -> Any:
        """What `datasets` finds at the place of the dataset, of which nothing is read yet."""
        # Heavy, and needed for this source alone.
        from datasets import load_dataset_builder

        section = self.section
        folder = expanded(section.dataset)
        revision = self._revision()
        try:
            if revision.cached is not None and not section.streaming:
                return self._cached_builder(revision.cached)
            place = str(folder) if folder.is_dir() else section.dataset
            return load_dataset_builder(
                place, section.dataset_config, revision=revision.commit
            )
        except Exception as error:  # `datasets` has no common class for what is wrong
            words = _words(error)
            if _of_the_network(error) or revision.cached is not None:
                raise PipelineError(
                    f"{self.place}.dataset: {section.dataset} is not reached ({words}); "
                    "run the same command again."
                ) from None
            raise DataError(
                f"{self.place}.dataset: {section.dataset} cannot be opened as a dataset ({words})."
            ) from None

    def _cached_builder(self, folder: Path) -> Any:
        """The same as `_builder` for a copy, which has only files that were read before.

        A configuration of the dataset's card may name others, for which `datasets` would look.
        """
        from datasets import load_dataset_builder
        from huggingface_hub import DatasetCard

        name = self.section.dataset_config
        card = folder / "README.md"
        configurations = (
            DatasetCard.load(card).data.to_dict().get("configs")
            if card.exists()
            else []
        )
        chosen = _configuration(configurations or [], name)
        files = chosen.get("data_files")
        if isinstance(files, list) and all(isinstance(entry, dict) for entry in files):
            splits = (self.section.dataset_split, self.section.validation_split)
            files = {
                entry["split"]: entry["path"]
                for entry in files
                if entry["split"] in splits
            }
        return load_dataset_builder(
            str(folder),
            chosen.get("config_name", name),
            data_files=files or None,
        )

    def _refuse_unknown_split(
        self, key: str, name: str, files: dict[str, list[str]]
    ) -> None:
        if not files or name in files or name == ALL_SPLITS:
            return
        if not NAME_OF_SPLIT.fullmatch(name):
            return  # an expression
        if self._revision().cached is not None:
            raise PipelineError(
                f"{self.place}.{key}: {self.section.dataset} is not reached, and its copy on this "
                f"machine has no file of split '{name}'; run the same command again."
            )
        splits = [f"'{split}' ({_named(paths)})" for split, paths in files.items()]
        raise DataError(
            f"{self.place}.{key}: {self.section.dataset} has no split '{name}'; "
            f"it has {', '.join(splits)}. The names of files decide the splits, "
            "unless README.md does: name one of these splits, or rename the file."
        )

    def _inputs_of(self, builder: Any, split: str, paths: list[str]) -> list[TextInput]:
        """The files of a split, or the split itself where `datasets` reads them.

        Args:
            builder: None: the dataset is a folder of save_to_disk.
            paths: of its files; empty: the split is an expression, or has none.
        """
        section = self.section
        key = f"{self.place}.dataset"
        files = (
            self._files(paths) if paths and _is_read_as_files(builder, paths) else None
        )
        if files is not None:
            return [
                File(path, portable(name), section.text_column, key)
                for path, name in files
            ]
        split_read = Split(
            dataset=section.dataset,
            configuration=section.dataset_config,
            name=split,
            revision=self._revision(),
            streaming=section.streaming,
            text_column=section.text_column,
            key=key,
        )
        return [split_read]

    def _files(self, paths: list[str]) -> list[tuple[Path | RemoteFile, str]] | None:
        """The files at these places, with their paths in the dataset.

        None: some of them are elsewhere.
        """
        section = self.section
        revision = self._revision()
        folder = expanded(section.dataset)
        if folder.is_dir():
            return [(Path(path), _below(folder, path)) for path in paths]
        if revision.cached is not None:
            names = [_below(revision.cached, path) for path in paths]
        else:
            begin = f"hf://datasets/{section.dataset}@{revision.commit}/"
            if not all(path.startswith(begin) for path in paths):
                return None
            names = [path.removeprefix(begin) for path in paths]
        try:
            files = hub_files(section.dataset, revision, names, section.streaming)
        except OSError as error:
            raise DataError(
                f"{self.place}.dataset: {section.dataset} cannot be read ({error.strerror})."
            ) from None
        return [(file, file.path) for file in files]


@dataclass(frozen=True)
class Split(TextInput):
    """One split that `datasets` reads: from the copy that it makes on this machine, or streamed.

    Attributes:
        dataset: name on the Hub, local folder of one, or folder written by save_to_disk, which is
            read in place in any case.
        streaming: its files are read as they come, and no copy is kept: memory holds a few rows (of
            parquet a row group).
    """

    dataset: str
    configuration: str | None
    name: str
    revision: Revision
    streaming: bool
    text_column: str
    key: str = "data.dataset"

    def __str__(self) -> str:
        return shown_path(Path(self.dataset))

    @property
    def place(self) -> str:
        return f"hub://{self.dataset}/{self.configuration}/{self.name}"

    def stamp(self) -> Stamp | None:
        commit = self.revision.commit or ""
        return (commit,) if COMMIT.fullmatch(commit) else None

    def spans(self, most: int) -> list[Span] | None:
        """Ranges of rows of a folder of save_to_disk, which is read in place.

        None where it is small, or where opening the split would copy it.

        Raises:
            Unreadable, PipelineError: see `batches`.
        """
        if not is_saved(expanded(self.dataset)):
            return None
        dataset = _opened(self)
        size = dataset.data.nbytes
        if size <= most:
            return None
        count = len(dataset)
        rows = max(1, most * count // max(1, size))
        return [(first, min(first + rows, count)) for first in range(0, count, rows)]

    def batches(self, span: Span | None = None) -> Iterator[Batch]:
        """Every text in order, the same with and without `streaming`.

        Raises:
            Unreadable: it cannot be opened, or is damaged, or has no such column.
            PipelineError: what is read from elsewhere breaks off, or is not reached; the text is
                not known to be bad.
        """
        return in_batches(self._rows(span))

    def _rows(self, span: Span | None) -> TextRecords:
        dataset = _opened(self)
        # Those of a stream of JSON or CSV are known with the first rows.
        if dataset.column_names is not None:
            named_column(dataset.column_names, self.text_column)
            dataset = dataset.select_columns([self.text_column])
        if span is not None:
            dataset = dataset.select(range(*span))
        row = span[0] if span else 0
        for batch in _batches_of(dataset, self):
            named_column(list(batch), self.text_column)
            for value in batch[self.text_column]:
                row += 1
                yield as_text("" if value is None else value, f"row {row}")


def _batches_of(dataset: Any, split: Split) -> Iterator[dict[str, list[Any]]]:
    """The rows by column; an error among them is raised as PipelineError or Unreadable."""
    from datasets import Dataset

    try:
        batches = dataset.with_format(None).iter(batch_size=AT_ONCE)
        if isinstance(dataset, Dataset):
            # A saved one is read in place, and any offset in it is followed.
            dataset.data.validate(full=True)
        yield from batches
    except Exception as error:
        # It is of the network, a filesystem, or any of the readers inside `datasets`.
        fault = f"breaks off in split '{split.name}' ({_words(error)})"
        # What a cut connection looks like depends on the reader it meets; nothing that comes from
        # elsewhere is dropped for it.
        is_elsewhere = split.streaming and not expanded(split.dataset).is_dir()
        if is_elsewhere or _of_the_network(error):
            raise PipelineError(
                f"{split.dataset} {fault}; run the same command again."
            ) from None
        raise Unreadable(fault) from None


def _opened(split: Split) -> Any:
    import datasets  # heavy, and needed for this source alone

    folder = expanded(split.dataset)
    try:
        if is_saved(folder):
            loaded: Any = datasets.load_from_disk(str(folder))
            # By itself, it is the default split, and the one that it was.
            if not isinstance(loaded, datasets.DatasetDict):
                loaded = dict.fromkeys(("train", str(loaded.split or "train")), loaded)
            if split.name not in loaded:
                raise ValueError(f"it has {', '.join(map(str, loaded))}")
            return loaded[split.name]
        return datasets.load_dataset(
            str(folder) if folder.is_dir() else split.dataset,
            split.configuration,
            split=split.name,
            streaming=split.streaming,
            revision=split.revision.commit,
        )
    except (
        Exception
    ) as error:  # `datasets` has no common class for what is wrong with a file
        fault = (
            f"cannot be opened as a dataset with split '{split.name}' ({_words(error)})"
        )
        if _of_the_network(error):
            raise PipelineError(
                f"{split.dataset} {fault}; run the same command again."
            ) from None
        raise Unreadable(fault) from None


def _refuse_pointers_before_opening(folder: Path, paths: Iterable[Path]) -> None:
    """Refuse the pointers that change which splits `datasets` finds in a folder.

    It omits a link without its file, and opens every file of a saved folder.

    Raises:
        DataError: see `refuse_pointer`.
    """
    for name in DESCRIPTIONS:
        refuse_pointer(folder / name)
    is_opened_as_a_whole = is_saved(folder)
    for path in paths:
        is_needed = is_opened_as_a_whole or dangling(path) is not None
        if is_needed and format_of(path.name):
            refuse_pointer(path)


def _paths_read(
    builder: Any, splits: Iterable[str], files: dict[str, list[str]]
) -> list[str]:
    """The files that are opened to read these splits.

    They are those of all splits if `datasets` reads one, since it prepares all of them together.
    """
    read = list[str]()
    for split in splits:
        paths = files.get(split, [])
        if not paths or not _is_read_as_files(builder, paths):
            return [*chain.from_iterable(files.values())]
        read += paths
    return read


def _count_unread(folder: Path, used: Iterable[list[str]], not_text: NotText) -> None:
    """Count the files in a folder that are of no split that is used."""
    read = {Path(path).resolve() for paths in used for path in paths}
    for file in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not is_hidden and file.is_file() and file.resolve() not in read:
            not_text.count_other(file.name)


def _below(root: Path, path: str) -> str:
    """The path of a file below a folder, whose own path may be through links."""
    return Path(os.path.relpath(path, root.resolve())).as_posix()


def _named(paths: list[str]) -> str:
    """The name of the first file, for messages."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{Path(paths[0]).name}{more}" if paths else "no file"


def _is_read_as_files(builder: Any, paths: list[str]) -> bool:
    """Whether a builder of `datasets` reads these files as we do, by their formats alone."""
    if type(builder).__module__.rpartition(".")[2] not in OUR_BUILDERS:
        return False
    formats = {format_of(Path(path).name) for path in paths}
    if any(form is None or form.is_document for form in formats):
        return False
    config = builder.config
    default = type(config)()
    for field in fields(config):
        is_of_reading = field.name not in NOT_OF_READING
        if is_of_reading and getattr(config, field.name) != getattr(
            default, field.name
        ):
            return False
    separator = getattr(config, "sep", ",")
    return separator == "," or (separator == "\t" and TEXT_FORMATS["tsv"] in formats)


def _configuration(
    configurations: list[dict[str, Any]], name: str | None
) -> dict[str, Any]:
    """The entry of a dataset's card that `datasets` takes for this name; empty: none."""
    chosen = [
        entry for entry in configurations if entry["config_name"] == (name or "default")
    ]
    if name is None:
        stated = [entry for entry in configurations if entry.get("default")]
        chosen = configurations if len(configurations) == 1 else [*stated, *chosen]
    return chosen[0] if chosen else {}


def _of_the_network(error: Exception) -> bool:
    return any(
        isinstance(fault, ConnectionError | TimeoutError)
        for fault in (error, error.__cause__)
    )


def _words(error: Exception) -> str:
    """The message of an error, or of its cause, in one line."""
    is_plain = isinstance(error, OSError | ValueError | KeyError)
    clearest = error if is_plain else error.__cause__ or error
    return " ".join(str(clearest).split())


SOURCE = HuggingFace
