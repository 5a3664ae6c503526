"""A pairwise cover: few cells in which every two settings of every two factors meet (Cohen et al. 1997, the AETG system)."""

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

Cell = dict[str, Any]
Pair = tuple[str, Any, str, Any]

FACTORS: dict[str, tuple] = {
    "world": (1, 2, 4),
    "parallel": ("ddp", "fsdp"),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer": ("adamw", "muon"),
    "attention": ("softmax", "infini"),
    "dropout": (0.0, 0.1),
    "accumulation": (1, 4),
    "compile": ("off", "block"),
    "save": ("sync", "async"),
    "resumed": (1, 2),
    "epoch": ("within", "across"),
}

# All that makes a CPU faster, together: these are beside the cover, whose factors would multiply.
FAST = {
    "world": 1,
    "parallel": "ddp",
    "compile": "whole",
    "backend": "blocked",
    "chunk": 40,
    "dropout": 0.0,
}
FAST |= {"resumed": 1, "epoch": "within", "save": "async"}
WHOLE: list[tuple[str, Cell]] = [
    (
        "whole-fp32",
        FAST | {"precision": "fp32", "attention": "softmax", "accumulation": 1},
    ),
    (
        "whole-bf16",
        FAST | {"precision": "bf16", "attention": "infini", "accumulation": 4},
    ),
]


def possible(cell: Cell) -> bool:
    """One worker holds everything, whatever the strategy; Muon needs whole matrices."""
    return cell["parallel"] == "ddp" or (
        cell["world"] > 1 and cell["optimizer"] != "muon"
    )


def pairs_of(cell: Cell) -> set[Pair]:
    return {(a, cell[a], b, cell[b]) for a, b in combinations(sorted(cell), 2)}


def pairwise_cover(
    factors: dict[str, tuple], allowed: Callable[[Cell], bool]
) -> list[Cell]:
    """Greedy: the cell with the most pairs not met yet, the first of equals, until all that are possible have met."""
    cells = [
        cell
        for values in product(*factors.values())
        if allowed(cell := dict(zip(factors, values, strict=True)))
    ]
    pairs = [pairs_of(cell) for cell in cells]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cells)), key=lambda index: len(pairs[index] & missing))
        chosen.append(cells[best])
        missing -= pairs[best]
    return chosen


def name_of(cell: Cell) -> str:
    return "-".join(str(value) for value in cell.values())


def each_setting_once(cells: list[tuple[str, Cell]]) -> list[tuple[str, Cell]]:
    """Few of the cells, in which every setting that any of them has is met."""
    missing = {setting for _, cell in cells for setting in cell.items()}
    chosen = []
    while missing:
        best = max(
            cells,
            key=lambda named: (
                len(missing & set(named[1].items())),
                -named[1]["world"],
            ),
        )
        chosen.append(best)
        missing -= set(best[1].items())
    return chosen
