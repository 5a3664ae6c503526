"""Which files patterns name, each once and in order, and what they are called: relative, so that it is the same everywhere."""
# Of thousands of files; the functions of Path take several times as long:
# ruff: noqa: PTH110, PTH113, PTH114, PTH118

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from infini_llama.configs.errors import DataError, escaped, portable
from infini_llama.tasks.preprocess.sources.formats import RECORDS, format_of
from infini_llama.tasks.preprocess.sources.remote import RemoteFile, is_remote, matching

# Not the standard library's own, its tests (some of them not UTF-8 on purpose), and character tables, which are data.
SKIPPED_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
SKIPPED_RECORDS = {"state.json", "dataset_info.json", "dataset_dict.json"}  # of `datasets`, beside the data


class RealPaths:
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


def python_stdlib() -> Iterator[tuple[Path, str]]:
    """The running interpreter's own sources."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_STDLIB)
        for file in files:
            if file.endswith(".py"):
                path = Path(folder) / file
                yield path, path.relative_to(root).as_posix()


def matching_files(
    patterns: list[str], key: str, form: str, passed_over: dict[str, int] | None = None
) -> Iterator[tuple[Path | RemoteFile, str]]:
    """Every file that a pattern matches, and its name.

    Args:
        key: of the configuration that holds the patterns.
        form: format of the files; auto: what their names say.
        passed_over: counts the files in folders that are not read, by their ending ("hidden": those whose name begins with a dot).

    Raises:
        DataError: a pattern matches none, or a folder cannot be read.
    """
    seen, real, others = set(), RealPaths(), Counter[str]()
    for pattern in patterns:
        folder, files = (_remote if is_remote(pattern) else _local)(pattern, key, form, others)
        if not files:
            searched = "" if is_remote(pattern) else f" (looked from {Path.cwd()})"
            where = f" (the folder holds no txt, md, {', '.join(RECORDS)} file)" if folder else searched
            raise DataError(f"{key}: no file matches '{pattern}'{where}.")
        for path, name in files:
            if (place := real.of(path)) not in seen:
                seen.add(place)
                yield path, name
    if passed_over is not None:
        for kind, count in others.items():
            passed_over[kind] = passed_over.get(kind, 0) + count


def _local(pattern: str, key: str, form: str, others: Counter[str]) -> tuple[bool, list[tuple[Path, str]]]:
    expanded = str(Path(pattern).expanduser())
    literal = Path(expanded).is_file()  # also one whose name has brackets
    folder = Path(expanded).is_dir()
    root = Path(expanded).parent if literal else Path(expanded) if folder else _fixed_part(expanded)
    below = _known_below(root, form, key, others) if folder else sorted(_expanded(expanded, key))
    base = os.path.join(root, "")
    return folder, [
        (Path(path), path.removeprefix(base).replace(os.sep, "/") if path.startswith(base) else _relative(path, root))
        for path in ([expanded] if literal else below)
        if _is_file(path)
    ]


def _is_file(path: str) -> bool:
    """Whether it is one, or a link that leads nowhere: its reading says what is missing."""
    return os.path.isfile(path) or (os.path.islink(path) and not os.path.exists(path))


def _relative(path: str, root: Path) -> str:
    return Path(path).relative_to(root).as_posix()


def _remote(pattern: str, key: str, form: str, others: Counter[str]) -> tuple[bool, list[tuple[RemoteFile, str]]]:
    try:
        folder, files = matching(pattern)
    except PermissionError as error:
        raise DataError(f"{key}: '{pattern}' cannot be listed ({error.strerror}).") from None
    kept = []
    for file in files:
        if not folder or _is_text(name := file[1].rpartition("/")[2], form):
            kept.append(file)
        else:
            _count(name, others)
    return folder, kept


def _is_text(name: str, form: str) -> bool:
    """Whether a file of this name in a folder is read: its ending is known (or all formats are given), and `datasets` did not add it."""
    return not _is_added(name) and (form != "auto" or format_of(name) is not None)


def _is_added(name: str) -> bool:
    """Whether `datasets` adds files of this name to a folder of data."""
    return name in SKIPPED_RECORDS or (name.startswith("cache-") and name.endswith(".arrow"))


def _count(name: str, others: Counter[str]) -> None:
    """Counts a file that is not read by the ending of its name."""
    if not _is_added(name):
        others["hidden" if name.startswith(".") else escaped(portable(Path(name).suffix.lower())) or "no ending"] += 1


def _known_below(root: Path, form: str, key: str, others: Counter[str]) -> list[str]:
    """Every file below it whose ending is known (all where their format is given), except hidden ones and what `datasets` adds."""
    texts = []
    for folder, names in _folders(str(root), key):
        for name in filter(lambda name: _is_file(os.path.join(folder, name)), names):
            if not name.startswith(".") and _is_text(name, form):
                texts.append(os.path.join(folder, name))
            else:
                _count(name, others)
    return sorted(texts)


def _expanded(pattern: str, key: str) -> set[str]:
    """What the pattern matches. As `glob.glob`, but that this follows links that lead in circles again and again, and says nothing of
    folders that it cannot read."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return set(glob.glob(pattern))
    place = parts.index("**")
    below = Path(*parts[place + 1 :]) if parts[place + 1 :] else Path("*")
    folders = [
        folder
        for base in glob.glob(str(Path(*parts[:place])))
        if Path(base).is_dir()
        for folder, _ in _folders(base, key)
    ]
    return {path for folder in folders for path in _expanded(str(Path(glob.escape(folder), below)), key)}


def _folders(root: str, key: str) -> Iterator[tuple[str, list[str]]]:
    """The folder and those below it that are not hidden, each once whatever links lead to it, with the names of their files."""

    def refuse(error: OSError) -> None:
        fault = f"{escaped(portable(str(error.filename)))} cannot be read ({error.strerror})"
        raise DataError(f"{fault}; repair it, or remove it from {key}.")

    seen: set[str] = set()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield folder, files


def _fixed_part(pattern: str) -> Path:
    """The folder before the first wildcard: names are relative to it, so that they do not depend on where the text lies."""
    parts = Path(pattern).parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])
