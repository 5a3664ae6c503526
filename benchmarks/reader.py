"""Random batches of rows and packing: ours and peers', on one CPU, in one process.

    python benchmarks/reader.py [--tokens 20000000] [--rounds 5] [--output benchmarks/results/reader.json]

Reading: batches of 16 random `concat` rows of 2,048 tokens from a dataset of made-up tokens, tokens alone, int64; `datasets` gives the
same rows written out (its torch format, by a list of 16 indices), litdata, where it
is installed, by its TokensLoader. Packing: `best_fit` of log-normal document lengths into rows of 2,048,
against TRL's "bfd_split" (which writes the rows, too) where trl is installed. Nanoseconds of CPU time a token or document; the rounds
alternate, and their medians count. Where two programs read other tokens, it ends with an error and stores nothing.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from agreement import require_equal

from infini_llama.tasks.preprocess.rows.packing import pack
from infini_llama.tasks.preprocess.rows.tables import build_table
from infini_llama.tasks.preprocess.tokens.dataset import (
    WrittenShard,
    WrittenSplit,
    describe_split,
)
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import token_counts, write_shard
from infini_llama.tasks.records.manifest import UnitSplit
from infini_llama.tasks.storage.artifacts import commit

LENGTH, BATCH, DOCUMENTS = 2048, 16, 20_000


def made_up(folder: Path, tokens: int) -> TokenReader:
    """A dataset of random tokens, without a text behind it."""
    choose = np.random.default_rng(1)
    facts = {}
    for split, count in (("train", tokens), ("validation", 10 * LENGTH)):
        (folder / split).mkdir(parents=True)
        values = choose.integers(1, 32768, count).astype(np.uint16)
        lengths = np.full(count // LENGTH, LENGTH)
        values = values[: lengths.sum()]
        write_shard(folder / split / "data-00000.arrow", values, lengths.tolist())
        size = UnitSplit(
            documents=len(lengths),
            tokens=len(values),
            bytes=0,
            shortest_document=LENGTH,
            longest_document=LENGTH,
        )
        shard = WrittenShard(f"{split}/data-00000.arrow", "", size, "")
        written = WrittenSplit([shard], token_counts(values, 32768))
        facts[split] = describe_split(
            folder / split, written, has_loss_mask=False
        ).model_dump(mode="json", exclude_defaults=True)
        table = build_table({"": lengths}, "concat", LENGTH)
        (folder / "chunks").mkdir(exist_ok=True)
        np.save(folder / f"{split}.rows.npy", table.arrays["rows"])
    staged = folder.with_name("rows")
    staged.mkdir()
    for split in facts:
        (folder / f"{split}.rows.npy").rename(staged / f"{split}.rows.npy")
    commit(
        folder,
        folder.with_name("dataset"),
        "dataset",
        {},
        {
            "vocab_size": 32768,
            "dtype": "uint16",
            "eos_id": 0,
            "text_yields_special_tokens": False,
        }
        | facts,
    )
    commit(
        staged,
        folder.with_name("dataset") / "chunks" / "k",
        "chunks",
        {},
        {
            "strategy": "concat",
            "sequence_length": LENGTH,
            "rows": dict.fromkeys(facts, 0),
        },
    )
    return TokenReader(folder.with_name("dataset"), "k", "train")


def rows_of_datasets(reader: TokenReader, folder: Path) -> Any:
    """The same rows as `datasets` reads them."""
    import datasets

    rows = reader.gather(np.arange(len(reader)))[:, :LENGTH].astype(np.uint16)
    table = pa.table(
        {
            "input_ids": pa.FixedSizeListArray.from_arrays(
                pa.array(rows.reshape(-1)), LENGTH
            )
        }
    )
    datasets.Dataset(table).save_to_disk(str(folder))
    return datasets.load_from_disk(str(folder)).with_format("torch")


class Row:
    """One row as a tensor, for litdata, which sends its function to another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, number: int) -> Any:
        import torch

        yield torch.from_numpy(
            np.load(self.folder, mmap_mode="r")[number].astype(np.int32)
        )


def rows_of_litdata(
    reader: TokenReader, folder: Path
) -> Callable[[np.ndarray], object]:
    """The same rows as litdata's TokensLoader reads them, one tensor an index, stacked and widened."""
    import torch

    litdata: Any = import_module("litdata")
    folder.mkdir()
    np.save(
        folder / "rows.npy",
        reader.gather(np.arange(len(reader)))[:, :LENGTH].astype(np.uint16),
    )
    litdata.optimize(
        Row(folder / "rows.npy"),
        list(range(len(reader))),
        output_dir=str(folder / "chunks"),
        chunk_size=LENGTH * 8012,
        num_workers=1,
        item_loader=litdata.TokensLoader(block_size=LENGTH),
    )
    theirs = litdata.StreamingDataset(
        str(folder / "chunks"), item_loader=litdata.TokensLoader(block_size=LENGTH)
    )
    return lambda rows: torch.stack([theirs[row] for row in rows.tolist()]).long()


def one_by_one(read: Callable[[Any], object], batches: list[np.ndarray]) -> None:
    """As training does: no batch is kept, so that its memory serves the next one."""
    for rows in batches:
        read(rows)


def require_same_rows(
    reads: dict[str, Callable[[np.ndarray], Any]], batches: list[np.ndarray]
) -> None:
    """Every program's tokens of these batches are equal.

    Raises:
        SystemExit: a program reads other tokens.
    """
    for number, rows in enumerate(batches):
        tokens = {
            name: np.asarray(read(rows)).astype(np.int64)
            for name, read in reads.items()
        }
        hashes = {
            name: hashlib.sha256(found.tobytes()).hexdigest()[:16]
            for name, found in tokens.items()
        }
        require_equal(f"the tokens of batch {number}", hashes)


def nanoseconds(work: Callable[[], object], units: int) -> float:
    started = time.process_time_ns()
    work()
    return (time.process_time_ns() - started) / units


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("results") / "reader.json",
    )
    options = parser.parse_args()
    choose = np.random.default_rng(0)
    lengths = np.maximum(2, choose.lognormal(6, 1.2, DOCUMENTS)).astype(np.int64)
    with tempfile.TemporaryDirectory(prefix="reader-") as folder:
        reader = made_up(Path(folder) / "made", options.tokens)
        theirs = rows_of_datasets(reader, Path(folder) / "theirs")
        batches = [choose.integers(0, len(reader), BATCH) for _ in range(200)]
        few = batches[:20]
        reads: dict[str, Callable[[np.ndarray], Any]] = {
            "ours": lambda rows: reader.gather(rows)[:, :LENGTH],
            "datasets": lambda rows: theirs[rows.tolist()]["input_ids"],
        }
        works: dict[str, tuple[Callable[[], object], int]] = {
            "read, ours": (
                lambda: one_by_one(reader.gather, batches),
                len(batches) * BATCH * LENGTH,
            ),
            "read, datasets": (
                lambda: one_by_one(lambda rows: theirs[rows.tolist()], few),
                len(few) * BATCH * LENGTH,
            ),
            "best_fit, ours": (lambda: pack(lengths, LENGTH, "best_fit"), DOCUMENTS),
        }
        try:
            read = reads["litdata"] = rows_of_litdata(reader, Path(folder) / "litdata")
            works["read, litdata"] = (
                lambda: one_by_one(read, few),
                len(few) * BATCH * LENGTH,
            )
        except ImportError:
            print("litdata is not installed; its reading is left out")
        try:
            from datasets import Dataset

            trl: Any = import_module("trl.data_utils")

            listed = Dataset.from_dict(
                {"input_ids": [[1] * int(length) for length in lengths]}
            )
            works["best_fit, trl"] = (
                lambda: trl.pack_dataset(
                    listed, LENGTH + 1, "bfd_split", {"load_from_cache_file": False}
                ),
                DOCUMENTS,
            )
        except ImportError:
            print("trl is not installed; its packing is left out")
        require_same_rows(reads, few)
        found: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(options.rounds):
            for name, (work, units) in works.items():
                found[name].append(nanoseconds(work, units))
    medians = {name: statistics.median(times) for name, times in found.items()}
    for name, median in medians.items():
        print(
            f"{name:16} {median:.3g} ns ({min(found[name]):.3g} … {max(found[name]):.3g})"
        )
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "load_at_the_end": os.getloadavg(),
    }
    stored = {
        "machine": machine,
        "datasets": version("datasets"),
        "medians": medians,
        "runs": found,
    }
    options.output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
