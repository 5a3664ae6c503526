"""Shards of earlier datasets that are those of this one: text that has been tokenized before is not tokenized again."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import tokenizers
from blake3 import blake3

from infini_llama.configs.errors import NO_SPACE
from infini_llama.tasks.preprocess.tokens.journal import Journal, JournalEntry
from infini_llama.tasks.preprocess.tokens.keys import TOKENS_VERSION
from infini_llama.tasks.preprocess.tokens.plan import Plan, Unit
from infini_llama.tasks.records.manifest import SPLITS, DatasetManifest, EngineChoice, Shard
from infini_llama.tasks.storage.artifacts import Damaged, checksum_of, file_checksum, is_moved_aside, read_dataset, sync

log = logging.getLogger("infini_llama.preprocess")
RULES = ["young characters by the reference"]  # shards that were encoded by other rules are not taken


@dataclass(frozen=True)
class EarlierShard:
    """A shard of an earlier dataset."""

    path: Path
    checksum: str
    counts: Shard


def with_keys(plan: Plan, tokenizer: Path, eos: int, engine: EngineChoice, answer_after: str = "") -> Plan:
    """The plan with a key in each unit: a hash of all that decides its shard's bytes.

    These are the texts of its documents in order, the tokenizer, the engine that encodes (whose ids are only sampled against the
    reference's, so that it may be refused later), the token that ends a document, what ends a prompt,
    and who writes the file. Where the documents lie,
    what their files are called and which shard of its dataset it is decide nothing.
    """
    encoder = [engine.name, engine.version, tokenizers.__version__, *RULES]
    common = [
        TOKENS_VERSION,
        *encoder,
        pa.__version__,
        file_checksum(tokenizer),
        eos,
        *([answer_after] * bool(answer_after)),
    ]

    units = []
    for split in SPLITS:
        for unit, hashes in plan.hashes(split):
            text = blake3()
            for rows in hashes:
                text.update(rows.tobytes())
            units.append(replace(unit, key=checksum_of([*common, text.hexdigest()])))
    return replace(plan, units=units)


def reuse(units: list[Unit], datasets: Path, journal: Journal) -> list[Unit]:
    """Links (or copies) each shard that an earlier dataset has into the build, once its bytes are those of that dataset's manifest.

    Args:
        units: that are missing, with keys.
        datasets: folder of the earlier datasets.

    Returns:
        the units that are left to be tokenized.
    """
    known = {key: shard for folder, manifest in _earlier(datasets) for key, shard in _shards(folder, manifest)}
    left = []
    for unit in units:
        shard = known.get(unit.key)
        if shard is None or not _take(shard.path, journal.work / unit.file, shard.checksum):
            left.append(unit)
            continue
        journal.append(
            JournalEntry(
                file=unit.file,
                checksum=shard.checksum,
                key=unit.key,
                documents=shard.counts.documents,
                tokens=shard.counts.tokens,
            )
        )
    if len(left) < len(units):
        log.info(
            "%d of %d shards are reused from earlier datasets with the same text, tokenizer and engine; %d are "
            "tokenized",
            len(units) - len(left),
            len(units),
            len(left),
        )
    return left


def _earlier(datasets: Path) -> Iterator[tuple[Path, DatasetManifest]]:
    """Every dataset that is whole, but none that was moved aside."""
    for folder in sorted(datasets.glob("[!.]*")):
        with suppress(Damaged, OSError):
            if not folder.is_symlink() and folder.is_dir() and not is_moved_aside(folder):
                yield folder, read_dataset(folder)


def _shards(folder: Path, manifest: DatasetManifest) -> Iterator[tuple[str, EarlierShard]]:
    for shard in (*manifest.content.train.shards, *manifest.content.validation.shards):
        if key := manifest.meta.units.get(shard.file):
            yield key, EarlierShard(folder / shard.file, manifest.files[shard.file].checksum, shard)


def _take(shard: Path, target: Path, checksum: str) -> bool:
    """Whether the shard now stands at `target`, with the bytes of its checksum and on the disk.

    A link costs no space and no time; nothing ever writes into a finished shard. Where the filesystem has no links, it is a copy. A
    symbolic link is not followed: what it leads to belongs to others. An earlier dataset that cannot be read costs a line and time.

    Raises:
        OSError: there is no space left for the copy, which there would not be for a new shard, either.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        fault = _bring(shard, part, checksum)
        if fault:
            log.warning("%s %s; its text is tokenized again", shard, fault)
            return False
        part.replace(target)
        return True
    finally:
        part.unlink(missing_ok=True)


def _bring(shard: Path, part: Path, checksum: str) -> str:
    """Makes `part` the shard's bytes; what is wrong with the shard, empty where nothing is."""
    try:
        if shard.is_symlink():
            return "is a symbolic link"
        try:
            os.link(shard, part)
        except OSError:
            shutil.copyfile(shard, part)
            sync(part)
        return "" if file_checksum(part) == checksum else "does not have the bytes its manifest says"
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        return f"cannot be taken ({error.strerror or error})"
