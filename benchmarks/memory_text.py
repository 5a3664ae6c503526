"""Does the memory help on real text? Bits per byte of long documents by segment index, with the memory, without it, and of local attention.

    .venv/bin/python benchmarks/memory_text.py [--models delta_bounded linear local] [--seeds 0 1 2]

Documents: Python's own standard library without its tests. A document is a source file, or all files of a package in the order of their
names, of at least a row's length. Every tenth document is held out. Tokens are bytes, so a loss is bits per byte without a tokenizer.

All models have the same size, texts, batches and rates. A row of a batch begins at a random byte of a random document; the row's
documents are not mixed. They are measured on rows of held-out documents, eight times as long, by segment. Results are added to
benchmarks/results/memory_text.json after each model; `benchmarks/memory.py --tables` writes their table.
"""

import argparse
import json
import math
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from memory import gates
from memory_results import store

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama, parameter_groups

# Tests, tables.
LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
MEASURED_ROWS = 40
MODELS: dict[str, dict[str, Any]] = {
    "linear": {"attention": "infini", "memory_update": "linear"},
    "delta_bounded": {"attention": "infini", "memory_update": "delta_bounded"},
    "local": {"attention": "local"},
}


@dataclass(frozen=True)
class Recipe:
    """Sizes and rates of every model. segments: of a row in training, and `measured` ones of a row that is measured."""

    segment: int = 64
    segments: int = 8
    measured: int = 64
    rows: int = 4
    steps: int = 1200
    hidden_size: int = 64
    layers: int = 2
    heads: int = 2
    head_dim: int | None = 64
    learning_rate: float = 3e-3
    gate_learning_rate: float = 0.003
    weight_decay: float = 0.1
    warmup: int = 100
    decay: float = 0.3  # of the steps

    @property
    def length(self) -> int:
        return self.segment * self.segments


def documents(least: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Training and held-out documents as bytes, each of at least `least`."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[bytes] = []
    for path in sorted(root.iterdir()):
        files = (
            sorted(path.rglob("*.py"))
            if path.is_dir() and path.name not in LEFT_OUT
            else [path]
        )
        kept = [
            file
            for file in files
            if file.suffix == ".py" and not LEFT_OUT & set(file.relative_to(root).parts)
        ]
        found.append(b"\n".join(file.read_bytes() for file in kept))
    long = [
        torch.frombuffer(bytearray(one), dtype=torch.uint8)
        for one in found
        if len(one) > least
    ]
    return [one for at, one in enumerate(long) if at % 10], long[::10]


def batch(
    texts: list[torch.Tensor], recipe: Recipe, generator: torch.Generator
) -> torch.Tensor:
    """Rows [rows, length + 1] at random places; a document is drawn in proportion to its bytes."""
    sizes = torch.tensor([float(len(one) - recipe.length) for one in texts])
    chosen = torch.multinomial(
        sizes, recipe.rows, replacement=True, generator=generator
    ).tolist()
    starts = [
        int(torch.randint(len(texts[one]) - recipe.length, (), generator=generator))
        for one in chosen
    ]
    rows = [
        texts[one][start : start + recipe.length + 1]
        for one, start in zip(chosen, starts, strict=True)
    ]
    return torch.stack(rows).long()


def train(
    name: str, recipe: Recipe, seed: int, texts: list[torch.Tensor]
) -> tuple[Llama, list[dict[str, Any]]]:
    """A model and its training losses and gates on the way."""
    torch.manual_seed(seed)
    model = Llama(
        LlamaConfig(
            vocab_size=256,
            hidden_size=recipe.hidden_size,
            intermediate_size=3 * recipe.hidden_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            head_dim=recipe.head_dim,
            max_position_embeddings=recipe.length,
            segment_length=recipe.segment,
            initializer_range=0.05,
            **MODELS[name],
        )
    )
    groups = parameter_groups(model, recipe.weight_decay)
    peaks = [
        recipe.gate_learning_rate if group["name"] == "gates" else recipe.learning_rate
        for group in groups
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    generator, curve, spent = torch.Generator().manual_seed(seed), [], 0.0
    for step in range(recipe.steps):
        left = (recipe.steps - step) / (recipe.decay * recipe.steps)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / recipe.warmup, left)
        rows = batch(texts, recipe, generator)
        total, count = model.loss(rows[:, :-1], rows[:, 1:])
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent += float(total.detach() / count) / math.log(2)
        if (step + 1) % 100 == 0:
            curve.append(
                {
                    "step": step + 1,
                    "bits_per_byte": round(spent / 100, 4),
                    "gates": gates(model),
                }
            )
            print(f"  {name} seed {seed} {json.dumps(curve[-1])}", flush=True)
            spent = 0.0
    return model.eval(), curve


@torch.inference_mode()
def by_segment(model: Llama, texts: list[torch.Tensor], recipe: Recipe) -> list[float]:
    """Bits per byte of each segment of a row, over the first MEASURED_ROWS rows that the documents' beginnings have."""
    length = recipe.segment * recipe.measured
    starts = [
        (one, start)
        for one in texts
        for start in range(0, len(one) - length - 1, length)
    ]
    chosen = starts[:: max(1, len(starts) // MEASURED_ROWS)][:MEASURED_ROWS]
    sums = torch.zeros(recipe.measured, dtype=torch.float64)
    for one, start in chosen:
        row = one[None, start : start + length + 1].long()
        nats = F.cross_entropy(model(row[:, :-1])[0], row[0, 1:], reduction="none")
        sums += nats.double().view(recipe.measured, recipe.segment).sum(1)
    return (sums / math.log(2) / recipe.segment / len(chosen)).tolist()


def run(name: str, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Trains and measures one model."""
    trained_on, held_out = documents(recipe.length)
    measured_on = [
        one for one in held_out if len(one) > recipe.segment * recipe.measured + 1
    ]
    started = time.process_time()
    model, curve = train(name, recipe, seed, trained_on)
    result = {
        "model": name,
        "seed": seed,
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    result |= {
        "recipe": asdict(recipe),
        "curve": curve,
        "parameters": sum(one.numel() for one in model.parameters()),
    }
    result["bits_per_byte"] = by_segment(model, measured_on, recipe)
    if MODELS[name]["attention"] == "infini":
        model.use_memory(False)
        result["memory_off"] = by_segment(model, measured_on, recipe)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["delta_bounded", "local"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for name in options.models:
            result = run(name, Recipe(), seed)
            store("memory_text", result, ("model", "seed", "recipe"))
            first, *later = result["bits_per_byte"]
            mean = sum(later) / len(later)
            print(
                f"{name}, seed {seed}, {result['cpu_seconds']:.0f} s: first segment {first:.3f}, later {mean:.3f}"
            )


if __name__ == "__main__":
    main()
