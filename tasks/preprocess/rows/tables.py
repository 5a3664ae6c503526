"""The row table of one split: of each source by itself, so that no row holds text of two."""

import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import numpy as np

from infini_llama.configs.errors import DataError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.rows.devices import resolve_device, rows_on
from infini_llama.tasks.preprocess.rows.packing import PACKED, ComputeRows, compute_rows, costs_of
from infini_llama.tasks.preprocess.tokens.keys import CHUNKS_VERSION
from infini_llama.tasks.preprocess.tokens.reader import document_lengths
from infini_llama.tasks.preprocess.tokens.shards import save_array
from infini_llama.tasks.records.dataset import DatasetRef, RowTableRef, SplitStats
from infini_llama.tasks.records.manifest import (
    SPLITS,
    BySplit,
    RowCosts,
    RowTableContent,
    RowTableMeta,
    Shard,
    SourceRows,
    SplitContent,
)
from infini_llama.tasks.storage.artifacts import commit, read_dataset, read_row_table, staging

log = logging.getLogger("infini_llama.preprocess")


@dataclass(frozen=True, eq=False)
class Table:
    """Where the rows of a split are in its stream of tokens."""

    arrays: dict[str, np.ndarray]  # "rows", and "pieces" where the strategy packs
    rows: int
    sources: tuple[SourceRows, ...]  # in the order of their rows
    costs: RowCosts
    devices: set[str]  # that computed them


def build_table(
    lengths: dict[str, np.ndarray],
    strategy: str,
    sequence_length: int,
    stride: int | None = None,
    compute: ComputeRows = compute_rows,
) -> Table:
    """Rows of `sequence_length` inputs each.

    Args:
        lengths: int64 [documents] of each source, tokens of its documents; their streams follow each other.
        compute: computes the rows of one source.
    """
    parts: dict[str, list[np.ndarray]] = {}
    sources, costs, base, rows, pieces = [], [], 0, 0, 0
    devices: set[str] = set()
    for name, own in lengths.items():
        found = compute(own, strategy, sequence_length, stride)
        if found.pieces is None:
            arrays = {"rows": found.rows + base}
        else:
            arrays = {"rows": found.rows[bool(parts) :] + pieces, "pieces": found.pieces + np.array([base, 0])}
            pieces += len(found.pieces)
        for array_name, array in arrays.items():
            parts.setdefault(array_name, []).append(array)
        sources.append(SourceRows(name=name, rows=len(found)))
        costs.append(costs_of(found, own, sequence_length))
        devices.add(found.device)
        base, rows = base + int(own.sum()), rows + len(found)
    joined = {name: several[0] if len(several) == 1 else np.concatenate(several) for name, several in parts.items()}
    return Table(joined, rows, tuple(sources), _together(costs, [source.rows for source in sources]), devices)


def _together(costs: list[RowCosts], rows: list[int]) -> RowCosts:
    if len(costs) == 1:
        return costs[0]
    filled = sum(cost.efficiency * count for cost, count in zip(costs, rows, strict=True))
    return RowCosts(
        efficiency=filled / max(1, sum(rows)),
        cut_documents=sum(cost.cut_documents for cost in costs),
        lost_tokens=sum(cost.lost_tokens for cost in costs),
        targets=sum(cost.targets for cost in costs),
    )


def lengths_by_source(dataset: Path, shards: Sequence[Shard]) -> dict[str, np.ndarray]:
    """int64 [documents] of each source of a split, tokens of its documents; "" is the name of the only one."""
    several = groupby(shards, key=lambda shard: shard.source)
    return {name: document_lengths(dataset, list(own)) for name, own in several}


def with_curriculum(data: DataConfig) -> list[DataConfig]:
    """The section `data` for each row table of a run: that of data.sequence_length, then those of the curriculum's stages."""
    stages = [changed(data, sequence_length=stage.sequence_length, curriculum=[]) for stage in data.curriculum]
    return [data, *stages]


def table_ref(chunks: Path) -> RowTableRef:
    """The row table in folder `chunks`, as a reference names it."""
    table = read_row_table(chunks)
    return RowTableRef(
        chunks=chunks.name,
        chunks_digest=table.digest,
        sequence_length=table.content.sequence_length,
        rows=table.content.rows.train,
    )


def dataset_ref(dataset: Path, chunks: Path, home: Path, built: list[str], curriculum: Iterable[Path]) -> DatasetRef:
    """The reference of the dataset in folder `dataset` with its row table in folder `chunks`.

    Args:
        home: which the path is relative to, if the dataset is below it.
        built: levels that were missing before.
        curriculum: folders of the row tables of shorter rows.
    """
    tokens, table = read_dataset(dataset), read_row_table(chunks)

    def stats(split: str) -> SplitStats:
        facts = tokens.content[split]
        return SplitStats(
            documents=facts.documents,
            tokens=facts.tokens,
            bytes=facts.bytes,
            unigram_entropy_bits=facts.unigram_entropy_bits,
            rows=table.content.rows[split],
        )

    return DatasetRef(
        path=dataset.relative_to(home).as_posix() if dataset.is_relative_to(home) else str(dataset),
        digest=tokens.digest,
        chunks=chunks.name,
        chunks_digest=table.digest,
        built=tuple(built),
        sequence_length=table.content.sequence_length,
        vocab_size=tokens.content.vocab_size,
        train=stats("train"),
        validation=stats("validation"),
        curriculum=tuple(map(table_ref, curriculum)),
    )


def write_table(data: DataConfig, dataset: Path, chunks: Path, key: str) -> None:
    """Computes and commits the row tables of both splits for the strategy and length of the section `data`.

    Raises:
        DataError: a split, or a source's training text, is shorter than one row.
    """
    device = resolve_device(data.device, data.packing)
    if device == "cpu" and data.device.startswith("cuda"):
        log.info(
            "data.packing=%s is computed on the CPU: its pieces are placed one after another",
            data.packing,
        )
    content = read_dataset(dataset).content
    with rows_on(device) as compute:
        built = {split: _table_of(data, dataset, split, content[split], compute) for split in SPLITS}
    train, validation = (built[split] for split in SPLITS)
    facts = RowTableContent(
        strategy=data.packing,
        sequence_length=data.sequence_length,
        rows=BySplit(train=train.rows, validation=validation.rows),
        stride=data.stride,
        sources=BySplit(train=train.sources, validation=validation.sources) if data.sources else None,
    )
    meta = RowTableMeta(
        key=key,
        device=",".join(sorted(train.devices | validation.devices)),
        packing=BySplit(train=train.costs, validation=validation.costs),
        infini_llama=version("infini-llama"),
    )
    staged = staging(chunks)
    try:
        for split, table in built.items():
            for name, array in table.arrays.items():
                save_array(staged / f"{split}.{name}.npy", array)
        commit(staged, chunks, "chunks", CHUNKS_VERSION, meta.to_json(), facts.to_json())
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)  # what a kill leaves, the next build removes
        raise


def _table_of(data: DataConfig, dataset: Path, split: str, content: SplitContent, compute: ComputeRows) -> Table:
    """The row table of one split, once it has text for it; see `write_table`."""
    length, strategy = data.sequence_length, data.packing
    lengths = lengths_by_source(dataset, content.shards)
    for name, own in lengths.items():
        by_source = split == "train" and name
        tokens = int(own.sum()) if by_source else content.tokens
        if tokens <= (1 if strategy in PACKED else length):
            raise DataError(
                f"the {split} text{f' of data.sources.{name}' if by_source else ''} has {tokens} tokens, fewer than "
                f"one sequence of data.sequence_length={length} and its last label; lower it, add text, or change "
                "data.validation_fraction."
            )
    table = build_table(lengths, strategy, length, data.stride, compute)
    if not table.rows:
        raise DataError(
            f"no source has {split} text for one sequence of data.sequence_length={length} and its last label; lower "
            "it, add text, or change data.validation_fraction."
        )
    return table
