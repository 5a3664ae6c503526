"""The token level of a dataset: the units' Arrow streams linked into its folder, or copied without the documents that are left out."""

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from infini_llama.tasks.preprocess.tokens.prompts import COLUMN, map_prompts
from infini_llama.tasks.preprocess.tokens.reader import map_list
from infini_llama.tasks.preprocess.tokens.selection import Selection
from infini_llama.tasks.preprocess.tokens.shards import entropy_bits, write_shard
from infini_llama.tasks.preprocess.tokens.units import Unit
from infini_llama.tasks.records.manifest import SPLITS, Shard, SourceStats, SplitContent
from infini_llama.tasks.storage.artifacts import checksum_of, file_checksum

COUNTED = 2_000_000  # tokens counted together: bincount works on int64
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)


@dataclass(frozen=True)
class SourceUnit:
    """A unit and the one of data.sources that its text is of; "" where there is one source."""

    source: str
    unit: Unit


@dataclass(frozen=True)
class WrittenShard:
    """A shard in the folder of a dataset; `bytes`: of its text."""

    file: str
    source: str
    documents: int
    tokens: int
    bytes: int
    checksum: str


def write_splits(
    units: Sequence[SourceUnit], selection: Selection, folder: Path, has_prompts: bool
) -> dict[str, list[WrittenShard]]:
    """Writes the shards of both splits below `folder`, in the order of the units.

    Args:
        selection: of these units.
        has_prompts: whether their streams have a column with the tokens of each document's prompt.
    """
    written = dict[str, list[WrittenShard]]()
    for split in SPLITS:
        (folder / split).mkdir()
        written[split] = []
        for own, kept in zip(units, selection.kept[split], strict=True):
            if kept.any():
                file = f"{split}/data-{len(written[split]):05d}.arrow"
                written[split].append(_write(own, split, kept, folder / file, has_prompts))
    return written


def _write(own: SourceUnit, split: str, kept: np.ndarray, path: Path, has_prompts: bool) -> WrittenShard:
    file = f"{split}/{path.name}"
    stream, facts = own.unit.stream(split), own.unit.manifest.content[split]
    if kept.all():
        _link(stream, path)
        checksum = own.unit.manifest.files[stream.name].checksum
        return WrittenShard(file, own.source, facts.documents, facts.tokens, facts.bytes, checksum)
    offsets, values = map_list(stream)
    lengths = np.diff(offsets)
    tokens = values[np.repeat(kept, lengths)]
    write_shard(path, tokens, lengths[kept], map_prompts(stream)[kept] if has_prompts else None)
    size = int(own.unit.documents(split)["bytes"][kept].sum())
    return WrittenShard(file, own.source, int(kept.sum()), len(tokens), size, file_checksum(path))


def _link(stream: Path, path: Path) -> None:
    """Gives the stream a second name; where the filesystem has no such links, it is copied."""
    try:
        os.link(stream, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(stream, path)


def describe_split(folder: Path, vocab_size: int, written: Sequence[WrittenShard], has_prompts: bool) -> SplitContent:
    """Counts the tokens of a split's shards, and adds the files by which `datasets.load_from_disk` opens the folder.

    Args:
        has_prompts: whether they have a column with the tokens of each document's prompt.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    shortest, longest, documents, tokens = 2**62, 0, 0, 0
    shards, dtype = list[Shard](), ""
    for shard in written:
        offsets, values = map_list(folder.parent / shard.file)
        lengths, dtype = np.diff(offsets), values.dtype.name
        for start in range(0, len(values), COUNTED):
            counts += np.bincount(values[start : start + COUNTED], minlength=vocab_size)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        shards.append(
            Shard(
                file=shard.file,
                documents=shard.documents,
                tokens=shard.tokens,
                source=shard.source,
                first_document=documents,
                first_token=tokens,
            )
        )
        documents, tokens = documents + shard.documents, tokens + shard.tokens
    feature = {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "LargeList"}
    features: dict[str, object] = {"input_ids": feature}
    if has_prompts:
        features[COLUMN] = {"dtype": "int64", "_type": "Value"}
    _describe_for_datasets(folder, written, features)
    return SplitContent(
        documents=documents,
        tokens=tokens,
        bytes=sum(shard.bytes for shard in written),
        shards=tuple(shards),
        shortest_document=shortest,
        longest_document=longest,
        unigram_entropy_bits=entropy_bits(counts),
        sources=_by_source(written),
    )


def _by_source(written: Sequence[WrittenShard]) -> tuple[SourceStats, ...]:
    """What each of several sources gives of a split, in the order of its documents; empty where there is one source."""
    several = groupby((shard for shard in written if shard.source), key=lambda shard: shard.source)
    return tuple(
        SourceStats(
            name=name,
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            bytes=sum(shard.bytes for shard in shards),
        )
        for name, shards in ((name, list(group)) for name, group in several)
    )


def _describe_for_datasets(folder: Path, written: Sequence[WrittenShard], features: Mapping[str, object]) -> None:
    """Writes state.json and dataset_info.json, by which `datasets.load_from_disk` opens the split that `folder` is called after.

    Args:
        features: of each column, as `datasets.Features.to_dict` gives them.
    """
    state = {
        "_data_files": [{"filename": Path(shard.file).name} for shard in written],
        "_fingerprint": checksum_of([shard.checksum for shard in written]).removeprefix("blake3:")[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
