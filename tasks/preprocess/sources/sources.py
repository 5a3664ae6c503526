"""Where text comes from: a fixed, ordered list of places, each of which is read as a sequence of texts."""
# Of thousands of files; the functions of Path take several times as long:
# ruff: noqa: PTH113, PTH114, PTH116, PTH118, PTH119

import glob
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.schema.sources import SourceConfig, TextConfig
from infini_llama.tasks.preprocess.sources.formats import RECORDS, format_of, read, read_at
from infini_llama.tasks.preprocess.sources.hub import commit_of, texts_of
from infini_llama.tasks.preprocess.sources.passkey import PasskeyTexts
from infini_llama.tasks.preprocess.sources.remote import RemoteFile, is_remote, matching
from infini_llama.tasks.preprocess.sources.texts import Records
from infini_llama.tasks.records.manifest import Provenance

# Not the standard library's own, its tests (some of them not UTF-8 on purpose), and character tables, which are data.
SKIPPED_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
COMMIT = re.compile("[0-9a-f]{40}")
SKIPPED_RECORDS = {"state.json", "dataset_info.json", "dataset_dict.json"}  # of `datasets`, beside the data


@dataclass(frozen=True)
class Source:
    """One file, one split of a Hugging Face dataset, or texts that are made: its place here and its name everywhere."""

    path: Path | RemoteFile
    name: str
    text_column: str
    key: str = "data.files"
    dataset: tuple[str, str | None, str, str | None] | None = None  # path or name, configuration, split, revision
    format: str = "auto"
    streaming: bool = False  # of a dataset: read from where it is, not from a copy
    origin: str = ""  # of several sources in data.sources, the one it belongs to
    made: PasskeyTexts | None = None

    def __str__(self) -> str:
        """Its path, for messages."""
        return portable(str(self.path))

    def records(self, wanted: Iterator[int] | None = None, places: list[int] | None = None) -> Records:
        """Its texts in order, and a Fault for each bad record; if their ascending numbers are given, perhaps for unwanted ones, too.

        Args:
            places: takes, of a source whose records can be found again, the byte or row at which each begins.

        Raises:
            Unreadable: as a whole it is damaged.
            OSError: the disk does not give it.
        """
        if self.made:
            return iter(self.made)
        if self.dataset:
            return texts_of(*self.dataset, self.text_column, self.streaming, places=places)
        return read(self.path, self.text_column, self.format, wanted, places)

    def records_at(self, places: Iterator[int]) -> Records:
        """The records that begin at these of the places that `records` gave."""
        if self.dataset:
            return texts_of(*self.dataset, self.text_column, self.streaming, rows=places)
        return read_at(self.path, self.text_column, self.format, places)

    def size(self) -> int:
        """Size of its file; 0 where that is not known."""
        if isinstance(self.path, RemoteFile):
            return self.path.size or 0
        try:
            return 0 if self.made or self.dataset else os.stat(self.path).st_size
        except OSError:  # its reading says what is wrong
            return 0

    def stamp(self) -> list[Any] | None:
        """What stays the same exactly while the text does: of a file on a disk its size, inode and times; None where nothing is known."""
        if self.made:
            return None
        if self.dataset:
            return [self.dataset[3]] if COMMIT.fullmatch(self.dataset[3] or "") else None
        if isinstance(self.path, RemoteFile):
            return self.path.stamp
        try:
            status = self.path.stat()
        except OSError:
            return None
        return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def origins(data: DataConfig) -> dict[str, TextConfig]:
    """The sections that name text: `data` itself, or each of data.sources by its name, in the order of names."""
    return {origin.name: origin for origin in _by_name(data)} or {"": data}


def _by_name(data: DataConfig) -> list[SourceConfig]:
    return sorted(data.sources, key=lambda origin: origin.name)


def sources(text: TextConfig, origin: str = "") -> tuple[list[Source], list[Source]]:
    """What a section names, `data` or one of data.sources, each file once: (training, the user's own validation).

    Raises:
        DataError: nothing matches.
    """
    column, section = text.text_column, f"data.sources.{origin}" if origin else "data"
    if text.source == "huggingface":
        splits = [text.dataset_split, *([text.validation_split] if text.validation_split else [])]
        revision = commit_of(text.dataset, text.revision)
        named = [
            Source(
                Path(text.dataset),
                split,
                column,
                f"{section}.dataset",
                (text.dataset, text.dataset_config, split, revision),
                streaming=text.streaming,
                origin=origin,
            )
            for split in splits
        ]
        return named[:1], named[1:]
    if text.source == "passkey":
        made = PasskeyTexts(**text.passkey.model_dump())
        return [Source(Path("passkey"), "passkey", column, f"{section}.passkey", origin=origin, made=made)], []
    stdlib, form = text.source == "python-stdlib", text.format

    def placed(found: Iterable[tuple[Path | RemoteFile, str]], key: str) -> list[Source]:
        return [Source(path, portable(name), column, key, format=form, origin=origin) for path, name in found]

    training = placed(_stdlib() if stdlib else _matching(text.files, f"{section}.files", form), f"{section}.files")
    key = f"{section}.validation_files"
    held_out = placed(_matching(text.validation_files, key, form), key)
    if not held_out:
        return training, held_out
    real = _Real()
    own = {real.of(source.path) for source in held_out}
    return [source for source in training if real.of(source.path) not in own], held_out


class _Real:
    """Where links lead; thousands of files share their folders."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}

    def of(self, path: Path | RemoteFile) -> str | RemoteFile:
        if isinstance(path, RemoteFile):
            return path
        if os.path.islink(path):
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        if folder not in self.folders:
            self.folders[folder] = os.path.realpath(folder)
        return os.path.join(self.folders[folder], name)


def describe(data: DataConfig) -> Provenance:
    """Provenance of the source or sources, for the manifest."""
    if not data.sources:
        return _provenance(data)
    several = []
    for origin in _by_name(data):
        own = _provenance(origin)
        licence = origin.licence if origin.licence != "not stated" else own.licence
        several.append(own.model_copy(update={"name": origin.name, "weight": origin.weight, "licence": licence}))
    licences = sorted({origin.licence for origin in several})
    return Provenance(source="mixture", sources=tuple(several), licence="; ".join(licences))


def _provenance(text: TextConfig) -> Provenance:
    match text.source:
        case "python-stdlib":
            return Provenance(source=text.source, python=platform.python_version(), licence="PSF-2.0")
        case "huggingface":
            return Provenance(
                source=text.source,
                dataset=text.dataset,
                dataset_config=text.dataset_config,
                dataset_split=text.dataset_split,
                revision=commit_of(text.dataset, text.revision),
                validation_split=text.validation_split,
                licence="not stated",
            )
        case "passkey":
            made = text.passkey.model_dump(include={"documents", "repetitions", "seed"})
            made |= text.passkey.model_dump(include={"form", "filler"}, exclude_defaults=True)
            return Provenance(source=text.source, **made, licence="none: made by this program")
        case _:
            return Provenance(source=text.source, files=tuple(text.files), licence="not stated")


def portable(name: str) -> str:
    """The name of a file as text, which it need not be."""
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")


def _stdlib() -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_STDLIB)
        for file in files:
            if file.endswith(".py"):
                path = Path(folder) / file
                yield path, path.relative_to(root).as_posix()


def _matching(patterns: list[str], key: str, form: str) -> Iterator[tuple[Path | RemoteFile, str]]:
    seen, real = set(), _Real()
    for pattern in patterns:
        folder, files = (_remote if is_remote(pattern) else _local)(pattern, key, form)
        if not files:
            searched = "" if is_remote(pattern) else f" (looked from {Path.cwd()})"
            where = f" (the folder holds no txt, md, {', '.join(RECORDS)} file)" if folder else searched
            raise DataError(f"{key}: no file matches '{pattern}'{where}.")
        for path, name in files:
            if (place := real.of(path)) not in seen:
                seen.add(place)
                yield path, name


def _local(pattern: str, key: str, form: str) -> tuple[bool, list[tuple[Path, str]]]:
    expanded = str(Path(pattern).expanduser())
    literal = Path(expanded).is_file()  # also one whose name has brackets
    folder = Path(expanded).is_dir()
    root = Path(expanded).parent if literal else Path(expanded) if folder else _fixed_part(expanded)
    below = _known_below(root, form, key) if folder else sorted(_expanded(expanded, key))
    base = os.path.join(root, "")
    return folder, [
        (Path(path), path.removeprefix(base).replace(os.sep, "/") if path.startswith(base) else _relative(path, root))
        for path in ([expanded] if literal else below)
        if os.path.isfile(path)
    ]


def _relative(path: str, root: Path) -> str:
    return Path(path).relative_to(root).as_posix()


def _remote(pattern: str, key: str, form: str) -> tuple[bool, list[tuple[RemoteFile, str]]]:
    try:
        folder, files = matching(pattern)
    except PermissionError as error:
        raise DataError(f"{key}: '{pattern}' cannot be listed ({error.strerror}).") from None
    return folder, [one for one in files if not folder or _is_text(one[1].rpartition("/")[2], form)]


def _is_text(name: str, form: str) -> bool:
    """Whether a file of this name in a folder is read: its ending is known (or all formats are given), and `datasets` did not add it.

    A tar file, which may hold anything, is read only where a pattern names it.
    """
    added = name in SKIPPED_RECORDS or (name.startswith("cache-") and name.endswith(".arrow"))
    return not added and (form != "auto" or format_of(name) not in (None, "tar"))


def _known_below(folder: Path, form: str, key: str) -> list[str]:
    """Every file below it whose ending is known (all where their format is given), but hidden ones and what `datasets` adds."""
    found = sorted(_expanded(f"{glob.escape(str(folder))}/**/*", key))
    return [path for path in found if _is_text(os.path.basename(path), form)]


def _expanded(pattern: str, key: str) -> set[str]:
    """What the pattern matches. As `glob.glob`, but that this follows links that lead in circles again and again, and says nothing of
    folders that it cannot read."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return set(glob.glob(pattern))
    at = parts.index("**")
    bases = sorted(glob.glob(str(Path(*parts[:at]))))
    below = Path(*parts[at + 1 :]) if parts[at + 1 :] else Path("*")
    folders = [folder for base in bases for folder in _folders(Path(base), key, set())]
    return {path for folder in folders for path in _expanded(str(Path(glob.escape(str(folder)), below)), key)}


def _folders(folder: Path, key: str, seen: set[Path]) -> Iterator[Path]:
    """The folder and those below it that are not hidden, in order and each once, whatever links lead to it."""
    if not folder.is_dir() or (real := folder.resolve()) in seen:
        return
    seen.add(real)
    try:
        with os.scandir(folder) as entries:  # it knows what is a folder without a look at each file
            shown = (entry for entry in entries if not entry.name.startswith("."))
            inner = sorted(Path(entry) for entry in shown if (Path(entry) if entry.is_symlink() else entry).is_dir())
    except OSError as error:
        fault = f"{portable(str(folder))} cannot be read ({error.strerror})"
        raise DataError(f"{fault}; repair it, or remove it from {key}.") from None
    yield folder
    for path in inner:
        yield from _folders(path, key, seen)


def _fixed_part(pattern: str) -> Path:
    """The folder before the first wildcard: names are relative to it, so that they do not depend on where the text lies."""
    parts = Path(pattern).parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])
