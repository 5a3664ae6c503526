"""Folders that files belong to, by what lies in them.

These are folders that this program wrote, wherever they are, and tables with a log of versions.
"""
# Of thousands of folders; the functions of Path take several times as long:
# ruff: noqa: PTH120

import glob
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from infini_llama.configs.errors import DataError
from infini_llama.configs.text_formats import RECORD_ENDINGS
from infini_llama.tasks.storage.artifacts import MANIFEST, SELF_CHECKSUM

EXPORTED = "exported models"
# A file that this program writes into such a folder, and words at its beginning or end.
WRITTEN = {
    "lineage.json": (SELF_CHECKSUM, "runs"),
    MANIFEST: (SELF_CHECKSUM, "datasets, units or checkpoints"),
    "README.md": ("exported by infini-llama", EXPORTED),
}
LOOKED_AT = 2**12  # bytes
RECORDS = re.compile(rf"\.({'|'.join(RECORD_ENDINGS)})(?![a-z0-9])", re.IGNORECASE)
# Where the log of a table is, below its folder.
LOGS = {
    "_delta_log": "Delta Lake",
    ".hoodie": "Hudi",
    "metadata/*.metadata.json": "Iceberg",
    "snapshot/snapshot-*": "Paimon",
    "_spark_metadata": "Spark Structured Streaming",
}


class WrittenFolders:
    """Folders on this machine that this program wrote; each is looked at once."""

    def __init__(self) -> None:
        self.kinds: dict[str, str | None] = {}

    def kind_of(self, folder: str) -> str | None:
        """The kind of what was written into this folder or one around it; None: it is another's."""
        if folder not in self.kinds:
            around = os.path.dirname(folder)
            kind = _kind_written(folder)
            if kind is None and around != folder:
                kind = self.kind_of(around)
                if kind == EXPORTED:  # which has no folders
                    kind = None
            self.kinds[folder] = kind
        return self.kinds[folder]


def _kind_written(folder: str) -> str | None:
    for name, (words, kind) in WRITTEN.items():
        try:
            with Path(folder, name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - LOOKED_AT))
                last = file.read()
                file.seek(0)
                first = file.read(LOOKED_AT)
        except OSError:  # there is none, or it is closed to this user
            continue
        if words.encode() in first + last:
            return kind
    return None


def table_of(
    files: Iterable[str],
    matching: Callable[[str], list[str]] = glob.glob,
    levels: int | None = None,
) -> str | None:
    """The first table with a log of versions that files of records belong to, in words.

    Args:
        files: paths.
        matching: the paths that a pattern matches.
        levels: how many folders above each file are looked at; None: all.
    """
    seen = set[str]()
    for file in files:
        folder, name = os.path.split(file)
        if not RECORDS.search(name):
            continue
        for _ in range(folder.count("/") + 1 if levels is None else levels):
            if folder in seen:
                break
            seen.add(folder)
            for log, kind in LOGS.items():
                if matching(f"{glob.escape(folder)}/{log}"):
                    return f"{folder}, a table of {kind} (its log is {log})"
            folder = os.path.dirname(folder)
    return None


def refuse_table(table: str | None, place: str) -> None:
    """Refuse text that is of a table with a log of versions.

    Args:
        table: see `table_of`.
        place: of the text, in words.

    Raises:
        DataError: it is.
    """
    if table:
        raise DataError(
            f"{place} has files of {table}, of which not all count; "
            "write its current rows as parquet or JSON lines elsewhere, and name these."
        )
