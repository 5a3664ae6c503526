"""Folders that files belong to, by what lies in them.

These are folders that this program wrote, wherever they are, and tables with a log of versions.
"""
# Of thousands of folders; the functions of Path take several times as long:
# ruff: noqa: PTH119, PTH120

import glob
import os
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path, PurePosixPath

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.sources.first_bytes import FORMAT_IN_NAME
from infini_llama.tasks.storage.artifacts import MANIFEST, SELF_CHECKSUM

EXPORTED = "exported models"
# A file that this program writes into such a folder, and words at its beginning or end. Another
# README may have them, too: that of a model is beside its config.json.
WRITTEN = {
    "lineage.json": (SELF_CHECKSUM, "runs"),
    MANIFEST: (SELF_CHECKSUM, "datasets, units or checkpoints"),
    "README.md": ("exported by infini-llama", EXPORTED),
}
LOOKED_AT = 2**12  # bytes
# Where the log of a table is, below its folder.
LOGS = {
    "_delta_log": "Delta Lake",
    ".hoodie": "Hudi",
    "metadata/*.metadata.json": "Iceberg",
    "snapshot/snapshot-*": "Paimon",
    "_spark_metadata": "Spark Structured Streaming",
}


def kind_written(folder: str, seen: dict[str, str | None]) -> str | None:
    """The kind of what this program wrote into this folder or one around it; None: it did not.

    Args:
        seen: the kinds of folders, each of which is looked at once.
    """
    if folder not in seen:
        kind = _kind_written(folder)
        around = os.path.dirname(folder)
        if kind is None and around != folder:
            of_around = kind_written(around, seen)
            kind = None if of_around == EXPORTED else of_around  # which has no folders
        seen[folder] = kind
    return seen[folder]


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
        is_alone = kind == EXPORTED and not Path(folder, "config.json").exists()
        if words.encode() in first + last and not is_alone:
            return kind
    return None


def refuse_tables(
    files: Iterable[str],
    place: str,
    matching: Callable[[str], list[str]] = glob.glob,
    levels: int | None = None,
) -> None:
    """Refuse files of records that belong to a table with a log of versions.

    Args:
        files: paths.
        place: that names them, in words.
        matching: the paths that a pattern matches.
        levels: how many folders above each file are looked at; None: all.

    Raises:
        DataError: some do.
    """
    of_records = (
        file for file in files if FORMAT_IN_NAME.search(os.path.basename(file).lower())
    )
    holding = {PurePosixPath(file).parent: None for file in of_records}  # in order
    around = {
        str(folder): None
        for inner in holding
        for folder in (inner, *inner.parents)[:levels]
        if folder.name
    }
    for folder, (log, kind) in product(around, LOGS.items()):
        if matching(f"{glob.escape(folder)}/{log}"):
            raise DataError(
                f"{place} has files of {folder}, a table of {kind} (its log is {log}), "
                "of which not all count; write its current rows as parquet or JSON lines "
                "elsewhere, and name these."
            )
