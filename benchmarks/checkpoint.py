"""Saving: the stall of an asynchronous save against one copy of the state, the whole of a save against torch.save and fsync.

    .venv/bin/python benchmarks/checkpoint.py [--megabytes 250 500] [--rounds 7]

The alternatives take turns (copy, asynchronous save, torch.save, synchronous save, and again), so that a busy machine or disk strikes
all of them; the ratios are of each round's pair, and the median of those is what counts. All of it is on the page cache and
disk of the folder under --home. Results are appended to benchmarks/results/checkpoint.jsonl.
"""

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.machine import cpu
from infini_llama.tasks.train.worker.checkpointer import BackgroundSave
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

RESULTS = Path(__file__).with_name("results") / "checkpoint.jsonl"


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    """Weights and two moments of a small Llama's shapes, `megabytes` in all, and a step counter each, as AdamW keeps."""
    generator = torch.Generator().manual_seed(0)
    state, layer, left = {}, 0, megabytes * 1_000_000
    while left > 0:
        for name, rows, columns in (
            ("qkv", 1024, 512),
            ("out", 512, 512),
            ("up", 2816, 512),
            ("down", 512, 1408),
            ("norm", 1, 512),
        ):
            for part in ("model", "exp_avg", "exp_avg_sq"):
                value = torch.randn(rows, columns, generator=generator)
                state[f"{part}.{layer}.{name}"] = value
                left -= value.nbytes
            state[f"step.{layer}.{name}"] = torch.tensor(1.0)
        layer += 1
    return state


def seconds(action: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - began


def torch_save(state: dict[str, torch.Tensor], folder: Path, step: int) -> None:
    """What most programs do, made as durable as a commit: file and folder are synced, and two files are kept."""
    path = folder / f"{step}.pt"
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    (folder / f"{step - 2}.pt").unlink(missing_ok=True)


def measure(megabytes: int, rounds: int, home: Path, ranks: Ranks) -> dict:
    state = state_of(megabytes)
    size = sum(value.nbytes for value in state.values())
    memory = {name: torch.zeros_like(value) for name, value in state.items()}

    def copy() -> None:
        for name, value in state.items():
            memory[name].copy_(value)

    background = BackgroundSave(
        home / "async", TrainingConfig(save_total_limit=2), ranks, lambda: None
    )
    waiting = BackgroundSave(
        home / "sync",
        TrainingConfig(save_total_limit=2, async_save=False),
        ranks,
        lambda: None,
    )
    scalars = {"step": 0, "validation_loss": None}
    times: dict[str, list[float]] = {
        name: [] for name in ("copy", "stall", "write", "torch_save", "save")
    }
    for step in range(1, rounds + 2):
        times["copy"].append(seconds(copy))
        times["stall"].append(seconds(background.save, step, state, scalars))
        times["write"].append(background.wait())
        times["torch_save"].append(seconds(torch_save, state, home, step))
        times["save"].append(seconds(waiting.save, step, state, scalars))
    first_stall = times["stall"][0]
    # The first round touches fresh memory.
    times = {name: values[1:] for name, values in times.items()}

    def ratio(of: str, to: str) -> dict[str, float]:
        found = sorted(a / b for a, b in zip(times[of], times[to], strict=True))
        return {
            "median": statistics.median(found),
            "lowest": found[0],
            "highest": found[-1],
        }

    return {
        "bytes": size,
        "rounds": rounds,
        "median_seconds": {
            name: statistics.median(values) for name, values in times.items()
        },
        "first_stall_seconds": first_stall,
        "stall_over_copy": ratio("stall", "copy"),
        "save_over_torch_save_and_fsync": ratio("save", "torch_save"),
        "background_save_over_torch_save_and_fsync": ratio("write", "torch_save"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[250, 500])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--home", type=Path, default=None)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    one = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    os.environ.update(one)
    ranks = Ranks("cpu", "gloo")
    machine = {
        "cpu": cpu(Machine()).model,
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
    for megabytes in arguments.megabytes:
        home = Path(tempfile.mkdtemp(dir=arguments.home, prefix="checkpoint-"))
        try:
            result = measure(megabytes, arguments.rounds, home, ranks)
        finally:
            shutil.rmtree(home)
        line = json.dumps(
            {"megabytes": megabytes}
            | result
            | {"machine": machine, "time": time.time()}
        )
        print(line)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    ranks.leave()


if __name__ == "__main__":
    main()
