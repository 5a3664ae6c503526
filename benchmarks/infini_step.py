"""What the memory of Infini-attention costs: an optimizer step beside that of local attention over the same segments.

    .venv/bin/python benchmarks/infini_step.py [--sizes s m] [--segments 256 512] [--threads 1 2] [--rounds 9]

Models of benchmarks/training.py with heads of 64, half as many of keys and values, and a vocabulary of 8,192; a step has one row of
2,048 random tokens. Each runs under the plan that a user gets without a key. The two kinds of attention take turns in one process; in a
round each has CALLS steps, of which its fastest counts. A ratio is that of one round. Results go to benchmarks/results/infini_step.json,
a row per processor, size, segment length and number of threads. On a machine that is not quiet, run it under `chrt -f 1`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from stored_rows import about, store
from training_peer import SIZES

from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.train.worker.data.loader import Batch, GlobalBatch
from infini_llama.tasks.train.worker.initial_model import build_model
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
from infini_llama.tasks.train.worker.trainer import optimizer_step

RESULTS = Path(__file__).with_name("results") / "infini_step.json"
LENGTH, VOCABULARY, HEAD_SIZE = 2048, 8192, 64
KINDS = ("local", "infini")
CALLS = 3
RESERVED = 0.1  # of the time, for other programs, as benchmarks/attention.py has it


def config_of(size: str, segment: int, threads: int, attention: str) -> PipelineConfig:
    hidden, inner, layers, *_ = SIZES[size]
    heads = hidden // HEAD_SIZE
    sections = {
        "data": {
            "source": "python-stdlib",
            "sequence_length": LENGTH,
            "tokenizer": {"vocab_size": VOCABULARY},
        },
        "model": {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "attention": attention,
            "segment_length": segment,
        },
        "train": {"global_batch_size": 1, "micro_batch_size": 1},
        "environment": {"device": "cpu", "nproc_per_node": 1, "threads": threads},
    }
    return PipelineConfig.model_validate(sections)


def child(case: dict[str, Any], rounds: int) -> None:
    """Print {kind: seconds of each round}."""
    os.environ.update(
        {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    )
    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    ranks = Ranks("cpu", "gloo")
    row = torch.randint(VOCABULARY, (1, LENGTH + 1))
    batch = GlobalBatch([Batch(row[:, :-1], row[:, 1:])], LENGTH)
    strategies: dict[str, Any] = {}
    for kind in KINDS:
        config = config_of(case["size"], case["segment"], case["threads"], kind)
        plan = EnvironmentPlan.model_validate(case["plans"][kind])
        model = build_model(
            LlamaConfig(**config.model.architecture(VOCABULARY, LENGTH)),
            config.train,
            plan,
            ranks.device,
        )
        strategies[kind] = build_strategy(model, config.train, plan.precision, 1, ranks)

    def step(kind: str) -> float:
        started = time.perf_counter()
        optimizer_step(
            strategies[kind], batch, 1.0, lambda loss: False, lambda: False, ranks
        )
        return time.perf_counter() - started

    for kind in KINDS:
        step(kind)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        calls: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for kind in KINDS * CALLS:
            calls[kind].append(step(kind))
            time.sleep(RESERVED * calls[kind][-1])
        for kind, times in calls.items():
            seconds[kind].append(min(times))
    print(json.dumps(seconds), flush=True)


def measure(
    size: str, segment: int, threads: int, rounds: int, home: Path
) -> dict[str, Any]:
    """The row of one case, in a process with the variables of its plan."""
    facts = probe(home)  # once, so that both kinds have the same variables
    plans = {
        kind: plan_environment(config_of(size, segment, threads, kind), facts)
        for kind in KINDS
    }
    case = {"size": size, "segment": segment, "threads": threads}
    order = json.dumps(
        case | {"plans": {kind: plan.to_json() for kind, plan in plans.items()}}
    )
    command = [sys.executable, __file__, "--rounds", str(rounds), "--child", order]
    done = subprocess.run(
        command,
        env=os.environ | plans["infini"].env,
        stdout=subprocess.PIPE,
        check=True,
    )
    chosen = {
        "precision": plans["infini"].precision,
        "attention_backend": {
            kind: plan.attention_backend for kind, plan in plans.items()
        },
        "env": plans["infini"].env,
    }
    return (
        about() | chosen | case | {"seconds": json.loads(done.stdout.splitlines()[-1])}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--segments", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(json.loads(arguments.child), arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="infini-step-") as home:
        for size in arguments.sizes:
            for segment in arguments.segments:
                for threads in arguments.threads:
                    row = measure(size, segment, threads, arguments.rounds, Path(home))
                    store(RESULTS, row, ("processor", "size", "segment", "threads"))
                    ratios = [
                        infini / local
                        for local, infini in zip(
                            row["seconds"]["local"],
                            row["seconds"]["infini"],
                            strict=True,
                        )
                    ]
                    print(
                        f"{size}, segments of {segment}, {threads} thread(s), {row['attention_backend']['infini']}: "
                        f"{statistics.median(row['seconds']['infini']):.3f} s, "
                        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of local attention's",
                        flush=True,
                    )
    return None


if __name__ == "__main__":
    main()
