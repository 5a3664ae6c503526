"""Where text comes from: a fixed, ordered list of places, each of which is read as a sequence of texts."""

import glob
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.schema.data import SourceConfig, TextConfig
from infini_llama.tasks.preprocess.sources.formats import RECORDS, format_of, read
from infini_llama.tasks.preprocess.sources.hub import texts_of
from infini_llama.tasks.preprocess.sources.json_lines import lines_at
from infini_llama.tasks.preprocess.sources.passkey import PasskeyTexts
from infini_llama.tasks.preprocess.sources.texts import Records
from infini_llama.tasks.records.manifest import Provenance

# Not the standard library's own, its tests (some of them not UTF-8 on purpose), and character tables, which are data.
SKIPPED_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
SKIPPED_RECORDS = {"state.json", "dataset_info.json", "dataset_dict.json"}  # of `datasets`, beside the data


@dataclass(frozen=True)
class Source:
    """One file, one split of a Hugging Face dataset, or texts that are made: its place here and its name everywhere."""

    path: Path
    name: str
    text_column: str
    key: str = "data.files"
    dataset: tuple[str, str | None, str] | None = None  # path or name, configuration, split
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
            places: takes, of a file whose records can be found again, the byte at which each begins.

        Raises:
            Unreadable: as a whole it is damaged.
            OSError: the disk does not give it.
        """
        if self.made:
            return iter(self.made)
        if self.dataset:
            return texts_of(*self.dataset, self.text_column, self.streaming)
        return read(self.path, self.text_column, self.format, wanted, places)

    def records_at(self, places: Iterable[int]) -> Records:
        """The records that begin at these of the bytes that `records` gave."""
        return lines_at(self.path, self.text_column, places)


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
        named = [
            Source(
                Path(text.dataset),
                split,
                column,
                f"{section}.dataset",
                (text.dataset, text.dataset_config, split),
                streaming=text.streaming,
                origin=origin,
            )
            for split in splits
        ]
        return named[:1], named[1:]
    if text.source == "passkey":
        made = PasskeyTexts(text.passkey.documents, text.passkey.repetitions, text.passkey.seed)
        return [Source(Path("passkey"), "passkey", column, f"{section}.passkey", origin=origin, made=made)], []
    stdlib, form = text.source == "python-stdlib", text.format

    def placed(found: Iterable[tuple[Path, str]], key: str) -> list[Source]:
        return [Source(path, portable(name), column, key, format=form, origin=origin) for path, name in found]

    training = placed(_stdlib() if stdlib else _matching(text.files, f"{section}.files", form), f"{section}.files")
    key = f"{section}.validation_files"
    held_out = placed(_matching(text.validation_files, key, form), key)
    own = {source.path.resolve() for source in held_out}
    return [source for source in training if source.path.resolve() not in own], held_out


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
                validation_split=text.validation_split,
                licence="not stated",
            )
        case "passkey":
            made = text.passkey.model_dump()
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


def _matching(patterns: list[str], key: str, form: str) -> Iterator[tuple[Path, str]]:
    seen = set()
    for pattern in patterns:
        expanded = str(Path(pattern).expanduser())
        literal = Path(expanded).is_file()  # also one whose name has brackets
        folder = Path(expanded).is_dir()
        root = Path(expanded).parent if literal else Path(expanded) if folder else _fixed_part(expanded)
        below = _known_below(root, form, key) if folder else sorted(_expanded(expanded, key))
        paths = [expanded] if literal else below
        files = [Path(path) for path in paths if Path(path).is_file()]
        if not files:
            where = f"the folder holds no txt, md, {', '.join(RECORDS)} file" if folder else f"looked from {Path.cwd()}"
            raise DataError(f"{key}: no file matches '{pattern}' ({where}).")
        for path in files:
            if (real := path.resolve()) not in seen:
                seen.add(real)
                yield path, path.relative_to(root).as_posix()


def _known_below(folder: Path, form: str, key: str) -> list[str]:
    """Every file below it whose ending is known (all where their format is given), but hidden ones and what `datasets` adds."""
    found = [Path(path) for path in sorted(_expanded(f"{glob.escape(str(folder))}/**/*", key))]
    kept = [path for path in found if path.name not in SKIPPED_RECORDS and not path.match("cache-*.arrow")]
    return [str(path) for path in kept if form != "auto" or format_of(path)]


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
        raise DataError(f"{fault}; mend it, or leave it out of {key}.") from None
    yield folder
    for path in inner:
        yield from _folders(path, key, seen)


def _fixed_part(pattern: str) -> Path:
    """The folder before the first wildcard: names are relative to it, so that they do not depend on where the text lies."""
    parts = Path(pattern).parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])
