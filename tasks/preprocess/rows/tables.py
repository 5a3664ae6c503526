"""The row table of one split: of each source by itself, so that no row holds text of two."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.keys import CHUNKS_VERSION
from infini_llama.tasks.preprocess.rows.chunking import compute_starts, resolve_device, row_count, row_starts
from infini_llama.tasks.preprocess.rows.packing import PACKED, costs_of_starts, costs_packed, pack
from infini_llama.tasks.preprocess.tokens.arrays import save_array
from infini_llama.tasks.preprocess.tokens.reader import document_lengths
from infini_llama.tasks.storage.artifacts import checksum_of, commit, read_manifest, staging

RowStarts = Callable[[int, int], np.ndarray]


@dataclass(frozen=True, eq=False)
class Table:
    """Where the rows of a split are in its stream of tokens."""

    arrays: dict[str, np.ndarray]  # "rows", and "pieces" where the strategy packs
    rows: int
    sources: list[dict[str, Any]]  # {"name", "rows"} of each, in the order of their rows
    costs: dict[str, float]


def build_table(
    lengths: dict[str, np.ndarray],
    strategy: str,
    sequence_length: int,
    stride: int | None = None,
    starts_of: RowStarts = row_starts,
) -> Table:
    """Rows of `sequence_length` inputs each.

    Args:
        lengths: int64 [documents] of each source, tokens of its documents; their streams follow each other.
        starts_of: computes first tokens from the number of rows and their distance.
    """
    parts: dict[str, list[np.ndarray]] = {}
    sources, costs, base, rows, pieces = [], [], 0, 0, 0
    for name, own in lengths.items():
        tokens = int(own.sum())
        if strategy in PACKED:
            packed = pack(own, sequence_length, strategy)
            arrays = {
                "rows": packed.rows[bool(rows or pieces) :] + pieces,
                "pieces": packed.pieces + np.array([base, 0]),
            }
            count, pieces = len(packed.rows) - 1, pieces + len(packed.pieces)
            costs.append(costs_packed(packed, own, sequence_length))
        else:
            starts = starts_of(row_count(tokens, sequence_length, stride), stride or sequence_length)
            arrays, count = {"rows": starts + base}, len(starts)
            costs.append(costs_of_starts(starts, own, sequence_length))
        for array_name, array in arrays.items():
            parts.setdefault(array_name, []).append(array)
        sources.append({"name": name, "rows": count})
        base, rows = base + tokens, rows + count
    joined = {name: several[0] if len(several) == 1 else np.concatenate(several) for name, several in parts.items()}
    return Table(joined, rows, sources, _together(costs, [source["rows"] for source in sources]))


def _together(costs: list[dict[str, float]], rows: list[int]) -> dict[str, float]:
    if len(costs) == 1:
        return costs[0]
    sums = {name: sum(cost[name] for cost in costs) for name in ("cut_documents", "lost_tokens", "targets")}
    filled = sum(cost["efficiency"] * count for cost, count in zip(costs, rows, strict=True))
    return {"efficiency": filled / max(1, sum(rows))} | sums


def lengths_by_source(dataset: Path, split: dict[str, Any]) -> dict[str, np.ndarray]:
    """int64 [documents] of each source of a split, tokens of its documents; "" is the name of the only one."""
    several = groupby(split["shards"], key=lambda shard: shard.get("source", ""))
    return {name: document_lengths(dataset, list(shards)) for name, shards in several}


def with_curriculum(data: dict) -> list[dict]:
    """The section `data` for each row table of a run: that of data.sequence_length, then those of the curriculum's stages."""
    return [data, *({**data, "sequence_length": stage["sequence_length"]} for stage in data["curriculum"])]


def tables_of(reference: dict[str, Any]) -> list[dict[str, Any]]:
    """{"chunks", "chunks_digest"} of each row table that a run on this reference reads, each once."""
    found = {table["chunks"]: table for table in [reference, *reference.get("curriculum", [])]}
    return [{name: table.get(name) for name in ("chunks", "chunks_digest")} for table in found.values()]


def name_of_tables(planned: dict[str, Any]) -> str:
    """What names all row tables of `stage.plan` or of a reference together; that of a single one is its own name."""
    names = [table["chunks"] for table in tables_of(planned)]
    return names[0] if len(names) == 1 else checksum_of(names).removeprefix("blake3:")[:12]


def digest_of_tables(reference: dict[str, Any]) -> str:
    """What stands for the bytes of all row tables of a reference; that of a single one is its own digest."""
    digests = [table["chunks_digest"] for table in tables_of(reference)]
    return digests[0] if len(digests) == 1 else checksum_of(digests)


def table_facts(chunks: Path) -> dict[str, Any]:
    """What a run is told of a stage's row table: its name, digest, row length and training rows."""
    table = read_manifest(chunks, "chunks")
    content = table["content"]
    facts = {"sequence_length": content["sequence_length"], "rows": content["rows"]["train"]}
    return {"chunks": chunks.name, "chunks_digest": table["digest"]} | facts


def write_table(data: dict, dataset: Path, chunks: Path, key: str) -> None:
    """Computes and commits the row tables of both splits for the strategy and length of the section `data`.

    Raises:
        DataError: a split, or a source's training text, is shorter than one row.
    """
    content = read_manifest(dataset, "dataset")["content"]
    length, strategy = data["sequence_length"], data["strategy"]
    device, used = resolve_device(data["device"]), set()
    built = {}

    def starts_of(count: int, step: int) -> np.ndarray:
        starts, by = compute_starts(count, step, device, required=data["device"] != "auto")
        used.add(by)
        return starts

    for split in ("train", "validation"):
        lengths = lengths_by_source(dataset, content[split])
        for name, own in lengths.items():
            alone = split == "train" and name
            tokens = int(own.sum()) if alone else content[split]["tokens"]
            if tokens <= (1 if strategy in PACKED else length):
                raise DataError(
                    f"the {split} text{f' of data.sources.{name}' if alone else ''} has {tokens} tokens, fewer than one row of "
                    f"data.sequence_length={length} and its last label; shorten the rows, add text, or change data.validation_fraction."
                )
        built[split] = build_table(lengths, strategy, length, data["stride"], starts_of)
        if not built[split].rows:
            raise DataError(
                f"no source has {split} text for one row of data.sequence_length={length} and its last label; shorten the rows, add "
                "text, or change data.validation_fraction."
            )
    staged = staging(chunks)
    try:
        for split, table in built.items():
            for name, array in table.arrays.items():
                save_array(staged / f"{split}.{name}.npy", array)
        facts = {
            "strategy": strategy,
            "sequence_length": length,
            "rows": {split: table.rows for split, table in built.items()},
        }
        facts |= {"stride": data["stride"]} if strategy == "window" else {}
        facts |= {"sources": {split: table.sources for split, table in built.items()}} if data["sources"] else {}
        packing = {split: table.costs for split, table in built.items()}
        meta = {
            "key": key,
            "device": ", ".join(sorted(used)) or "cpu",
            "packing": packing,
            "infini_llama": version("infini-llama"),
        }
        commit(staged, chunks, "chunks", CHUNKS_VERSION, meta, facts)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)  # what a kill leaves, the next build removes
        raise
