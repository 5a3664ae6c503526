"""Results of the memory's benchmarks: stored after each model; the tables and the plot of the pages about Infini-attention."""

import fcntl
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).with_name("results")
DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    DOCS / "infini-attention.md",
    DOCS / "infini-attention-results.md",
    FOLDER / "README.md",
]
PLOT = DOCS / "images" / "passkey-by-distance.svg"
# Thousand tokens, % found: table 3, linear, start, fine-tuned.
PAPER = (
    (32, 100),
    (128, 100),
    (256, 100),
    (512, 97),
    (1024, 96),
)
# Of `evaluate --passkey`, by their names in its records.
CONTROLS = {
    "swapped_other": "another text's memory: its number",
    "swapped_own": "another text's memory: own number",
    "filler_alone": "filler's memory: own number",
}


def store(name: str, result: dict[str, Any], same: tuple[str, ...]) -> None:
    """Adds a result to results/NAME.json, in place of an earlier one with equal fields `same`; one process at a time."""
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    facts = {"machine": machine, "torch": torch.__version__, "load": os.getloadavg()}
    with (FOLDER / f"{name}.json").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        stored = json.loads(file.read() or '{"results": []}')["results"]
        kept = [
            old
            for old in stored
            if any(old.get(field) != result[field] for field in same)
        ]
        file.truncate(0)
        file.write(json.dumps({"results": [*kept, result | facts]}, indent=1) + "\n")


def results(name: str) -> list[dict[str, Any]]:
    path = FOLDER / f"{name}.json"
    return (
        json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    )


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def span(values: Iterable[float], digits: int = 2) -> str:
    """Mean of several seeds with the lowest and highest; nothing for none."""
    found = sorted(values)
    if not found:
        return ""
    mean, low, high = (
        f"{value:.{digits}f}"
        for value in (sum(found) / len(found), found[0], found[-1])
    )
    return mean if low == high else f"{mean} ({low}–{high})"


def groups(
    found: list[dict[str, Any]], *fields: str
) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Results by the values of fields, in the order in which they are stored."""
    grouped: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in found:
        grouped.setdefault(tuple(one[field] for field in fields), []).append(one)
    return grouped


def distances() -> str:
    """Whole answers by task, memory and number of segment boundaries; passkeys and recall have tables of their own."""
    stored = [
        one
        for one in results("memory")
        if one["task"] not in ("passkey", "recall") and one["memory"] != "local"
    ]
    rows = []
    for (task, memory), seeds in groups(stored, "task", "memory").items():
        cells = [cells_at(seeds, "found", distance) for distance in SHOWN_DISTANCES]
        rows.append(
            [task, memory, str(len(seeds)), *cells, cells_at(seeds, "memory_off", 8)]
        )
    return markdown(
        ["task", "memory", "seeds", *map(str, SHOWN_DISTANCES), "8, memory off"], rows
    )


SHOWN_DISTANCES = (2, 8, 32, 64, 256)


def cells_at(seeds: list[dict[str, Any]], kind: str, distance: int) -> str:
    """Whole answers of several seeds at one distance."""
    return span(
        cell["whole"]
        for one in seeds
        for cell in one[kind]
        if cell["distance"] == distance
    )


PARTS = ((0, 1), (1, 2), (4, 8), (32, 64))  # segments of one column
TEXT_STEPS = 1200  # of the recipe that is shown


def text() -> str:
    """Bits per byte of held-out documents by segment and model, and what a memory saves against local attention."""
    stored = [
        one for one in results("memory_text") if one["recipe"]["steps"] == TEXT_STEPS
    ]
    local = {
        one["seed"]: one["bits_per_byte"] for one in stored if one["model"] == "local"
    }
    rows: list[list[str]] = []
    for (model,), seeds in groups(stored, "model").items():
        lines = [one["bits_per_byte"] for one in seeds]
        rows.append([model, *(span(means(lines, part), 3) for part in PARTS)])
        if model == "local":
            continue
        off = [one["memory_off"] for one in seeds]
        rows.append(
            [f"{model}, memory off", *(span(means(off, part), 3) for part in PARTS)]
        )
        rows.append([f"{model}: % less than off", *saved(lines, off)])
        rows.append(
            [
                f"{model}: % less than local",
                *saved(lines, [local[one["seed"]] for one in seeds]),
            ]
        )
    heads = (f"{a + 1}" if b == a + 1 else f"{a + 1}–{b}" for a, b in PARTS)
    return markdown(["model", *heads], rows)


def saved(own: list[list[float]], other: list[list[float]]) -> list[str]:
    """By how many percent the means of each part are below the other's of the same seed."""
    pairs = (zip(means(own, part), means(other, part), strict=True) for part in PARTS)
    return [
        span((100 * (1 - ours / theirs) for ours, theirs in pair), 1) for pair in pairs
    ]


def means(lines: Iterable[list[float]], part: tuple[int, int]) -> list[float]:
    """Mean over the segments of a part, of each line."""
    return [sum(line[slice(*part)]) / len(line[slice(*part)]) for line in lines]


def capacity() -> str:
    """Right answers by update, head size and number of facts."""
    stored = results("memory_capacity")
    facts = sorted({cell["facts"] for one in stored for cell in one["found"]})
    rows = [
        [update, str(size), str(2 * int(size) ** 2), str(len(seeds))]
        + [
            span(
                cell["right"]
                for one in seeds
                for cell in one["found"]
                if cell["facts"] == count
            )
            for count in facts
        ]
        for (update, size), seeds in groups(stored, "update", "head_dim").items()
    ]
    return markdown(
        [
            "update",
            "head_dim",
            "numbers in M",
            "seeds",
            *(f"{count} facts" for count in facts),
        ],
        rows,
    )


def pairs() -> str:
    """What one change of the recipe of `pairs` does: both tokens of the value, and at 8 boundaries each of them."""
    rows = []
    for one in results("memory_pairs"):
        whole = [f"{cell['whole']:.2f}" for cell in one["found"]]
        (at_8,) = (cell for cell in one["found"] if cell["distance"] == 8)
        rows.append(
            [one["variant"], *(f"{digit:.2f}" for digit in at_8["tokens"]), *whole]
        )
    ends = [cell["distance"] for cell in results("memory_pairs")[0]["found"]]
    return markdown(
        ["change", "first, 8", "second, 8", *(f"both, {end}" for end in ends)], rows
    )


def passkeys() -> list[dict[str, Any]]:
    """What `memory_passkey.py` measured, in one order whatever was measured first."""
    order = [
        ("linear", "delta", "delta_bounded"),
        ("random", "repeated"),
        ("start", "middle", "end"),
    ]

    def place_of(one: dict[str, Any]) -> list[int]:
        return [
            names.index(one[field])
            for names, field in zip(order, ("update", "filler", "place"), strict=True)
        ]

    return sorted(results("memory_passkey"), key=place_of)


def reach() -> str:
    """Numbers found by update and filler: by number of segment boundaries, and by place in a text of a million tokens.

    Fillers with equal results share a row.
    """
    fillers: dict[tuple[str, ...], list[str]] = {}
    for (update, filler), stored in groups(passkeys(), "update", "filler").items():
        start, *_ = places = list(groups(stored, "place").values())
        near = [
            span(
                cell["whole"]
                for one in start
                for cell in one["found"]
                if cell["boundaries"] == end
            )
            for end in SHOWN_BOUNDARIES
        ]
        far = [
            span(one["found"][-1]["whole"] for one in measured) for measured in places
        ]
        fillers.setdefault((update, *near, *far), []).append(filler)
    rows = [
        [update, " or ".join(fillers[update, *found]), *found]
        for update, *found in fillers
    ]
    places = ("1M, start", "1M, middle", "1M, end")
    return markdown(
        ["update", "filler", *(f"{end:,}" for end in SHOWN_BOUNDARIES), *places], rows
    )


SHOWN_BOUNDARIES = (1, 64, 1024)
SHOWN_COLUMNS = ("0", "1", "64", "4,096", "1M, depth 0", "1M, depth 0.5")


def pipeline() -> str:
    """What `evaluate --passkey` finds of the numbers of configs/passkey.yaml: by number of boundaries, and at a million tokens."""
    lines = (FOLDER / "passkey-config.jsonl").read_text(encoding="utf-8").splitlines()
    stored = [one for one in map(json.loads, lines) if one["step"] == 6000]
    kinds: dict[str, dict[str, list[float]]] = {}
    for one in stored:
        for found, off in zip(one["memory"], one["no_memory"], strict=True):
            column = (
                f"{found['boundaries']:,}"
                if found.get("depth") is None
                else f"1M, depth {found['depth']:g}"
            )
            kinds.setdefault("own memory: own number", {}).setdefault(
                column, []
            ).append(found["found"])
            for name, words in CONTROLS.items():
                kinds.setdefault(words, {}).setdefault(column, []).append(
                    found["controls"][name]
                )
            kinds.setdefault("no memory: own number", {}).setdefault(column, []).append(
                off["found"]
            )
    rows = [
        [words, *(span(cells[column]) for column in SHOWN_COLUMNS)]
        for words, cells in kinds.items()
    ]
    return markdown(["", *SHOWN_COLUMNS], rows)


def draw() -> None:
    """The plot of numbers found by distance."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "infini-llama", "font.size": 9}
    figure, axes = plt.subplots(figsize=(7, 4))
    lines: dict[str, dict[int, list[float]]] = {}
    for one in passkeys():
        if (one["place"], one["filler"]) == ("start", "random"):
            line = lines.setdefault(
                f"{one['update'].replace('_', ' ')}, growing jitter", {}
            )
            for cell in one["found"]:
                line.setdefault(16 * cell["boundaries"], []).append(100 * cell["whole"])
    for one in results("memory"):
        if one["task"] == "passkey":
            line = lines.setdefault(
                one["memory"].replace("local", "local attention alone"), {}
            )
            for cell in one["found"]:
                if cell["distance"] in (1, 8, 64, 256) or cell["distance"] > 256:
                    line.setdefault(16 * cell["distance"], []).append(
                        100 * cell["whole"]
                    )
    for (label, line), marker in zip(lines.items(), "oD^vs", strict=False):
        points = sorted(line.items())
        axes.plot(
            [x for x, _ in points],
            [sum(y) / len(y) for _, y in points],
            marker=marker,
            ms=4,
            label=label,
        )
    tokens, found = zip(*PAPER, strict=True)
    axes.plot(
        [1000 * x for x in tokens],
        found,
        "k--x",
        ms=5,
        label="paper, 1B model, linear, fine-tuned at 5K tokens",
    )
    axes.axvspan(16, 112, color="0.9", lw=0, label="distances of our training")
    axes.set(
        xscale="log",
        ylim=(-3, 104),
        xlabel="tokens between number and question",
        ylabel="numbers found, %",
    )
    axes.legend(
        fontsize=7.5,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=2,
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})
    plt.close(figure)


TABLES = {
    "pipeline": pipeline,
    "reach": reach,
    "distances": distances,
    "text": text,
    "capacity": capacity,
    "pairs": pairs,
}


def with_tables(page: str) -> str:
    """The text of a page with the stored results between its comments <!-- table: NAME --> and <!-- end -->."""
    for name, table in TABLES.items():
        start, end = f"<!-- table: {name} -->\n", "\n<!-- end -->"
        before, found, rest = page.partition(start)
        if found:
            page = f"{before}{start}\n{table()}\n{end}{rest.partition(end)[2]}"
    return page
