"""A dataset of a million shards: what quick verification, opening and resuming cost.

    .venv/bin/python benchmarks/scaling.py [--shards 10000 100000 1000000] [--output benchmarks/results/scaling.json]

The manifests, files and readers are the real ones; only the shards are not: every one is a link to the same few tokens (so many
that a filesystem's limit on links is kept). Seconds are those of the processor, in one
process, so that other work on the machine does not count; waiting for a disk does not either.
"""

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from infini_llama.tasks.preprocess.tokens.order import rows_of_samples
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import write_shard
from infini_llama.tasks.storage.artifacts import (
    MANIFEST,
    _serialized,
    check,
    checksum_of,
    file_checksum,
    read_manifest,
)

TOKENS = 4096  # of the shard that all of them are
LINKS = 30_000  # to one file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shards", type=int, nargs="+", default=[10_000, 100_000, 1_000_000]
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent / "results" / "scaling.json",
    )
    arguments = parser.parse_args()
    measured = []
    for shards in arguments.shards:
        with tempfile.TemporaryDirectory() as folder:
            measured.append(one(shards, Path(folder)))
        print(json.dumps(measured[-1]))
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    arguments.output.write_text(
        json.dumps(machine | {"measured": measured}, indent=1) + "\n", encoding="utf-8"
    )


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = action()
    return round(time.process_time() - started, 4), result


def one(shards: int, folder: Path) -> dict[str, Any]:
    """Seconds of each operation on a dataset of this many shards, and the process's peak of memory so far."""
    dataset = folder / "dataset"
    make(dataset, shards)
    read, _ = timed(lambda: read_manifest(dataset, "dataset"))
    verified, _ = timed(lambda: check(dataset, "dataset", checksums=False))
    opened, reader = timed(lambda: TokenReader(dataset, "rows", "train"))
    rows = len(reader)
    first_batch, _ = timed(lambda: reader.gather(rows_of_samples(10**6, 8, rows, 1)))
    return {
        "shards": shards,
        "tokens": shards * TOKENS,
        "manifest_bytes": (dataset / MANIFEST).stat().st_size,
        "read_manifest_seconds": read,
        "verify_quick_seconds": verified,
        "open_reader_seconds": opened,
        "batch_of_8_after_resume_seconds": first_batch,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def make(dataset: Path, shards: int) -> None:
    """The dataset and its row table, as `preprocess` writes them, without a checksum of every link."""
    (dataset / "train").mkdir(parents=True)
    files, table = {}, []
    source, entry = dataset, {}
    for number in range(shards):
        name = f"train/data-{number:05d}.arrow"
        if number % LINKS == 0:
            source = dataset / name
            write_shard(source, np.arange(TOKENS, dtype=np.uint16), [TOKENS // 4] * 4)
            entry = {"size": source.stat().st_size, "checksum": file_checksum(source)}
        else:
            os.link(source, dataset / name)
        files[name] = entry
        table.append(
            {
                "file": name,
                "documents": 4,
                "tokens": TOKENS,
                "first_document": 4 * number,
                "first_token": TOKENS * number,
            }
        )
    counts = {
        "documents": 4 * shards,
        "tokens": TOKENS * shards,
        "bytes": 0,
        "shards": table,
    }
    split = counts | {
        "shortest_document": 1,
        "longest_document": TOKENS,
        "unigram_entropy_bits": 0.0,
    }
    facts = {
        "vocab_size": TOKENS,
        "dtype": "uint16",
        "eos_id": 0,
        "text_yields_special_tokens": False,
    }
    commit(dataset, "dataset", 1, files, facts | {"train": split, "validation": split})
    rows = dataset / "chunks" / "rows"
    rows.mkdir(parents=True)
    np.save(
        rows / "train.rows.npy",
        np.arange(0, shards * TOKENS - 256, 256, dtype=np.int64),
    )
    name = "train.rows.npy"
    entry = {
        "size": (rows / name).stat().st_size,
        "checksum": file_checksum(rows / name),
    }
    commit(
        rows,
        "chunks",
        1,
        {name: entry},
        {
            "strategy": "concat",
            "sequence_length": 256,
            "rows": {"train": shards * TOKENS // 256 - 1, "validation": 0},
        },
    )


def commit(folder: Path, kind: str, version: int, files: dict, content: dict) -> None:
    proven = {
        "kind": kind,
        "format_version": version,
        "files": files,
        "content": content,
    }
    manifest = proven | {"digest": checksum_of(proven), "created": "", "meta": {}}
    manifest["self_checksum"] = checksum_of(manifest)
    (folder / MANIFEST).write_bytes(_serialized(manifest))


if __name__ == "__main__":
    main()
