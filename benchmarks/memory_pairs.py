"""What does the recipe of `pairs` need? One change at a time, 1,000 steps each where the name says nothing else.

    .venv/bin/python benchmarks/memory_pairs.py [--variants NAME …] [--seed 0]

Facts with a key of two tokens and a value of two, as of benchmarks/memory.py. Results are added to benchmarks/results/memory_pairs.json
after each model; `benchmarks/memory.py --tables` writes their table.
"""

import argparse
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from memory import MEMORIES, TASKS, measure, train
from memory_results import store
from memory_rows import pairs_rows

STEPS, DISTANCES = 1000, (1, 8, 32)


@dataclass(frozen=True)
class Variant:
    """What differs from the recipe: arguments of the rows, the model's fields and the recipe's."""

    rows: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    steps: int = STEPS


FULL = {"attention": "softmax", "memory_write_jitter": 1.0}
AMBIGUOUS = {"ambiguous": 0.7}
VARIANTS = {
    "the recipe": Variant(),
    "the first layer's gates start at 0.5": Variant(recipe={"lower_gates": 0.0}),
    "full attention": Variant(model=FULL),
    "rope_theta 10,000": Variant(model={"rope_theta": 10_000.0}),
    "always 8 letters of each kind": Variant(rows={"letters": 8}),
    "always 4 letters of each kind": Variant(rows={"letters": 4}),
    "the same letters first and second": Variant(rows={"shared": True}),
    "7 of 10 rows ambiguous": Variant(AMBIGUOUS),
    "7 of 10 rows ambiguous, full attention": Variant(AMBIGUOUS, FULL),
    "7 of 10 rows ambiguous, full attention, 2,000 steps": Variant(
        AMBIGUOUS, FULL, steps=2000
    ),
    "7 of 10 rows ambiguous, three layers": Variant(
        AMBIGUOUS, {"num_hidden_layers": 3}
    ),
    "7 of 10 rows ambiguous, four heads": Variant(
        AMBIGUOUS, {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    ),
    "7 of 10 rows ambiguous, no jitter, head_dim 64, three layers, 2,000 steps": Variant(
        AMBIGUOUS, {"head_dim": 64, "num_hidden_layers": 3}, {"jitter": 1.0}, 2000
    ),
    "no jitter": Variant(recipe={"jitter": 1.0}),
    "no jitter, head_dim 64": Variant(model={"head_dim": 64}, recipe={"jitter": 1.0}),
    "no jitter, delta_bounded": Variant(
        model={"memory_update": "delta_bounded"}, recipe={"jitter": 1.0}
    ),
}


def run(name: str, seed: int) -> dict[str, Any]:
    """Trains and measures one model."""
    variant, task, started = VARIANTS[name], TASKS["pairs"], time.process_time()
    task = replace(task, rows=partial(pairs_rows, **variant.rows or {}))
    task = replace(task, recipe=replace(task.recipe, **variant.recipe or {}))
    model, curve = train(
        task, MEMORIES["linear"] | (variant.model or {}), seed, variant.steps
    )
    result = {
        "variant": name,
        "seed": seed,
        "cpu_seconds": round(time.process_time() - started, 1),
        "steps": variant.steps,
    }
    result |= {
        "changes": asdict(variant),
        "recipe": asdict(task.recipe),
        "curve": curve,
        "model": model.config.to_dict(),
    }
    return result | {
        "found": [measure(task, model.eval(), distance) for distance in DISTANCES]
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS)
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.variants:
        result = run(name, options.seed)
        store("memory_pairs", result, ("variant", "seed"))
        print(f"{name}: {result['found']}", flush=True)


if __name__ == "__main__":
    main()
