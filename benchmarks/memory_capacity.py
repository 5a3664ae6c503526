"""How many facts fit into the memory? Recall by their number, the size of a head and the rule of writing.

    .venv/bin/python benchmarks/memory_capacity.py [--updates linear delta_bounded] [--head-dims 16 32 64] [--seeds 0]

Facts are single tokens, (one of 64 keys, one of 4 values; chance 1 in 4), at random places in the first seven segments of 16
tokens; at most 16 of the keys are asked for in the eighth. A model of two layers, width 64 and two heads is trained on 2 to 64 facts, a
number per batch, and measured on each number. Only the size of a head, and with it M's, differs. Results are added to
benchmarks/results/memory_capacity.json.
"""

import argparse
from dataclasses import asdict
from typing import Any

import torch
from memory import Recipe, Task, train
from memory_results import store
from memory_rows import FILLERS, SEGMENT, Rows, recall_rows

from infini_llama.model.loss import IGNORE_INDEX

FACTS, KEYS, VALUES, SEGMENTS = (2, 4, 8, 16, 32, 64), 64, 4, 8
RECIPE = Recipe(segments=(SEGMENTS, SEGMENTS), steps=2500, gate_learning_rate=0.01)


def rows(count: int, segments: int, generator: torch.Generator, far: bool) -> Rows:
    """As `recall_rows`, of a random number of facts; it does not fit into one segment, so `far` does not apply."""
    facts = FACTS[int(torch.randint(len(FACTS), (), generator=generator))]
    return recall_rows(count, segments, generator, False, KEYS, facts, VALUES)


@torch.inference_mode()
def measure(model: torch.nn.Module, facts: int) -> dict[str, Any]:
    inputs, labels = recall_rows(
        200,
        SEGMENTS,
        torch.Generator().manual_seed(10_000 + facts),
        False,
        KEYS,
        facts,
        VALUES,
    )
    asked = labels != IGNORE_INDEX
    right = (model(inputs)[asked].argmax(dim=-1) == labels[asked]).float().mean().item()
    return {"facts": facts, "right": right}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", nargs="+", default=["linear", "delta_bounded"])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = Task(rows, FILLERS + KEYS * VALUES + KEYS + VALUES, 1, RECIPE)
    for seed in options.seeds:
        for update in options.updates:
            for size in options.head_dims:
                settings = {
                    "attention": "infini",
                    "memory_update": update,
                    "head_dim": size,
                }
                model, curve = train(task, settings, seed)
                result = {
                    "update": update,
                    "head_dim": str(size),
                    "seed": seed,
                }
                result |= {"recipe": asdict(RECIPE), "curve": curve, "segment": SEGMENT}
                result["found"] = [measure(model, facts) for facts in FACTS]
                store("memory_capacity", result, ("update", "head_dim", "seed"))
                print(
                    update,
                    size,
                    seed,
                    *(f"{one['facts']}: {one['right']:.2f}" for one in result["found"]),
                    flush=True,
                )


if __name__ == "__main__":
    main()
