"""Data: row tables, masks and batches on the CPU and on the device, with equal bytes, and what a training step waits for them."""

import hashlib
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from case import Case, Row, model_config, seconds_of

from infini_llama.configs.schema import DataConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.layout import PADDING, positions, rows, segments
from infini_llama.tasks.preprocess.rows.packing import RowArrays, compute_rows
from infini_llama.tasks.preprocess.rows.tables import rows_by_torch, rows_on
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.train.worker.data.loader import (
    Batch,
    BatchPlan,
    Prefetch,
    TrainBatches,
    curriculum_stages,
)

STEP = 1024  # tokens from row to row
CONFIG = {"source": "python-stdlib", "validation_fraction": 0.05, "device": "cpu"}


def chunking(device: str, rehearse: bool) -> list[Row]:
    """Rows of documents: numpy, the device alone, and the device in a child process, as preprocessing uses it."""
    found: list[Row] = []
    there = f"{device}:0"
    with rows_on(there) as compute:
        began = time.perf_counter()
        compute(np.array([STEP]), "concat", STEP, None)
        start = time.perf_counter() - began  # of the process and of CUDA
        for documents in (
            (300,) if rehearse else (10**6, 10**7)
        ):  # of 740 tokens in the median, 2,200 in the mean
            lengths = (
                np.random.default_rng(7)
                .lognormal(6.6, 1.5, documents)
                .clip(1, 200_000)
                .astype(np.int64)
            )
            for strategy in ("concat", "padded", "greedy"):
                ways = {
                    "numpy": partial(compute_rows, lengths, strategy, STEP),
                    device: partial(
                        rows_by_torch, lengths, strategy, STEP, None, there
                    ),
                    "child": partial(compute, lengths, strategy, STEP, None),
                }
                results = {name: way() for name, way in ways.items()}
                row: Row = {
                    "documents": documents,
                    "strategy": strategy,
                    "rows": len(results["numpy"]),
                }
                row |= {
                    f"{name} s": seconds_of(way, device, 1 if rehearse else 3, 0)
                    for name, way in ways.items()
                }
                same = len({bytes_of(result) for result in results.values()}) == 1
                found.append(row | {"start s": start, "passed": same})
    return found


def bytes_of(rows: RowArrays) -> tuple[bytes, bytes | None]:
    return (
        rows.entries.tobytes(),
        None if rows.pieces is None else rows.pieces.tobytes(),
    )


def masks(device: str, rehearse: bool) -> list[Row]:
    """Positions, boundaries and masks of packed rows from their documents' numbers, on the CPU and on the device."""
    found: list[Row] = []
    count, length = (2, 64) if rehearse else (16, 8192)
    generator = torch.Generator().manual_seed(0)
    documents = (
        (torch.rand(count, length, generator=generator) < 8 / length)
        .int()
        .cumsum(1, dtype=torch.int32)
    )
    documents[0, length // 2 :] = PADDING
    for attention in ("softmax", "infini"):
        config = model_config(
            "125M",
            length,
            rehearse,
            attention=attention,
            segment_length=16 if rehearse else STEP,
        )
        row: Row = {"attention": attention, "tokens": documents.numel()}
        tensors: list[list[torch.Tensor]] = []
        for place in ("cpu", device):
            build = partial(masks_of, config, documents.to(place))
            row[f"{place} ms"] = 1e3 * seconds_of(
                build, place, rounds=1 if rehearse else 10
            )
            tensors.append(build())
        same = all(
            torch.equal(cpu, other.cpu()) for cpu, other in zip(*tensors, strict=True)
        )
        found.append(row | {"tensors": len(tensors[0]), "passed": same})
    return found


def masks_of(config: LlamaConfig, documents: torch.Tensor) -> list[torch.Tensor]:
    """Positions, the layout of a pass, and which pairs of tokens of the first row see each other."""
    layout_of = rows if config.attention == "softmax" else segments
    like = torch.zeros(1, device=documents.device)
    layout = layout_of(
        config, documents.shape, documents, like, by_boundaries=True, most_documents=64
    )
    pairs = (documents[:1, :, None] == documents[:1, None]).tril()
    return [
        positions(documents),
        pairs,
        *(part for part in layout if isinstance(part, torch.Tensor)),
    ]


def dataset(folder: str, strategy: str, rehearse: bool) -> TokenReader:
    """Rows of the standard library's source."""
    length = 64 if rehearse else STEP
    settings = CONFIG | {
        "packing": strategy,
        "sequence_length": length,
        "tokenizer": {"vocab_size": 2048},
    }
    if rehearse:
        text = Path(folder) / "text.txt"
        text.write_text(
            "\n\n".join(f"def f{n}(x):\n    return x + {n}" for n in range(4000)),
            encoding="utf-8",
        )
        more = {
            "source": "files",
            "files": [str(text)],
            "tokenizer": {"vocab_size": 400},
        }
        (Path(folder) / "more.txt").write_text(
            "a text to hold out\n" * 400, encoding="utf-8"
        )
        settings |= more | {"validation_files": [str(Path(folder) / "more.txt")]}
    reference = preprocess(DataConfig.model_validate(settings), Path(folder))
    return TokenReader(Path(folder) / reference.path, reference.row_table, "train")


def digest(batch: Batch) -> str:
    parts = [
        np.ascontiguousarray(part.cpu().numpy()).tobytes()
        for part in batch
        if part is not None
    ]
    return hashlib.blake2b(b"".join(parts)).hexdigest()


def batches(device: str, rehearse: bool) -> list[Row]:
    """Milliseconds until a step's batch is on the device: built when it is requested, and by threads ahead."""
    found: list[Row] = []
    micro, rounds = (2, 3) if rehearse else (16, 30)
    for strategy, isolate in (("concat", False), ("concat", True), ("best_fit", True)):
        with TemporaryDirectory(prefix="data-") as folder:
            reader = dataset(folder, strategy, rehearse)
            batches = TrainBatches(
                curriculum_stages(reader), BatchPlan(0, 4 * micro, micro, 0, 1, isolate)
            )
            row: Row = {
                "strategy": strategy,
                "isolated": isolate,
                "tokens": 4 * micro * reader.sequence_length,
            }
            expected = [
                digest(batch) for batch in batches.micro_batches(0, torch.device("cpu"))
            ]
            for workers in (0, 2):
                with Prefetch(
                    batches,
                    torch.device(device),
                    lambda samples: samples + 4 * micro,
                    workers,
                ) as data:
                    same = [
                        digest(batch) for batch in data.batch_at(0).micro_batches
                    ] == expected
                    steps = iter(range(0, 10_000_000, 4 * micro))
                    row[f"ms, {workers} threads"] = 1e3 * seconds_of(
                        lambda data=data, steps=steps: data.batch_at(next(steps)),
                        device,
                        rounds,
                    )
                    row["passed"] = row.get("passed", True) and same
            found.append(row)
    return found


def ahead(device: str, rehearse: bool) -> list[Row]:
    """`benchmarks/preparing_ahead.py`: steps on prepared data against tokenizing while training."""
    if rehearse:
        return [{"left out": "a benchmark of its own"}]
    script = Path(__file__).parents[1] / "preparing_ahead.py"
    command = [
        sys.executable,
        str(script),
        "--device",
        device,
        "--configs",
        "tiny",
        "small",
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [{"result": output[-4000:]}]


CASES = {
    "chunking": Case(chunking, 50),
    "masks": Case(masks, 20),
    "batches": Case(batches, 50),
    "preparing ahead": Case(ahead, 100),
}
