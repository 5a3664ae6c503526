"""Does the memory remember, and how far? Passkey and recall by the number of segment ends between a fact and its question.

    .venv/bin/python benchmarks/memory.py [--tasks passkey recall pairs] [--seeds 3] [--memories linear local …]

passkey: five ordered digits behind a mark in one earlier segment, and a question for them in the last one (chance: 1 in 100,000).
recall: six facts of one token each, (key, value), at random places; the six keys are asked for in the last segment (chance 1 in 16).
pairs: three facts of two key tokens and two value tokens (chance of a whole value: 1 in 100; by one of the key's tokens: 0.81).
overwritten: four facts as of recall that each get another value later; the later one is asked for (chance 1 in 16; 1/2 without order).

Rows have segments of 16 tokens, of which the filler is drawn at random, and a fact stands whole inside one segment. All tasks train on
2 to 8 segments, recall on 4, with the loss on the answers alone. Each length is a distance: the fact is in the first segment (of recall:
in all but the last) and the answer in the last. Each model is measured with its memory, and the same weights without it; `local` is
attention inside a segment alone. Results are added to benchmarks/results/memory.json after each model. `--tables` writes the tables
and the plot of docs/infini-attention*.md from the stored results.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from memory_results import PAGES, draw, store, with_tables
from memory_rows import (
    DIGITS,
    FILLERS,
    KEYS,
    LETTERS,
    SEGMENT,
    VALUES,
    Rows,
    overwritten_rows,
    pairs_rows,
    passkey_rows,
    recall_rows,
)

from infini_llama.configs.schedules import write_jitter
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama, parameter_groups
from infini_llama.model.loss import IGNORE_INDEX

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 256)  # segment ends crossed
LONGEST = 1_000_000 // SEGMENT
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
PIECE = 16_384  # tokens of the longest rows that are read at a time
MEMORIES: dict[str, dict[str, Any]] = {
    "linear": {"attention": "infini", "memory_write_jitter": True},
    "delta_bounded": {
        "attention": "infini",
        "memory_update": "delta_bounded",
        "memory_write_jitter": True,
    },
    "linear, no jitter": {"attention": "infini"},
    "delta, no jitter": {"attention": "infini", "memory_update": "delta"},
    "delta_bounded, no jitter": {
        "attention": "infini",
        "memory_update": "delta_bounded",
    },
    "local": {"attention": "local"},
}


@dataclass(frozen=True)
class Recipe:
    """How a task is trained. segments: fewest and most of a row; tokens: of a batch; the rates are peaks of a warm-up and linear decay.

    jitter: of the memories that have one. lower_gates: where the gates of all layers but the last begin, before the sigmoid.
    """

    segments: tuple[int, int] = (2, 8)
    steps: int = 4000
    tokens: int = 2048
    learning_rate: float = 3e-3
    gate_learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 100
    decay: float = 0.3  # of the steps
    jitter: float = 4_194_304.0
    lower_gates: float = 0.0


@dataclass(frozen=True)
class Task:
    """Rows of one kind; `answer`: tokens that belong together and are right as a whole or not; `settings`: of its models."""

    rows: Callable[[int, int, torch.Generator, bool], Rows]
    vocabulary: int
    answer: int
    recipe: Recipe
    nearest: int = 1  # segment ends
    settings: dict[str, Any] = field(default_factory=dict[str, Any])


TASKS = {
    "passkey": Task(passkey_rows, FILLERS + DIGITS + 2, 5, Recipe()),
    "recall": Task(
        recall_rows,
        FILLERS + KEYS * VALUES + KEYS + VALUES,
        1,
        Recipe(segments=(4, 4), steps=1200, gate_learning_rate=0.01, jitter=64.0),
    ),
    "overwritten": Task(
        overwritten_rows,
        FILLERS + KEYS * VALUES + KEYS + VALUES,
        1,
        Recipe(segments=(4, 4), steps=1000),
        2,
    ),
    "pairs": Task(
        pairs_rows,
        FILLERS + DIGITS + 2 * LETTERS + 2,
        2,
        Recipe(segments=(2, 4), steps=3000, jitter=32.0, lower_gates=-3.0),
        settings={"rope_theta": 100.0},
    ),
}


def train(
    task: Task, settings: dict[str, Any], seed: int, until: int | None = None
) -> tuple[Llama, list[dict[str, Any]]]:
    """A model of two layers, width 64, two heads and `settings`, and what was measured every 250 steps; `until` ends it sooner."""
    if settings.get("memory_write_jitter") is True:  # the task's
        settings = settings | {"memory_write_jitter": task.recipe.jitter}
    torch.manual_seed(seed)
    recipe = task.recipe
    config = LlamaConfig(
        task.vocabulary,
        max_position_embeddings=recipe.segments[1] * SEGMENT,
        segment_length=SEGMENT,
        initializer_range=0.1,
        tie_word_embeddings=False,
        **SIZES | task.settings | settings,
    )
    model = Llama(config)
    model.set_gates([recipe.lower_gates] * (config.num_hidden_layers - 1) + [0.0])
    groups = parameter_groups(model, recipe.weight_decay)
    peaks = [
        recipe.gate_learning_rate if group["name"] == "gates" else recipe.learning_rate
        for group in groups
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    generator, curve = torch.Generator().manual_seed(seed), []
    for step in range(until or recipe.steps):
        if config.memory_write_jitter > 1:
            model.set_write_jitter(
                write_jitter(config.memory_write_jitter, recipe.steps, step)
            )
        left = (recipe.steps - step) / (recipe.decay * recipe.steps)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / recipe.warmup, left)
        segments = int(
            torch.randint(
                recipe.segments[0], recipe.segments[1] + 1, (), generator=generator
            )
        )
        total, count = model.loss(
            *task.rows(
                recipe.tokens // (segments * SEGMENT), segments, generator, False
            )
        )
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 250 == 0:
            model.eval()
            found = measure(task, model, recipe.segments[1] - 1, count=128)
            model.train()
            curve.append({"step": step + 1, **found, "gates": gates(model)})
            print(
                f"  seed {seed} step {step + 1}: {found['whole']:.3f} {found['tokens']} {curve[-1]['gates']}",
                flush=True,
            )
    return model.eval(), curve


def gates(model: Llama) -> list[list[float]]:
    """Share of the memory in each head's output, by layer."""
    found = [
        parameter.sigmoid()
        for name, parameter in model.named_parameters()
        if name.endswith(".gate")
    ]
    return [[round(share, 4) for share in layer.tolist()] for layer in found]


@torch.inference_mode()
def measure(
    task: Task, model: Llama, distance: int, count: int = 200
) -> dict[str, Any]:
    """Right answers to `count` questions of other rows than those of the training, each over `distance` segment ends."""
    generator, right = torch.Generator().manual_seed(10_000 + distance), []
    length = (distance + 1) * SEGMENT
    done = 0
    while done < count:
        some = max(1, min(count - done, PIECE // length))
        inputs, labels = task.rows(some, distance + 1, generator, True)
        asked = labels != IGNORE_INDEX
        states, hidden = model.new_states(some, length), torch.zeros(0)
        for piece in inputs.split(PIECE, dim=1):
            # Never cut: PIECE is a multiple of a segment.
            hidden = model.read(piece, states)[:, -SEGMENT:]
        logits = model.lm_head(hidden)
        right.append(
            (logits.argmax(dim=-1) == labels[:, -SEGMENT:])[asked[:, -SEGMENT:]].view(
                -1, task.answer
            )
        )
        done += some
    found = torch.cat(right).float()
    whole = found.all(dim=1).float().mean().item()
    return {
        "distance": distance,
        "rows": count,
        "whole": whole,
        "tokens": [round(x, 4) for x in found.mean(0).tolist()],
    }


def run(name: str, memory: str, seed: int, million: int) -> dict[str, Any]:
    """Trains and measures one model; `million`: rows of a million tokens."""
    task, started = TASKS[name], time.process_time()
    if memory == "local":  # it is at chance from the first step on
        task = replace(task, recipe=replace(task.recipe, steps=task.recipe.steps // 6))
    model, curve = train(task, MEMORIES[memory], seed)
    result = {
        "task": name,
        "memory": memory,
        "seed": seed,
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    result |= {
        "recipe": asdict(task.recipe),
        "curve": curve,
        "model": model.config.to_dict(),
        "gates": gates(model),
    }
    result["found"] = [
        measure(task, model, distance)
        for distance in LENGTHS
        if distance >= task.nearest
    ]
    if memory != "local":
        if million:
            result["found"].append(measure(task, model, LONGEST - 1, million))
        model.use_memory(False)
        result["memory_off"] = [
            measure(task, model, distance) for distance in (task.nearest, 8, 32)
        ]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--memories", nargs="+", choices=MEMORIES, default=["linear", "local"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--million",
        type=int,
        default=4,
        help="rows of a million tokens per model; 0: none",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="models that are trained at a time, with a core each",
    )
    parser.add_argument(
        "--tables",
        action="store_true",
        help="only write the tables and the plot of the pages again",
    )
    options = parser.parse_args()
    if options.tables:
        for page in PAGES:
            page.write_text(
                with_tables(page.read_text(encoding="utf-8")), encoding="utf-8"
            )
        draw()
        return
    with ProcessPoolExecutor(
        options.workers, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        wanted = [
            (name, memory, seed)
            for name in options.tasks
            for seed in options.seeds
            for memory in options.memories
        ]
        for done in as_completed(
            [pool.submit(run, *one, options.million) for one in wanted]
        ):
            result = done.result()
            store("memory", result, ("task", "memory", "seed"))
            words = ", ".join(
                f"{found['distance']}: {found['whole']:.2f}"
                for found in result["found"]
            )
            about = f"{result['task']}, {result['memory']}, seed {result['seed']}"
            print(
                f"{about}, {result['cpu_seconds']:.0f} s of a core: {words}", flush=True
            )


if __name__ == "__main__":
    main()
