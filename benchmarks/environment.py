"""Training speed of the default plan, and of plans that differ from it in one setting: what each rule of the plan is worth.

    .venv/bin/python benchmarks/environment.py [--rounds 5] [--vocabularies 8192 32000] [--cases sdpa ...]

Each case is a process with the variables that a worker of its plan would have; it makes optimizer steps on random tokens. The cases
take turns, and every ratio is the median over rounds of that round's own ratio to the default plan, so that what else the machine
does at the time touches both sides. A case above 1.05 is a rule that is wrong here. Of the steps of a turn the fastest counts; on a
machine that is not quiet, run it under `chrt -f 1`. The raw figures go to benchmarks/results/environment.json, a row per processor and
vocabulary.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stored_rows import about, store

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan

RESULTS = Path(__file__).with_name("results") / "environment.json"
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LIMIT = 600.0  # seconds of one case
SECONDS = 5.0  # of steps after the first
RESERVED = 0.1  # of the time, for other programs, as benchmarks/attention.py has it
MICRO_BATCHES = 2
# Sections that differ from the configuration of the default plan.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "fp32": {"environment": {"precision": "fp32"}},
    "bf16": {"environment": {"precision": "bf16"}},
    "sdpa": {"environment": {"attention_backend": "sdpa"}},
    "blocked": {"environment": {"attention_backend": "blocked"}},
    "system allocator": {"environment": {"allocator": "system"}},
    "compile off": {"train": {"compile": "off"}},
    "compile block": {"train": {"compile": "block"}},
    "compile whole": {"train": {"compile": "whole"}},
    "all logits at once": {"train": {"loss_chunk": 0}},
    "one thread per worker": {"environment": {"threads": 1}},  # with a worker per core
}


def plans(
    vocabulary: int, facts: MachineFacts, names: list[str]
) -> dict[str, tuple[PipelineConfig, EnvironmentPlan]]:
    """Configuration and plan of each case that this machine can run."""
    found: dict[str, tuple[PipelineConfig, EnvironmentPlan]] = {}
    for name in names:
        case = CASES[name]
        environment = {"device": "cpu"} | case.get("environment", {})
        if "threads" in environment:
            environment["nproc_per_node"] = facts.cores
        sections = {
            "data": {
                "source": "python-stdlib",
                "sequence_length": 512,
                "tokenizer": {"vocab_size": vocabulary},
            },
            "model": MODEL,
            "train": {"global_batch_size": 16, "micro_batch_size": 4}
            | case.get("train", {}),
            "environment": environment,
        }
        config = PipelineConfig.model_validate(sections)
        found[name] = (config, plan_environment(config, facts))
    return found


def measure(config: PipelineConfig, plan: EnvironmentPlan) -> float:
    """Tokens per second of all workers of a plan; each is a process of its own."""
    job = json.dumps({"config": config.model_dump(mode="json"), "plan": plan.to_json()})
    common = {
        **os.environ,
        **plan.env,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
    }
    command = [sys.executable, __file__, "--child", job]
    place = {"WORLD_SIZE": str(plan.world_size)}
    children = [
        subprocess.Popen(
            command,
            env=common | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(plan.world_size)
    ]
    answers = [child.communicate(timeout=LIMIT)[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError(f"a worker failed under {plan.to_json()}")
    seconds = max(json.loads(answer.splitlines()[-1])["step"] for answer in answers)
    return (
        plan.world_size
        * MICRO_BATCHES
        * plan.micro_batch_size
        * config.data.sequence_length
        / seconds
    )


def child(job: str) -> None:
    """Steps of one worker, as the trainer makes them; prints the seconds of the fastest."""
    import torch

    from infini_llama.model.config import LlamaConfig
    from infini_llama.tasks.train.worker.data.loader import Batch, GlobalBatch
    from infini_llama.tasks.train.worker.initial_model import build_model
    from infini_llama.tasks.train.worker.strategies.compiling import Compiled
    from infini_llama.tasks.train.worker.strategies.ranks import Ranks
    from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
    from infini_llama.tasks.train.worker.trainer import optimizer_step

    fields = json.loads(job)
    config, plan = (
        PipelineConfig.model_validate(fields["config"]),
        EnvironmentPlan.model_validate(fields["plan"]),
    )
    torch.set_num_threads(plan.threads)
    ranks = Ranks(plan.device, plan.distributed_backend)
    data = config.data
    model = build_model(
        LlamaConfig(
            **config.model.architecture(data.tokenizer.vocab_size, data.sequence_length)
        ),
        config.train,
        plan,
        ranks.device,
    )
    strategy = build_strategy(
        model, config.train, plan.precision, plan.micro_batch_size, ranks
    )
    if plan.compile != "off":
        Compiled(strategy.module, model, plan.compile).switch_on()
    shape = (plan.micro_batch_size, data.sequence_length)
    rows = torch.randint(data.tokenizer.vocab_size, (2, *shape))
    batch = GlobalBatch(
        [Batch(rows[0], rows[1])] * MICRO_BATCHES,
        rows[0].numel() * MICRO_BATCHES * ranks.data_world_size,
    )

    def step() -> float:
        started = time.perf_counter()
        optimizer_step(strategy, batch, 1.0, lambda loss: False, lambda: False, ranks)
        took = time.perf_counter() - started
        time.sleep(RESERVED * took)
        return took

    step()
    # The same on all ranks.
    count, _ = ranks.sum(max(3.0, min(50.0, SECONDS / step())), 0.0)
    times = [step() for _ in range(int(count / ranks.world_size))]
    ranks.leave()
    print(json.dumps({"step": min(times)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 32000])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child)
    facts = probe(Path.cwd())
    for vocabulary in arguments.vocabularies:
        cases = plans(
            vocabulary,
            facts,
            ["default", *(name for name in arguments.cases if name != "default")],
        )
        speeds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(arguments.rounds):
            for name, (config, plan) in cases.items():
                speeds[name].append(measure(config, plan))
        default = cases["default"][1]
        chosen = default.model_dump(
            include={
                "precision",
                "attention_backend",
                "allocator",
                "loss_chunk",
                "compile",
                "threads",
            }
        )
        row = about() | {
            "vocabulary": vocabulary,
            "plan": chosen,
            "tokens_per_second": speeds,
        }
        store(RESULTS, row, ("processor", "vocabulary"))
        for name, values in speeds.items():
            ratios = [
                value / base
                for value, base in zip(values, speeds["default"], strict=True)
            ]
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            print(
                f"{vocabulary:>6}  {name:<24} {statistics.median(values):8.0f} tokens/s  {middle:.2f}x ({low:.2f} – {high:.2f})"
            )
    return None


if __name__ == "__main__":
    main()
