"""Shards of earlier datasets that are those of this one: text that has been tokenized before is not tokenized again."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import tokenizers
from blake3 import blake3

from tasks.artifacts import Damaged, checksum_of, file_checksum, read_manifest, sync
from tasks.preprocess.journal import Journal
from tasks.preprocess.keys import TOKENS_VERSION
from tasks.preprocess.units import Plan, Unit

log = logging.getLogger("infini_llama.preprocess")


def unit_keys(plan: Plan, tokenizer: Path, eos: int) -> dict[str, str]:
    """A key for each unit's shard, by its file: a hash of all that decides the shard's bytes.

    These are the texts of its documents in order, the tokenizer, the token that ends a document, and who writes the file. Where
    the documents lie, what their files are called and which shard of its dataset it is decide nothing.
    """
    common = [TOKENS_VERSION, tokenizers.__version__, pa.__version__, file_checksum(tokenizer), eos]
    keys = {}
    for unit in plan.units:
        text = blake3()
        for rows in plan.hashes(unit):
            text.update(rows.tobytes())
        keys[unit.file] = checksum_of([*common, text.hexdigest()])
    return keys


def reuse(units: list[Unit], keys: dict[str, str], datasets: Path, journal: Journal) -> list[Unit]:
    """Links (or copies) each shard that an earlier dataset has into the build, once its bytes are those of that dataset's manifest.

    Args:
        units: that are missing.
        keys: of `unit_keys`.
        datasets: folder of the earlier datasets.

    Returns:
        the units that are left to be tokenized.
    """
    known = {key: found for folder, facts in _earlier(datasets) for key, found in _shards(folder, facts)}
    left = []
    for unit in units:
        shard, checksum, facts = known.get(keys[unit.file], (None, "", {}))
        if shard is None or not _take(shard, journal.work / unit.file, checksum):
            left.append(unit)
            continue
        journal.append({"file": unit.file, "checksum": checksum} | facts)
    if len(left) < len(units):
        log.info(
            "%d of %d shards are taken from earlier datasets with the same text and tokenizer; %d are tokenized",
            len(units) - len(left),
            len(units),
            len(left),
        )
    return left


def _earlier(datasets: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every dataset that is whole, but none that was moved aside."""
    for folder in sorted(datasets.glob("[!.]*")):
        if folder.is_dir() and not folder.is_symlink() and ".damaged-" not in folder.name:
            with suppress(Damaged, OSError):
                yield folder, read_manifest(folder, "dataset")


def _shards(folder: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, tuple[Path, str, dict[str, int]]]]:
    keys = manifest["meta"].get("units", {})  # a dataset of an older version has none
    for shard in [*manifest["content"]["train"]["shards"], *manifest["content"]["validation"]["shards"]]:
        if key := keys.get(name := shard["file"]):
            facts = {field: shard[field] for field in ("documents", "tokens")}
            yield key, (folder / name, manifest["files"][name]["checksum"], facts)


def _take(shard: Path, target: Path, checksum: str) -> bool:
    """Whether the shard now stands at `target`, with the bytes of its checksum and on the disk.

    A link costs no space and no time; nothing ever writes into a finished shard. Where the filesystem has no links, it is a copy.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        try:
            os.link(shard, part)
        except FileNotFoundError:  # somebody has removed that dataset meanwhile
            return False
        except OSError:
            shutil.copyfile(shard, part)
            sync(part)
        if file_checksum(part) != checksum:
            log.warning("%s does not have the bytes its manifest says; its text is tokenized again", shard)
            return False
        part.replace(target)
        return True
    finally:
        part.unlink(missing_ok=True)
