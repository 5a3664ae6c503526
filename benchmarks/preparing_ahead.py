"""What preparing the text ahead of training is worth: steps on prepared rows against tokenizing and chunking while training.

    .venv/bin/python benchmarks/preparing_ahead.py [--configs tiny cpu] [--rounds 7] [--steps 5] [--device cpu]

The tokenizer is the same on all sides and is learned before any clock runs. `prepared` reads a step's rows from the artifact; `while
training` takes documents in random order, encodes them with `tokenizers` and cuts them into rows, as loops without a preparation do: in
the training process, or in a process of torch's DataLoader. All take the same kind of step (forward, backward, AdamW) in turns, a few
steps each; shares and ratios are medians over the rounds. Beside it stands what the preparation takes, once: encoding, and the chunking
of what is encoded on each device that there is. Results go to benchmarks/results/preparing_ahead.json.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset

from infini_llama.configs.loading import load_config
from infini_llama.configs.schema import DataConfig, ModelConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.train.worker.data.loader import (
    BatchPlan,
    TrainBatches,
    curriculum_stages,
)

RESULTS = Path(__file__).with_name("results") / "preparing_ahead.json"
CONFIGS = Path(__file__).parents[1] / "configs"
BATCH = 8  # rows of a step
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and labels [BATCH, L]


class WhileTraining(IterableDataset):
    """Batches of documents that are encoded when their turn comes."""

    def __init__(
        self, texts: list[str], tokenizer: Path, eos: int, length: int
    ) -> None:
        self.texts, self.tokenizer, self.eos, self.length = (
            texts,
            tokenizer,
            eos,
            length,
        )

    def __iter__(self) -> Iterator[Batch]:
        encode, choose = (
            Tokenizer.from_file(str(self.tokenizer)).encode_batch,
            np.random.default_rng(0),
        )
        wanted, there = BATCH * (self.length + 1), np.empty(0, dtype=np.int64)
        while True:
            while len(there) < wanted:
                picked = encode(
                    [
                        self.texts[number]
                        for number in choose.integers(0, len(self.texts), BATCH)
                    ]
                )
                there = np.concatenate(
                    [there, *(np.array([*one.ids, self.eos]) for one in picked)]
                )
            cut, there = (
                torch.from_numpy(there[:wanted]).view(BATCH, -1),
                there[wanted:],
            )
            yield cut[:, :-1], cut[:, 1:]


def prepared(reader: TokenReader) -> Iterator[Batch]:
    batches, consumed = (
        TrainBatches(curriculum_stages(reader), BatchPlan(0, BATCH, BATCH, 0, 1)),
        0,
    )
    while True:
        ((inputs, labels, *_),) = batches.micro_batches(consumed, torch.device("cpu"))
        consumed += BATCH
        yield inputs, labels


def texts_of(dataset: Path, tokenizer: Tokenizer) -> list[str]:
    found = []
    for shard in sorted((dataset / "train").glob("*.arrow")):
        offsets, tokens = map_shard(shard)
        pieces = [tokens[a : b - 1].tolist() for a, b in pairwise(offsets)]
        found += tokenizer.decode_batch(pieces, skip_special_tokens=False)
    return found


def steps_of(
    model: Llama, batches: Iterator[Batch], device: torch.device
) -> Callable[[int], dict[str, float]]:
    """Takes that many steps and says what their batches and all of them took, in seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def take(count: int) -> dict[str, float]:
        began, waited = time.perf_counter(), 0.0
        for _ in range(count):
            asked = time.perf_counter()
            inputs, labels = next(batches)
            waited += time.perf_counter() - asked
            logits = model(inputs.to(device))
            F.cross_entropy(
                logits.flatten(0, 1).float(), labels.to(device).flatten()
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return {"data": waited, "all": time.perf_counter() - began}

    return take


def preparation(config: dict[str, Any], home: Path) -> dict[str, float]:
    """Seconds of a whole preparation with a tokenizer that is there, then of the row tables alone, on each device."""
    took = {}
    devices = [
        "cpu",
        *(f"cuda:{number}" for number in range(torch.cuda.device_count())),
    ]
    for device in devices:
        for what in ("encoding and chunking", "chunking"):
            settings = config | {"device": device}
            if what == "chunking":  # of what the first one has encoded
                settings |= {"stride": config["sequence_length"] // 2}
            began = time.perf_counter()
            preprocess(
                DataConfig.model_validate(settings), home / device.replace(":", "-")
            )
            took[f"{what}, {device}"] = time.perf_counter() - began
    return took


def compared(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = torch.device(arguments.device)
    overrides = ["data.source=python-stdlib", "data.files=[]", f"runtime.home={folder}"]
    config = load_config(str(CONFIGS / f"{name}.yaml"), overrides).model_dump(
        mode="json"
    )
    reference = preprocess(DataConfig.model_validate(config["data"]), folder)
    dataset, length = folder / reference.path, reference.sequence_length
    tokenizer = Tokenizer.from_file(str(dataset / "tokenizer.json"))
    reader = TokenReader(dataset, reference.row_table, "train")
    texts = texts_of(dataset, tokenizer)
    given = config["data"] | {
        "tokenizer": config["data"]["tokenizer"]
        | {"path": str(dataset / "tokenizer.json")}
    }
    once = preparation(given, folder / "again")
    ahead_of_time = WhileTraining(
        texts, dataset / "tokenizer.json", reader.padding, length
    )
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(
            **ModelConfig(**config["model"]).architecture(reference.vocab_size, length)
        )
    ).to(device)
    sides = {
        "prepared": prepared(reader),
        "while training": iter(ahead_of_time),
        "while training, in a process": iter(
            DataLoader(ahead_of_time, batch_size=None, num_workers=1)
        ),
    }
    takes = {side: steps_of(model, batches, device) for side, batches in sides.items()}
    # The first ones warm up.
    turns = {side: [take(arguments.steps)] for side, take in takes.items()}
    for _ in range(arguments.rounds):
        for side, take in takes.items():
            turns[side].append(take(arguments.steps))
    found: dict[str, Any] = {
        "config": name,
        "tokens_per_step": BATCH * length,
        "preparation_seconds": once,
    }
    found["tokens"] = sum(reader.stream.tokens)
    for side, taken in turns.items():
        timed = list(zip(taken[1:], turns["prepared"][1:], strict=True))
        found[side] = {
            "milliseconds_a_step": spread(
                [1000 * mine["all"] / arguments.steps for mine, _ in timed]
            ),
            # of all rounds together: a batch of documents that is encoded fills several rounds' rows
            "share_of_data": sum(mine["data"] for mine, _ in timed)
            / sum(mine["all"] for mine, _ in timed),
            "less_time_when_prepared": spread(
                [1 - base["all"] / mine["all"] for mine, base in timed]
            ),
        }
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=["tiny", "cpu"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="of one turn")
    parser.add_argument("--device", default="cpu", help="what trains")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="preparing-") as folder:
        rows = [
            compared(name, arguments, Path(folder) / name) for name in arguments.configs
        ]
    for row in rows:
        print(json.dumps(row, indent=1))
    machine = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load_at_the_end": os.getloadavg(),
    }
    versions = {name: version(name) for name in ("torch", "tokenizers")}
    result = {
        "machine": machine,
        "versions": versions,
        "device": arguments.device,
        "rows": rows,
        "time": time.time(),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
