"""Saving what is whole of a damaged dataset, so that the next build makes the rest alone."""

import logging
from pathlib import Path

from infini_llama.tasks.preprocess.tokens.journal import Journal
from infini_llama.tasks.storage.artifacts import (
    Damaged,
    check,
    file_checksum,
    is_moved_aside,
    move_aside,
    read_dataset,
)

log = logging.getLogger("infini_llama.preprocess")
TOKENIZER = "tokenizer.json"


def salvage(folder: Path, key: str, journal: Journal) -> None:
    """Moves a damaged dataset aside and its good shards, tokenizer and row tables back to where the next build uses them.

    The tokenizer decides every shard: without it, or without a manifest that says which bytes are good, nothing is kept. A shard keeps
    the key it was written under, and the build encodes it again where today's is another.
    A dataset with nothing damaged is left as it is.

    Args:
        key: of the dataset that belongs in `folder`; of another one, nothing is kept.
    """
    for table in _tables(folder):
        if fault := _fault(table, "chunks"):
            log.warning("%s; it was moved to %s", fault, move_aside(table))
    if not folder.exists() or (fault := _fault(folder, "dataset", key)) is None:
        return
    try:
        manifest = read_dataset(folder, key)
    except Damaged:
        manifest = None
    aside = move_aside(folder)
    log.warning("%s; what is left of the damaged dataset is in %s", fault, aside)
    files = manifest.files if manifest else {}

    def is_good(name: str) -> bool:
        file = aside / name
        known = name in files and file.is_file() and not file.is_symlink()
        return known and file_checksum(file) == files[name].checksum

    if manifest is None or not is_good(TOKENIZER):
        return
    journal.close()
    journal.work.mkdir()
    shards = {shard.file: shard for shard in (*manifest.content.train.shards, *manifest.content.validation.shards)}
    for name in [TOKENIZER, *filter(is_good, shards)]:
        (journal.work / name).parent.mkdir(exist_ok=True)
        (aside / name).rename(journal.work / name)
        if shard := shards.get(name):
            key = manifest.meta.units.get(name, "")  # of an older dataset, whose shards are encoded again
            journal.record(name, key, shard.documents, shard.tokens)
        else:
            journal.record(name)
    for table in _tables(aside):
        (journal.work / "chunks").mkdir(exist_ok=True)
        table.rename(journal.work / "chunks" / table.name)


def _tables(folder: Path) -> list[Path]:
    return [table for table in sorted((folder / "chunks").glob("[!.]*")) if not is_moved_aside(table)]


def _fault(folder: Path, kind: str, key: str | None = None) -> Damaged | None:
    try:
        check(folder, kind, checksums=True, key=key)
    except Damaged as fault:
        return fault
    return None
