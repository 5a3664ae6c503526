"""Where text comes from: a fixed, ordered list of documents, each known by the hash of its bytes."""

import glob
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from configs.errors import DataError

# Not the standard library's own, its tests (some of them not UTF-8 on purpose), and character tables, which are data.
SKIPPED_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}


@dataclass(frozen=True)
class Document:
    """One file of text: its place on this machine, its name everywhere, its size and the blake3 of its bytes."""

    path: Path
    name: str
    size: int
    hash: str

    def text(self) -> str:
        """The file's text; what its hash was taken of, or an error.

        Raises:
            DataError: not UTF-8, or changed since it was hashed.
        """
        data = self.path.read_bytes()
        if blake3(data).hexdigest() != self.hash:
            raise DataError(f"{self.path} changed while it was being prepared; run the same command again.")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is not UTF-8 (byte {error.start}: 0x{data[error.start]:02x}); convert it, or leave it out of data.files."
            ) from None


def documents(data: dict) -> list[Document]:
    """Every document of the configuration's `data` section, sorted by name, each file once.

    Raises:
        DataError: nothing matches, or a file cannot be read or is not UTF-8.
    """
    found = _stdlib() if data["source"] == "python-stdlib" else _matching(data["files"])
    read = [_document(path, name) for path, name in found]
    return sorted((document for document in read if document.size), key=lambda document: (document.name, document.hash))


def describe(data: dict) -> dict:
    """Provenance of the source, for the manifest."""
    if data["source"] == "python-stdlib":
        return {"source": "python-stdlib", "python": platform.python_version(), "licence": "PSF-2.0"}
    return {"source": "files", "files": data["files"], "licence": "not stated"}


def _document(path: Path, name: str) -> Document:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); mend it, or leave it out of data.files.") from None
    portable = os.fsencode(name).decode("utf-8", errors="backslashreplace")  # a file's name need not be text
    document = Document(path, portable, len(data), blake3(data).hexdigest())
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        document.text()  # says where
    return document


def _stdlib() -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_STDLIB)
        for file in files:
            if file.endswith(".py"):
                path = Path(folder) / file
                yield path, path.relative_to(root).as_posix()


def _matching(patterns: list[str]) -> Iterator[tuple[Path, str]]:
    seen = set()
    for pattern in patterns:
        expanded = str(Path(pattern).expanduser())
        literal = Path(expanded).is_file()  # also one whose name has brackets
        root = Path(expanded).parent if literal else _fixed_part(expanded)
        paths = [expanded] if literal else sorted(glob.glob(expanded, recursive=True))
        files = [Path(path) for path in paths if Path(path).is_file()]
        if not files:
            where = "it is a folder; add /**/*.txt" if Path(expanded).is_dir() else f"looked from {Path.cwd()}"
            raise DataError(f"data.files: no file matches '{pattern}' ({where}).")
        for path in files:
            if (real := path.resolve()) not in seen:
                seen.add(real)
                yield path, path.relative_to(root).as_posix()


def _fixed_part(pattern: str) -> Path:
    """The folder before the first wildcard: names are relative to it, so that they do not depend on where the text lies."""
    parts = Path(pattern).parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])
