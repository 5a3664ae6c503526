"""Files that patterns name, each once and in order, and their names.

A name is relative, so that it is the same everywhere.
"""
# Of thousands of files; the functions of Path take several times as long:
# ruff: noqa: PTH100, PTH110, PTH113, PTH114, PTH118, PTH120

import glob
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from infini_llama.configs.errors import ConfigError, DataError, shown_path, shown_url
from infini_llama.configs.reading import expanded
from infini_llama.configs.text_formats import BY_ENDING
from infini_llama.tasks.preprocess.sources.folders import kind_written, refuse_tables
from infini_llama.tasks.preprocess.sources.formats import format_of
from infini_llama.tasks.preprocess.sources.remote import (
    RemoteFile,
    filesystem,
    is_remote,
    matching,
    tried,
)
from infini_llama.tasks.storage.files import OF_SYSTEMS

# Files of `datasets`, beside the data.
SKIPPED_RECORDS = {
    "state.json",
    "dataset_info.json",
    "dataset_dict.json",
}
# Folders that a home folder has.
WRITTEN = (
    "units",
    "datasets",
    "runs",
    "locks",
    "engine-checks",
    "compile-cache",
    "prefect",
)


def real_path(path: Path | RemoteFile) -> str | RemoteFile:
    """The file that a path leads to."""
    return path if isinstance(path, RemoteFile) else os.path.realpath(path)


class NotText:
    """Files in folders of text that are not read.

    These are those of this program, and those whose names say that they are no text.

    What lies below the home folder is this program's, and what it has written elsewhere. A pattern
    that begins in the home folder names text of the user's; then only what the program has written
    is left out.

    Args:
        places: further files, folders and URLs of a run, and what each of them is.

    Attributes:
        own: the place of each file of this program that was left out.
        others: how many files with other endings, or of no split of a dataset's folder, there are,
            by their ending ("hidden": those whose name begins with a dot).
    """

    def __init__(self, home: Path, places: Mapping[str, str] | None = None) -> None:
        self.below_home = f"below {home} (runtime.home)"
        named = {str(home / name): self.below_home for name in WRITTEN}
        named |= {place: f"{place} ({kind})" for place, kind in (places or {}).items()}
        self.written = {
            place.rstrip("/") if is_remote(place) else os.path.realpath(place): name
            for place, name in named.items()
        }
        self.home = os.path.realpath(home)
        self.kinds: dict[str, str | None] = {}
        self.own: dict[str | RemoteFile, str] = {}
        self.others = Counter[str]()

    def place_of(self, real: str | RemoteFile, begin: str) -> str | None:
        """The place of this program that a file or folder belongs to, in words.

        None: it may be text.

        Args:
            real: see `real_path`; of a folder, with a slash at its end.
            begin: the same of the file or folder where the pattern begins.
        """
        path = real.url if isinstance(real, RemoteFile) else real
        for place, name in self.written.items():
            if _is_in(path, place):
                return name
        if _is_in(path, self.home) and not _is_in(begin, self.home):
            return self.below_home
        if isinstance(real, RemoteFile):
            return None
        kind = kind_written(os.path.dirname(path), self.kinds)
        return f"{kind} elsewhere" if kind else None

    def count_other(self, name: str) -> None:
        """Count a file that is no text by the ending of its name."""
        if not _is_added(name):
            ending = shown_path(Path(name).suffix.lower()) or "no ending"
            self.others["hidden" if name.startswith(".") else ending] += 1


def _is_in(path: str, folder: str) -> bool:
    """Whether a path is this folder or below it."""
    return path == folder or path.startswith(os.path.join(folder, ""))


def matching_files(
    patterns: list[str],
    key: str,
    form: str,
    not_text: NotText,
) -> Iterator[tuple[Path | RemoteFile, str]]:
    """Every file that a pattern matches, and its name.

    Args:
        key: of the configuration that holds the patterns.
        form: format of the files; auto: what their names say.
        not_text: what is left out, and counted there.

    Raises:
        DataError: a pattern matches none or names what is no file, or a folder cannot be read.
    """
    seen = set[str | RemoteFile]()
    for pattern in patterns:
        if is_remote(pattern):
            begin = ""
            folder, files = _remote(pattern, key, form, not_text)
        else:
            local = str(expanded(pattern))
            target = Path(local)
            if target.exists() and not target.is_file() and not target.is_dir():
                raise DataError(
                    f"{key}: '{pattern}' is a pipe, device or socket; "
                    "write its text to a file, and name that."
                )
            root = target if target.exists() else _fixed_part(local)
            begin = os.path.realpath(root)
            folder, files = _local(local, root, key, form, not_text)
        if not files:
            raise _nothing_matches(pattern, key, folder)
        named = [(path, name, real_path(path)) for path, name in files]
        _refuse_tables(files, f"{key}: '{shown_url(pattern)}'")
        own = {place: not_text.place_of(place, begin) for _, _, place in named}
        if None not in own.values():
            places = " and ".join(sorted({str(name) for name in own.values()}))
            raise DataError(
                f"{key}: '{shown_url(pattern)}' matches only files of this program, "
                f"which are no text: {places}; name text that lies elsewhere."
            )
        for path, name, place in named:
            if place in seen:
                continue
            seen.add(place)
            own_place = own[place]
            if own_place is None:
                yield path, name
            else:
                not_text.own[place] = own_place


def _refuse_tables(files: Sequence[tuple[Path | RemoteFile, str]], place: str) -> None:
    """Refuse files of a table with a log of versions; of remote ones the first is looked at."""
    first, name = files[0]
    if not isinstance(first, RemoteFile):
        refuse_tables((os.path.abspath(str(path)) for path, _ in files), place)
        return
    if first.url.startswith("http"):
        return
    remote, path = filesystem(first.url)

    def matching(pattern: str) -> list[str]:
        try:
            return tried(first.url, lambda: remote.glob(pattern))
        except (FileNotFoundError, PermissionError):
            return []

    refuse_tables([path], place, matching, levels=name.count("/") + 2)


def _nothing_matches(pattern: str, key: str, is_folder: bool) -> DataError:
    where = "" if is_remote(pattern) else f" (looked from {Path.cwd()})"
    if is_folder:
        where = f" (the folder holds no {', '.join(BY_ENDING)} file)"
    return DataError(f"{key}: no file matches '{shown_url(pattern)}'{where}.")


def _local(
    pattern: str,
    root: Path,
    key: str,
    form: str,
    not_text: NotText,
) -> tuple[bool, list[tuple[Path, str]]]:
    """Whether the pattern names a folder, and each file that it matches, with its name.

    Args:
        root: the file or folder of this name, also one whose name has brackets, or the pattern's
            fixed part.
    """
    is_folder = root.is_dir() and root == Path(pattern)
    if root.is_file():
        root = root.parent
        paths = [pattern]
    elif is_folder:
        paths = _known_below(root, form, key, not_text)
    else:
        paths = sorted(_expanded(pattern, key, not_text))
    base = os.path.join(root, "")
    files = list[tuple[Path, str]]()
    for path in filter(_is_file, paths):
        name = (
            path.removeprefix(base)
            if path.startswith(base)
            else Path(path).relative_to(root).as_posix()
        )
        files.append((Path(path), name))
    return is_folder, files


def _is_file(path: str) -> bool:
    """Whether it is a file, or a link that leads nowhere, whose reading raises a clear error."""
    return os.path.isfile(path) or (os.path.islink(path) and not os.path.exists(path))


def _remote(
    pattern: str,
    key: str,
    form: str,
    not_text: NotText,
) -> tuple[bool, list[tuple[RemoteFile, str]]]:
    """Whether the pattern names a remote folder, and each file that it matches, with its name."""
    try:
        folder, files = matching(pattern)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    except PermissionError as error:
        raise DataError(
            f"{key}: '{shown_url(pattern)}' cannot be listed ({error.strerror})."
        ) from None
    except FileNotFoundError as error:
        raise DataError(
            f"{key}: the listing of '{shown_url(pattern)}' has {error.filename}, which its server "
            "does not have; remove the link, or name the other files."
        ) from None
    if not folder:
        return folder, files
    kept = list[tuple[RemoteFile, str]]()
    for file, path in files:
        name = path.rpartition("/")[2]
        if _is_text(name, form):
            kept.append((file, path))
        else:
            not_text.count_other(name)
    return folder, kept


def _is_text(name: str, form: str) -> bool:
    """Whether a file of this name in a folder is read.

    Its ending is known (or all formats are given), and `datasets` did not add it.
    """
    return not _is_added(name) and (form != "auto" or format_of(name) is not None)


def _is_added(name: str) -> bool:
    """Whether `datasets` adds files of this name to a folder of data."""
    return name in SKIPPED_RECORDS or (
        name.startswith("cache-") and name.endswith(".arrow")
    )


def _known_below(
    root: Path,
    form: str,
    key: str,
    not_text: NotText,
) -> list[str]:
    """Every file below it whose ending is known (all where their format is given).

    Hidden ones and what `datasets` adds are left out.
    """
    texts = list[str]()
    for folder, names, is_own in _folders(str(root), key, not_text):
        earlier = _earlier_shards(folder, names)
        for name in names:
            path = os.path.join(folder, name)
            if not _is_file(path):
                continue
            if (
                not name.startswith(".")
                and _is_text(name, form)
                and name not in earlier
            ):
                texts.append(path)
            elif not is_own:
                not_text.count_other(name)
    return sorted(texts)


def _earlier_shards(folder: str, names: list[str]) -> set[str]:
    """Shards that `datasets` wrote into the folder before, when there were more or fewer.

    Its state.json names those of today.
    """
    if "state.json" not in names:
        return set()
    try:
        stated = json.loads(Path(folder, "state.json").read_text(encoding="utf-8"))[
            "_data_files"
        ]
        today = {file["filename"] for file in stated}
    except (OSError, ValueError, LookupError, TypeError):  # of another program
        return set()
    shards = {
        name for name in names if name.startswith("data-") and name.endswith(".arrow")
    }
    return shards - today


def _expanded(pattern: str, key: str, not_text: NotText) -> set[str]:
    """The files that the pattern matches.

    `glob.glob` follows links that lead in circles again and again, and does not report folders that
    it cannot read.
    """
    parts = Path(pattern).parts
    if "**" not in parts:
        return set(glob.glob(pattern))
    place = parts.index("**")
    below = Path(*(parts[place + 1 :] or ("*",)))
    files = set[str]()
    bases = glob.glob(str(Path(*parts[:place])))
    for base in filter(os.path.isdir, bases):
        for folder, _, _ in _folders(base, key, not_text):
            files |= _expanded(str(Path(glob.escape(folder), below)), key, not_text)
    return files


def _folders(
    root: str,
    key: str,
    not_text: NotText,
) -> Iterator[tuple[str, list[str], bool]]:
    """The folder and those below it, each once whatever links lead to it.

    Left out are those that are hidden or the system's: a disk of one's own has lost+found, which is
    closed to users.

    Yields:
        a folder, the names of its files, and whether it is this program's.
    """
    begin = os.path.realpath(root)

    def refuse(error: OSError) -> None:
        folder = os.path.join(os.path.realpath(error.filename), "")
        if not_text.place_of(folder, begin) is None:
            fault = f"{shown_path(error.filename)} cannot be read ({error.strerror})"
            raise DataError(f"{fault}; repair it, or remove it from {key}.")

    seen: set[str] = set()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in OF_SYSTEMS
        )
        yield (
            folder,
            files,
            not_text.place_of(os.path.join(real, ""), begin) is not None,
        )


def _fixed_part(pattern: str) -> Path:
    """The folder before the first wildcard.

    Names are relative to it, so that they do not depend on where the text lies.
    """
    folders = Path(pattern).parts[:-1]
    return Path(*takewhile(lambda part: not glob.has_magic(part), folders))
