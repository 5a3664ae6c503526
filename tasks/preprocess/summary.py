"""What a dataset holds, for people: counts, lengths, and rows decoded."""

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from infini_llama.tasks.preprocess.tokens.reader import TokenReader, document_lengths
from infini_llama.tasks.storage.artifacts import is_complete, read_manifest

SAMPLES = 3


def describe(path: Path) -> dict[str, Any]:
    """Facts of the dataset in folder `path`: source, splits, document lengths, row tables, and the first rows as text.

    Raises:
        Damaged: the folder is no complete dataset.
    """
    manifest = read_manifest(path, "dataset")
    content, meta = manifest["content"], manifest["meta"]
    tables = [table for table in sorted((path / "chunks").glob("[!.]*")) if is_complete(table, "chunks")]
    return {
        "path": str(path),
        "digest": manifest["digest"],
        "created": manifest["created"],
        "source": meta["source"],
        "licence": meta["licence"],
        "vocab_size": content["vocab_size"],
        "dtype": content["dtype"],
        "bytes_on_disk": sum(file["size"] for file in manifest["files"].values()),
        "splits": {split: _split(path, content[split]) for split in ("train", "validation")},
        **_sources(meta.get("sources", []), content["train"], content["validation"]),
        "chunks": {table.name: _rows(table) for table in tables},
        "left_out": meta.get("left_out", {}),
        "samples": _samples(path, tables[0].name) if tables else [],
    }


def _sources(sources: list[dict], train: dict, validation: dict) -> dict[str, Any]:
    """A line for each of several sources; nothing where there is one."""
    if not sources:
        return {}
    held_out = {facts["name"]: facts for facts in validation["sources"]}
    lines = {}
    for source, facts in zip(sources, train["sources"], strict=True):
        own = held_out.get(source["name"], {"documents": 0, "tokens": 0})
        lines[source["name"]] = {
            "weight": source["weight"],
            "licence": source["licence"],
            "documents": facts["documents"],
            "tokens": facts["tokens"],
            "bytes": facts["bytes"],
            "validation documents": own["documents"],
            "validation tokens": own["tokens"],
        }
    return {"sources": lines}


def _rows(table: Path) -> dict[str, Any]:
    manifest = read_manifest(table, "chunks")
    return manifest["content"] | {"packing": manifest["meta"].get("packing", {})}


def _split(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    lengths = document_lengths(path, facts["shards"])
    quartiles = {
        name: int(np.quantile(lengths, share)) for name, share in (("p5", 0.05), ("median", 0.5), ("p95", 0.95))
    }
    return {
        "documents": facts["documents"],
        "tokens": facts["tokens"],
        "bytes": facts["bytes"],
        "bytes_per_token": facts["bytes"] / facts["tokens"],
        "shards": len(facts["shards"]),
        "unigram_entropy_bits": facts["unigram_entropy_bits"],
        "document_tokens": {"shortest": facts["shortest_document"], **quartiles, "longest": facts["longest_document"]},
    }


def _samples(path: Path, chunks: str) -> list[str]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    reader = TokenReader(path, chunks, "train")
    rows = np.linspace(0, len(reader) - 1, SAMPLES).astype(np.int64)
    return [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in reader.gather(rows)]
