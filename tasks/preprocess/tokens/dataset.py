"""The token level of a dataset: its selection of documents of the units, and their Arrow streams.

Exact duplicates and copies of validation text are found by the hashes in the units' tables. A
stream of which every document is kept is linked into the dataset's folder; another is copied
without the documents that are left out.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.tasks.preprocess.tokens.shards import (
    LOSS_MASK,
    dtype_for,
    entropy_bits,
    map_shard,
    map_targets,
    save_array,
    token_counts,
    unpack_targets,
    write_shard,
)
from infini_llama.tasks.preprocess.tokens.units import Recipe, Unit
from infini_llama.tasks.records.manifest import (
    SPLITS,
    DatasetContent,
    Shard,
    SourceStats,
    SplitContent,
    UnitSplit,
)
from infini_llama.tasks.storage.artifacts import file_checksum, key_of, verify_checksum
from infini_llama.tasks.storage.dataset_files import (
    TOKEN_BYTES,
    TOKENIZER,
    document_bytes_file,
    repairable,
)
from infini_llama.tasks.tokenizers.expressed import keeps_text
from infini_llama.tasks.tokenizers.tokenizer import description_of, token_bytes

TOGETHER = 2**23  # documents whose hashes are sorted at once


@dataclass(frozen=True, eq=False)
class Selection:
    """The documents that are kept, and how many are not.

    Attributes:
        kept: by split, bool [documents] of each unit.
        duplicates: documents whose text came before; kept unless they are to be dropped.
        also_validation: training documents whose text is validation text.
    """

    kept: Mapping[str, Sequence[np.ndarray]]
    duplicates: int
    also_validation: int


def select(units: Sequence[Unit], drop_duplicates: bool) -> Selection:
    """Select the documents to keep: no training document that is validation text.

    Args:
        units: in the order of their documents.
        drop_duplicates: keep only the first of several documents with the same text.
    """
    # Validation text is numbered first, so that the first of several alike is held out if any is.
    order = [
        (split, unit.manifest.content[split].documents)
        for split in reversed(SPLITS)
        for unit in units
    ]
    held_out = sum(count for split, count in order if split == "validation")
    total = sum(count for _, count in order)
    is_first = np.ones(total, dtype=bool)
    is_leak = np.zeros(total, dtype=bool)
    tables = [
        unit.documents(split)["hash"] for split in reversed(SPLITS) for unit in units
    ]
    for numbers, first in first_alike(tables, total):
        is_first[numbers] = numbers == first
        is_leak[numbers] = first < held_out
    is_leak[:held_out] = False
    is_copy = ~is_first & ~is_leak
    is_kept = ~(is_leak | is_copy) if drop_duplicates else ~is_leak
    kept: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    begin = 0
    for split, count in order:
        kept[split].append(is_kept[begin : begin + count])
        begin += count
    return Selection(
        kept,
        duplicates=int(is_copy.sum()),
        also_validation=int(is_leak.sum()),
    )


def first_alike(
    tables: Sequence[np.ndarray],
    total: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Numbers of documents, and of each the first one with the same hash, int64 [some] each.

    Memory holds about TOGETHER documents at a time.

    Args:
        tables: hashes uint8 [documents, 16], mapped, in the order of their documents.
        total: documents in all.
    """
    groups = 1 + total // TOGETHER if total else 0
    for group in range(groups):
        hashes_of_tables = list[np.ndarray]()
        numbers_of_tables = list[np.ndarray]()
        before = 0
        for table in tables:
            hashes = np.ascontiguousarray(table).view("<u8").reshape(-1, 2)
            places = np.flatnonzero(hashes[:, 1] % np.uint64(groups) == group)
            hashes_of_tables.append(hashes[places])
            numbers_of_tables.append(places + before)
            before += len(table)
        hashes = np.concatenate(hashes_of_tables)
        numbers = np.concatenate(numbers_of_tables)
        # By the first half, then the second; equal ones stay in order.
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        hashes = hashes[order]
        numbers = numbers[order]
        high, low = hashes.T
        is_new = np.ones(len(order), dtype=bool)
        high_differs = high[1:] != high[:-1]
        low_differs = low[1:] != low[:-1]
        is_new[1:] = high_differs | low_differs
        if len(order):
            firsts = numbers[is_new]
            yield numbers, firsts[np.cumsum(is_new) - 1]


@dataclass(frozen=True)
class SourceUnit:
    """A unit and the one of data.sources that its text is of; "" where there is one source.

    Attributes:
        has_loss_mask: its streams have the column of which tokens count.
    """

    source: str
    unit: Unit
    has_loss_mask: bool


@dataclass(frozen=True)
class WrittenShard:
    """A shard in the folder of a dataset.

    Attributes:
        facts: of its documents.
    """

    file: str
    source: str
    facts: UnitSplit
    checksum: str


@dataclass
class WrittenSplit:
    """The shards of a split in order.

    Attributes:
        counts: how often each token counts in them, int64 [vocab].
    """

    shards: list[WrittenShard]
    counts: np.ndarray


def write_splits(
    units: Sequence[SourceUnit],
    selection: Selection,
    folder: Path,
    vocab_size: int,
    has_loss_mask: bool,
) -> dict[str, WrittenSplit]:
    """Write the shards of both splits below `folder`, in the order of the units.

    Args:
        selection: of these units. No token is read of a unit of which it keeps all or no documents,
            unless a mask is added.
        has_loss_mask: whether the shards have the column of which tokens count: all, of a unit
            without it.

    Raises:
        Damaged: a stream that is to be copied is not what its unit says.
    """
    written = dict[str, WrittenSplit]()
    for split in SPLITS:
        (folder / split).mkdir()
        written[split] = WrittenSplit([], np.zeros(vocab_size, dtype=np.int64))
        for source_unit, kept in zip(units, selection.kept[split], strict=True):
            if kept.any():
                _write(source_unit, split, kept, folder, written[split], has_loss_mask)
    return written


def _write(
    source_unit: SourceUnit,
    split: str,
    kept: np.ndarray,
    folder: Path,
    written: WrittenSplit,
    has_loss_mask: bool,
) -> None:
    """Write the shard of the documents of a unit that are kept, and add it to `written`."""
    unit = source_unit.unit
    file = f"{split}/data-{len(written.shards):05d}.arrow"
    path = folder / file
    stream = unit.shard_path(split)
    checksum = unit.manifest.files[stream.name].checksum
    if kept.all() and source_unit.has_loss_mask == has_loss_mask:
        _link(stream, path)
        occurring = unit.counts()
        written.counts[occurring["token"]] += occurring[split]
        facts = unit.manifest.content[split]
    else:
        with repairable():
            verify_checksum(stream, checksum)
        offsets, values = map_shard(stream)
        all_lengths = np.diff(offsets)
        lengths = all_lengths[kept]
        is_kept = np.repeat(kept, all_lengths)
        tokens = values[is_kept]
        targets = np.ones(len(tokens), dtype=bool)
        if source_unit.has_loss_mask:
            all_targets = unpack_targets(map_targets(stream), 0, len(values))
            targets = all_targets[is_kept]
        write_shard(path, tokens, lengths, targets if has_loss_mask else None)
        written.counts += token_counts(tokens[targets], len(written.counts))
        facts = UnitSplit(
            documents=len(lengths),
            tokens=len(tokens),
            bytes=int(unit.documents(split)["bytes"][kept].sum()),
            shortest_document=int(lengths.min()),
            longest_document=int(lengths.max()),
        )
        checksum = file_checksum(path)
    written.shards.append(WrittenShard(file, source_unit.source, facts, checksum))


def write_content(
    folder: Path,
    units: Sequence[SourceUnit],
    selection: Selection,
    written: Mapping[str, WrittenSplit],
    tokenizer: Tokenizer,
    recipe: Recipe,
    has_loss_mask: bool,
) -> DatasetContent:
    """Write all but the shards of a token level, and describe it.

    Args:
        written: by `write_splits`, of these units.
        has_loss_mask: whether the shards have the column of which tokens count.
    """
    split_special_tokens = recipe.split_special_tokens
    size = tokenizer.get_vocab_size()
    (folder / TOKENIZER).write_text(description_of(tokenizer), encoding="utf-8")
    save_array(folder / TOKEN_BYTES, token_bytes(tokenizer, split_special_tokens))
    content = DatasetContent(
        vocab_size=size,
        dtype=dtype_for(size).name,
        eos_id=recipe.eos,
        text_yields_special_tokens=not split_special_tokens,
        train=describe_split(folder / "train", written["train"], has_loss_mask),
        validation=describe_split(
            folder / "validation", written["validation"], has_loss_mask
        ),
        lossless=keeps_text(tokenizer, split_special_tokens),
        loss_on="answer" if has_loss_mask else "all",
    )
    if content.has_document_bytes:
        for split in SPLITS:
            sizes = [
                source_unit.unit.documents(split)["bytes"][kept]
                for source_unit, kept in zip(units, selection.kept[split], strict=True)
            ]
            save_array(folder / document_bytes_file(split), np.concatenate(sizes))
    return content


def _link(stream: Path, path: Path) -> None:
    """Give the stream a second name; where the filesystem has no such links, copy it."""
    try:
        os.link(stream, path)
    except OSError:
        shutil.copyfile(stream, path)


def describe_split(
    folder: Path,
    written: WrittenSplit,
    has_loss_mask: bool,
) -> SplitContent:
    """Describe a split, and add the files by which `datasets.load_from_disk` opens its folder.

    No shard is read.

    Args:
        has_loss_mask: whether the shards have the column of which tokens count.
    """
    documents = 0
    tokens = 0
    shards = list[Shard]()
    for shard in written.shards:
        shards.append(
            Shard(
                file=shard.file,
                documents=shard.facts.documents,
                tokens=shard.facts.tokens,
                source=shard.source,
                first_document=documents,
                first_token=tokens,
            )
        )
        documents += shard.facts.documents
        tokens += shard.facts.tokens
    dtype = dtype_for(len(written.counts)).name
    feature = {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "LargeList"}
    features: dict[str, object] = {"input_ids": feature}
    if has_loss_mask:
        bit = {"dtype": "bool", "_type": "Value"}
        features[LOSS_MASK] = {"feature": bit, "_type": "LargeList"}
    _describe_for_datasets(folder, written.shards, features)
    return SplitContent(
        documents=documents,
        tokens=tokens,
        bytes=sum(shard.facts.bytes for shard in written.shards),
        shards=tuple(shards),
        shortest_document=min(
            (shard.facts.shortest_document for shard in written.shards), default=0
        ),
        longest_document=max(
            (shard.facts.longest_document for shard in written.shards), default=0
        ),
        unigram_entropy_bits=entropy_bits(written.counts),
        sources=_by_source(written.shards),
    )


def _by_source(written: Sequence[WrittenShard]) -> tuple[SourceStats, ...]:
    """The size of each source in a split, in the order of its documents.

    It is empty where there is one source.
    """
    named = [shard for shard in written if shard.source]
    stats = list[SourceStats]()
    for name, group in groupby(named, key=lambda shard: shard.source):
        shards = list(group)
        stats.append(
            SourceStats(
                name=name,
                documents=sum(shard.facts.documents for shard in shards),
                tokens=sum(shard.facts.tokens for shard in shards),
                bytes=sum(shard.facts.bytes for shard in shards),
            )
        )
    return tuple(stats)


def _describe_for_datasets(
    folder: Path,
    written: Sequence[WrittenShard],
    features: Mapping[str, object],
) -> None:
    """Write state.json and dataset_info.json, by which `datasets.load_from_disk` opens a split.

    Args:
        folder: of the split, called after it.
        features: of each column, as `datasets.Features.to_dict` gives them.
    """
    state = {
        "_data_files": [{"filename": Path(shard.file).name} for shard in written],
        "_fingerprint": key_of([shard.checksum for shard in written])[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    info = {
        "citation": "",
        "description": "",
        "features": features,
        "homepage": "",
        "license": "",
    }
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (folder / "dataset_info.json").write_text(
        json.dumps(info, indent=1), encoding="utf-8"
    )
