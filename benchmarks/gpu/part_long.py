"""Long documents: a model of 125M parameters is trained at 4,096 bytes and measured to 131,072, with its memory and without it.

The programs are those of benchmarks/memory_text.py: the documents are packages of Python's site-packages, their tokens are bytes, and
losses are bits per byte by segment of 512. Four models of 9 minutes each: `--part long --minutes 40`, or one call per case.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from case import Case, Row

sys.path.insert(0, str(Path(__file__).parents[1]))
from memory_text import MODELS, Recipe, by_segment, documents, train

SHAPE = {"hidden_size": 768, "layers": 12, "heads": 6, "head_dim": 128}
RECIPE = Recipe(512, 8, 256, 16, 1500, **SHAPE, learning_rate=6e-4, warmup=150)
TINY = Recipe(16, 4, 8, 2, 3, hidden_size=32, layers=1, head_dim=16, warmup=1)
PARTS = (
    (0, 1),
    (1, 2),
    (2, 4),
    (4, 8),
    (8, 32),
    (32, 128),
    (128, 256),
)  # segments of one row of the table


def long(name: str, device: str, rehearse: bool) -> list[Row]:
    """Bits per byte by segment; both of them for a model that has a memory."""
    recipe = TINY if rehearse else RECIPE
    trained_on, held_out = documents(recipe.length, "stdlib" if rehearse else "purelib")
    model, curve = train(name, recipe, 0, trained_on, device)
    most = 2 if rehearse else 32
    found = {"bits per byte": by_segment(model, held_out, recipe, most)}
    if MODELS[name]["attention"] == "infini":
        model.use_memory(False)
        found["memory off"] = by_segment(model, held_out, recipe, most)
    rows: list[Row] = []
    for first, last in ((a, b) for a, b in PARTS if a < recipe.measured):
        row: Row = {"model": name, "segments": f"{first + 1} to {last}"}
        rows.append(
            row
            | {
                words: sum(values[first:last]) / len(values[first:last])
                for words, values in found.items()
            }
        )
    rows[0]["bits per byte in training"] = curve[-1]["bits_per_byte"] if curve else None
    rows[0]["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    torch.cuda.empty_cache()
    return rows


CASES = {
    name: Case(partial(long, name), 540) for name in ("delta_bounded", "local", "linear", "full")
}
