"""Data: row tables and batches by numpy and on the device, with equal bytes, and what a training step waits for them."""

import hashlib
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from case import Case, Row, seconds_of

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.rows.chunking import compute_starts, row_starts, row_starts_by_torch
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.train.worker.data.loader import TrainBatches, stages_of
from infini_llama.tasks.train.worker.data.prefetch import Prefetch

STEP = 1024  # tokens from row to row
CONFIG = {"source": "python-stdlib", "validation_fraction": 0.05, "device": "cpu"}


def chunking(device: str, rehearse: bool) -> list[Row]:
    """First tokens of rows: numpy, the device alone, and the device in a child process, as preprocessing uses it."""
    found: list[Row] = []
    for count in (1000,) if rehearse else (1 << 20, 1 << 24, 1 << 27):
        expected = row_starts(count, STEP)
        cpu = seconds_of(partial(row_starts, count, STEP), "cpu", rounds=3, warm_up=1)
        there = seconds_of(partial(row_starts_by_torch, count, STEP, device), device, rounds=3, warm_up=1)
        began = time.perf_counter()
        by_child = compute_starts(count, STEP, device)
        child = time.perf_counter() - began
        same = by_child.tobytes() == expected.tobytes() == row_starts_by_torch(count, STEP, device).tobytes()
        row: Row = {"rows": count, "numpy s": cpu, f"{device} s": there, "child s": child}
        found.append(row | {"passed": same})
    return found


def dataset(folder: str, strategy: str, rehearse: bool) -> TokenReader:
    """Rows of the standard library's source."""
    length = 64 if rehearse else STEP
    settings = CONFIG | {"strategy": strategy, "sequence_length": length, "tokenizer": {"vocab_size": 2048}}
    if rehearse:
        text = Path(folder) / "text.txt"
        text.write_text("\n\n".join(f"def f{n}(x):\n    return x + {n}" for n in range(4000)), encoding="utf-8")
        more = {"source": "files", "files": [str(text)], "tokenizer": {"vocab_size": 400}}
        (Path(folder) / "more.txt").write_text("a text to hold out\n" * 400, encoding="utf-8")
        settings |= more | {"validation_files": [str(Path(folder) / "more.txt")]}
    reference = preprocess(DataConfig.model_validate(settings), Path(folder))
    return TokenReader(Path(folder) / reference.path, reference.chunks, "train")


def digest(batch: tuple[torch.Tensor, ...]) -> str:
    parts = [np.ascontiguousarray(part.cpu().numpy()).tobytes() for part in batch]
    return hashlib.blake2b(b"".join(parts)).hexdigest()


def batches(device: str, rehearse: bool) -> list[Row]:
    """Milliseconds until a step's batch is on the device: built on the host, by threads ahead, and in the device's memory."""
    found: list[Row] = []
    micro, rounds = (2, 3) if rehearse else (16, 30)
    for strategy, isolate in (("concat", False), ("concat", True), ("best_fit", True)):
        with TemporaryDirectory(prefix="data-") as folder:
            reader = dataset(folder, strategy, rehearse)
            batches = TrainBatches(stages_of(reader), 0, 4 * micro, micro, 0, 1, isolate)
            row: Row = {"strategy": strategy, "isolated": isolate, "tokens": 4 * micro * reader.sequence_length}
            expected = [digest(batch) for batch in batches.micro_batches(0, torch.device("cpu"))]
            for workers in (0, 2):
                with Prefetch(batches, torch.device(device), lambda samples: samples + 4 * micro, workers) as data:
                    same = [digest(batch) for batch in data.batch_at(0).micro_batches] == expected
                    steps = iter(range(0, 10_000_000, 4 * micro))
                    row[f"ms, {workers} threads"] = 1e3 * seconds_of(
                        lambda data=data, steps=steps: data.batch_at(next(steps)), device, rounds
                    )
                    row["passed"] = row.get("passed", True) and same
            batches.keep_on(torch.device(device))
            same = [digest(batch) for batch in batches.micro_batches(0, torch.device(device))] == expected
            steps = iter(range(0, 10_000_000, 4 * micro))
            row["ms, resident"] = 1e3 * seconds_of(
                lambda batches=batches, steps=steps: list(batches.micro_batches(next(steps), torch.device(device))),
                device,
                rounds,
            )
            found.append(row | {"passed": row["passed"] and same})
    return found


def ahead(device: str, rehearse: bool) -> list[Row]:
    """`benchmarks/preparing_ahead.py`: steps on prepared data against tokenizing while training."""
    if rehearse:
        return [{"left out": "a benchmark of its own"}]
    script = Path(__file__).parents[1] / "preparing_ahead.py"
    command = [sys.executable, str(script), "--device", device, "--configs", "tiny", "small"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [{"result": output[-4000:]}]


CASES = {"chunking": Case(chunking, 60), "batches": Case(batches, 90), "preparing ahead": Case(ahead, 150)}
