"""What environment.half_weights saves: the time of a bf16 step without its matrix products.

    .venv/bin/python benchmarks/half_weights.py [--rounds 5]

Steps of four micro-batches of one row of 128 tokens, size s of benchmarks/training.py with a vocabulary of 512, with and without half
weights, eager and compiled, in turns. Matrix products are left out by the profile, so that the rest can be compared on processors
that emulate products in bf16, too. The result goes to benchmarks/results/half-weights.json.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from training import processor_name, spread
from training_peer import SIZES

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.data.prefetch import GlobalBatch
from infini_llama.tasks.train.worker.optimizer import build_optimizer
from infini_llama.tasks.train.worker.strategies.compiling import Compiled, use_cache
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import Strategy, build_strategy
from infini_llama.tasks.train.worker.trainer import optimizer_step

RESULTS = Path(__file__).with_name("results") / "half-weights.json"
VOCABULARY, LENGTH, MICRO_BATCHES = 512, 128, 4
PRODUCTS = ("aten::mm", "aten::bmm", "aten::baddbmm", "aten::addmm", "aten::addmm_")


def strategy_of(half_weights: bool, compiled: bool, ranks: Ranks) -> Strategy:
    hidden, inner, layers, heads, kv = SIZES["s"]
    torch.manual_seed(1)
    model = Llama(LlamaConfig(VOCABULARY, hidden, inner, layers, heads, kv, LENGTH), "blocked")
    strategy = build_strategy(model, TrainingConfig(), "bf16", 1, ranks, build_optimizer, half_weights)
    if compiled:
        strategy.compiled = Compiled(strategy.module, model, "whole")
        strategy.compiled.switch_on()
    return strategy


def milliseconds(strategy: Strategy, batch: GlobalBatch, ranks: Ranks) -> float:
    """Of all that is no matrix product, in one step."""
    with torch.profiler.profile() as profiler:
        optimizer_step(strategy, batch, 1.0, lambda _: False, lambda: False, ranks)
    return sum(event.self_cpu_time_total for event in profiler.events() or () if event.name not in PRODUCTS) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
    ranks = Ranks("cpu", "gloo")
    rows = torch.randint(VOCABULARY, (MICRO_BATCHES, 1, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    batch = GlobalBatch([(row[:, :-1], row[:, 1:]) for row in rows], MICRO_BATCHES * LENGTH)
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        use_cache(Path(cache))
        for name, compiled in (("eager", False), ("compiled", True)):
            off, on = (strategy_of(half, compiled, ranks) for half in (False, True))
            pairs = [(milliseconds(off, batch, ranks), milliseconds(on, batch, ranks)) for _ in range(rounds + 1)][1:]
            found[name] = {
                "off": statistics.median(pair[0] for pair in pairs),
                "on": statistics.median(pair[1] for pair in pairs),
                "off / on": spread([without / with_copies for without, with_copies in pairs]),
            }
            print(name, found[name])
    ranks.leave()
    record = {"milliseconds without products": found, "rounds": rounds, "processor": processor_name()}
    record |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "time": time.time()}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
