"""Does the memory remember, and how far? Passkey and recall by the number of segment ends between a fact and its question.

    .venv/bin/python benchmarks/memory.py [--tasks passkey recall pairs] [--seeds 3] [--memories jitter linear …]

passkey: five ordered digits behind a mark in one earlier segment, and a question for them in the last one (chance: 1 in 100,000).
recall: six facts of one token each, (key, value), at random places; the six keys are asked for in the last segment (chance 1 in 16).
pairs: three facts of two key tokens and two value tokens; one is asked for (chance of a whole value: 1 in 100).

Rows have segments of 16 tokens, of which the filler is drawn at random, and a fact stands whole inside one segment. All tasks train on
2 to 8 segments, recall on 4, with the loss on the answers alone. Each length is a distance: the fact is in the first segment (of recall:
in all but the last) and the answer in the last. Each model is measured with its memory, and the same weights without it; `local` is
attention inside a segment alone. Results are added to benchmarks/results/memory.json after each model.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama, parameter_groups
from infini_llama.model.loss import IGNORE_INDEX

SEGMENT, FILLERS, DIGITS = 16, 20, 10
RESULTS = Path(__file__).with_name("results") / "memory.json"
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 256)  # segment ends crossed
LONGEST = 1_000_000 // SEGMENT
PIECE = 16_384  # tokens of the longest rows that are read at a time
MEMORIES: dict[str, dict[str, Any]] = {
    "jitter": {"attention": "infini", "memory_write_jitter": 32.0},
    "linear": {"attention": "infini"},
    "delta_bounded": {"attention": "infini", "memory_update": "delta_bounded"},
    "delta_bounded jitter": {"attention": "infini", "memory_update": "delta_bounded", "memory_write_jitter": 32.0},
    "local": {"attention": "local"},
}
Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a task is trained. segments: fewest and most of a row; tokens: of a batch; the rates are peaks of a warm-up and linear decay."""

    segments: tuple[int, int] = (2, 8)
    steps: int = 4000
    tokens: int = 2048
    learning_rate: float = 3e-3
    gate_learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 100
    decay: float = 0.3  # of the steps


@dataclass(frozen=True)
class Task:
    """Rows of one kind; `answer`: tokens that belong together and are right as a whole or not."""

    rows: Callable[[int, int, torch.Generator, bool], Rows]
    vocabulary: int
    answer: int
    recipe: Recipe


def draw(generator: torch.Generator, count: int, of: int, taken: int) -> torch.Tensor:
    """Different numbers below `of`, [count, taken], in random order."""
    return torch.rand(count, of, generator=generator).argsort(dim=1)[:, :taken]


def passkey_rows(count: int, segments: int, generator: torch.Generator, far: bool) -> Rows:
    """Inputs and labels [count, segments * SEGMENT]; with `far` the number is in the first segment, else in any but the last."""
    key, question, size = FILLERS + DIGITS, FILLERS + DIGITS + 1, 5
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    digits = FILLERS + torch.randint(DIGITS, (count, size), generator=generator)
    segment = torch.randint(1 if far else segments - 1, (count, 1), generator=generator)
    places, each = torch.randint(SEGMENT - size, (2, count, 1), generator=generator), torch.arange(size)
    hidden, asked = segment * SEGMENT + places[0], (segments - 1) * SEGMENT + places[1]
    for mark, start in ((key, hidden), (question, asked)):
        inputs.scatter_(1, start, mark)
        inputs.scatter_(1, start + 1 + each, digits)
    labels.scatter_(1, asked + each, digits)
    return inputs, labels


def recall_rows(count: int, segments: int, generator: torch.Generator, far: bool) -> Rows:
    """As `passkey_rows`, of facts (key, value) as one token each; with `far` they are in the first segment, else in all but the last."""
    keys, values, facts = 16, 16, 6
    first_fact = FILLERS
    first_query = first_fact + keys * values
    first_answer = first_query + keys
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    key, value = draw(generator, count, keys, facts), torch.randint(values, (count, facts), generator=generator)
    where = draw(generator, count, SEGMENT if far else (segments - 1) * SEGMENT, facts)
    inputs.scatter_(1, where, first_fact + key * values + value)
    asked = (segments - 1) * SEGMENT + draw(generator, count, SEGMENT, facts)
    inputs.scatter_(1, asked, first_query + key)
    labels.scatter_(1, asked, first_answer + value)
    return inputs, labels


def pairs_rows(count: int, segments: int, generator: torch.Generator, far: bool) -> Rows:
    """As `passkey_rows`, of three facts (mark, two of four letters, two digits), of which one is asked for.

    A fact has one of three places in its segment, so that two facts of one segment do not overlap.
    """
    letters, facts, size = 4, 3, 5
    first_letter = FILLERS + DIGITS
    key, question = first_letter + letters, first_letter + letters + 1
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    names = draw(generator, count, letters * letters, facts)
    digits = FILLERS + torch.randint(DIGITS, (count, facts, 2), generator=generator)
    names = first_letter + torch.stack((names // letters, names % letters), dim=2)
    content = torch.cat((torch.full((count, facts, 1), key), names, digits), dim=2)  # [count, facts, size]
    places = draw(generator, count, 3 if far else 3 * (segments - 1), facts)
    starts = (places // 3 * SEGMENT + places % 3 * size + torch.randint(2, (count, 1), generator=generator))[..., None]
    inputs.scatter_(1, (starts + torch.arange(size)).flatten(1), content.flatten(1))
    asked = (segments - 1) * SEGMENT + torch.randint(SEGMENT - size + 1, (count, 1), generator=generator)
    query = content[:, 0].clone()  # which of the facts is first is random
    query[:, 0] = question
    inputs.scatter_(1, asked + torch.arange(size), query)
    labels.scatter_(1, asked + 2 + torch.arange(2), digits[:, 0])
    return inputs, labels


TASKS = {
    "passkey": Task(passkey_rows, FILLERS + DIGITS + 2, 5, Recipe()),
    "recall": Task(recall_rows, FILLERS + 16 * 16 + 32, 1, Recipe(segments=(4, 4), steps=600, decay=0.2)),
    "pairs": Task(pairs_rows, FILLERS + DIGITS + 6, 2, Recipe()),
}


def train(task: Task, memory: str, seed: int) -> tuple[Llama, list[dict[str, Any]]]:
    """A model of two layers, width 64, two heads, and what was measured every 250 steps."""
    torch.manual_seed(seed)
    recipe, size = task.recipe, {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    config = LlamaConfig(
        task.vocabulary,
        **size,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=recipe.segments[1] * SEGMENT,
        segment_length=SEGMENT,
        initializer_range=0.1,
        tie_word_embeddings=False,
        **MEMORIES[memory],
    )
    model = Llama(config)
    groups = parameter_groups(model, recipe.weight_decay)
    peaks = [recipe.gate_learning_rate if group["name"] == "gates" else recipe.learning_rate for group in groups]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    generator, curve = torch.Generator().manual_seed(seed), []
    for step in range(recipe.steps):
        left = (recipe.steps - step) / (recipe.decay * recipe.steps)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / recipe.warmup, left)
        segments = int(torch.randint(recipe.segments[0], recipe.segments[1] + 1, (), generator=generator))
        total, count = model.loss(*task.rows(recipe.tokens // (segments * SEGMENT), segments, generator, False))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 250 == 0:
            model.eval()
            found = measure(task, model, recipe.segments[1] - 1, count=128)
            model.train()
            curve.append({"step": step + 1, "whole": found["whole"], "gates": gates(model)})
            print(f"  {memory} seed {seed} step {step + 1}: {found['whole']:.3f} {curve[-1]['gates']}", flush=True)
    return model.eval(), curve


def gates(model: Llama) -> list[list[float]]:
    """Share of the memory in each head's output, by layer."""
    found = [parameter.sigmoid() for name, parameter in model.named_parameters() if name.endswith(".gate")]
    return [[round(share, 4) for share in layer.tolist()] for layer in found]


@torch.inference_mode()
def measure(task: Task, model: Llama, distance: int, count: int = 200) -> dict[str, Any]:
    """Right answers to `count` questions of other rows than those of the training, each over `distance` segment ends."""
    generator, right = torch.Generator().manual_seed(10_000 + distance), []
    length = (distance + 1) * SEGMENT
    done = 0
    while done < count:
        some = max(1, min(count - done, PIECE // length))
        inputs, labels = task.rows(some, distance + 1, generator, True)
        asked = labels != IGNORE_INDEX
        states, hidden = model.new_states(some, length), []
        for piece in inputs.split(PIECE, dim=1):
            hidden = [
                model.read(piece, states)[:, -SEGMENT:]
            ]  # the last segment is never cut: PIECE is a multiple of it
        logits = model.lm_head(hidden[-1])
        right.append((logits.argmax(dim=-1) == labels[:, -SEGMENT:])[asked[:, -SEGMENT:]].view(-1, task.answer))
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
    model, curve = train(task, memory, seed)
    result = {"task": name, "memory": memory, "seed": seed, "cpu_seconds": round(time.process_time() - started, 1)}
    result |= {"recipe": asdict(task.recipe), "curve": curve, "model": model.config.to_dict(), "gates": gates(model)}
    result["found"] = [measure(task, model, distance) for distance in LENGTHS]
    if memory != "local":
        if million:
            result["found"].append(measure(task, model, LONGEST - 1, million))
        model.use_memory(False)
        result["memory_off"] = [measure(task, model, distance) for distance in (1, 8, 32)]
    return result


def store(result: dict[str, Any]) -> None:
    """Adds the result, in place of an earlier one of the same task, memory and seed."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"results": []}
    same = ("task", "memory", "seed")
    kept = [old for old in stored["results"] if any(old[name] != result[name] for name in same)]
    machine = {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    facts = {"machine": machine, "torch": torch.__version__, "load": os.getloadavg()}
    RESULTS.write_text(json.dumps({"results": [*kept, result | facts]}, indent=1) + "\n", encoding="utf-8")


def table() -> str:
    """The stored results as Markdown: whole answers by distance, lowest and highest of the seeds."""
    stored, lines = json.loads(RESULTS.read_text(encoding="utf-8"))["results"], []
    shown = [*LENGTHS, LONGEST - 1]
    lines.append("| task, model | seeds | " + " | ".join(f"{distance:,}" for distance in shown) + " |")
    lines.append("|---" * (len(shown) + 2) + "|")
    for task, memory in dict.fromkeys((result["task"], result["memory"]) for result in stored):
        seeds = [result for result in stored if (result["task"], result["memory"]) == (task, memory)]
        for kind, words in (("found", memory), ("memory_off", f"{memory}, memory off")):
            cells = []
            for distance in shown:
                values = [cell["whole"] for one in seeds for cell in one.get(kind, []) if cell["distance"] == distance]
                low, high = (f"{value:.2f}" for value in (min(values), max(values))) if values else ("", "")
                cells.append(low if low == high else f"{low}–{high}")
            if any(cells):
                lines.append(f"| {task}, {words} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--memories", nargs="+", choices=MEMORIES, default=["jitter", "local"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--million", type=int, default=4, help="rows of a million tokens per model; 0: none")
    parser.add_argument("--table", action="store_true", help="only print the stored results as Markdown")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    torch.set_num_threads(1)
    for name in options.tasks:
        for seed in options.seeds:
            for memory in options.memories:
                result = run(name, memory, seed, options.million)
                store(result)
                words = ", ".join(f"{found['distance']}: {found['whole']:.2f}" for found in result["found"])
                print(f"{name}, {memory}, seed {seed}, {result['cpu_seconds']:.0f} s of a core: {words}", flush=True)


if __name__ == "__main__":
    main()
