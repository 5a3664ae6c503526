"""Saving what is whole of a damaged dataset, so that the next build makes the rest alone."""

import logging
from pathlib import Path
from typing import Any

from infini_llama.tasks.preprocess.tokens.journal import Journal
from infini_llama.tasks.storage.artifacts import (
    Damaged,
    check,
    file_checksum,
    is_moved_aside,
    move_aside,
    read_manifest,
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
        manifest: dict[str, Any] = read_manifest(folder, "dataset", key)
    except Damaged:
        manifest = {"files": {}, "content": {}}
    aside = move_aside(folder)
    log.warning("%s; what is left of the damaged dataset is in %s", fault, aside)

    def is_good(name: str) -> bool:
        file = aside / name
        known = name in manifest["files"] and file.is_file() and not file.is_symlink()
        return known and file_checksum(file) == manifest["files"][name]["checksum"]

    if not is_good(TOKENIZER):
        return
    journal.close()
    journal.work.mkdir()
    keys = manifest["meta"].get("units", {})  # a dataset of an older version has none, and its shards are encoded again
    splits = [manifest["content"][split]["shards"] for split in ("train", "validation")]
    facts = {
        shard["file"]: {"key": keys.get(shard["file"], "")} | {name: shard[name] for name in ("documents", "tokens")}
        for shards in splits
        for shard in shards
    }
    for name in [TOKENIZER, *filter(is_good, facts)]:
        (journal.work / name).parent.mkdir(exist_ok=True)
        (aside / name).rename(journal.work / name)
        journal.record(name, **facts.get(name, {}))
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
