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
PAGES = [DOCS / name for name in ("infini-attention.md", "infini-attention-results.md")]
PLOT = DOCS / "images" / "passkey-by-distance.svg"
PAPER = (
    (32, 100),
    (128, 100),
    (256, 100),
    (512, 97),
    (1024, 96),
)  # thousand tokens, % found: table 3, linear, start, fine-tuned
# Of `evaluate --passkey`, by their names in its records.
CONTROLS = {
    "swapped_other": "another text's memory: its number",
    "swapped_own": "another text's memory: own number",
    "filler_alone": "filler's memory: own number",
}


def store(name: str, result: dict[str, Any], same: tuple[str, ...]) -> None:
    """Adds a result to results/NAME.json, in place of an earlier one with equal fields `same`; one process at a time."""
    machine = {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    facts = {"machine": machine, "torch": torch.__version__, "load": os.getloadavg()}
    with (FOLDER / f"{name}.json").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        stored = json.loads(file.read() or '{"results": []}')["results"]
        kept = [old for old in stored if any(old.get(field) != result[field] for field in same)]
        file.truncate(0)
        file.write(json.dumps({"results": [*kept, result | facts]}, indent=1) + "\n")


def results(name: str) -> list[dict[str, Any]]:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []


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
    mean, low, high = (f"{value:.{digits}f}" for value in (sum(found) / len(found), found[0], found[-1]))
    return mean if low == high else f"{mean} ({low}–{high})"


def groups(found: list[dict[str, Any]], *fields: str) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Results by the values of fields, in the order in which they are stored."""
    grouped: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in found:
        grouped.setdefault(tuple(one[field] for field in fields), []).append(one)
    return grouped


def distances() -> str:
    """Whole answers by task, memory and number of segment ends between a fact and its question."""
    stored = results("memory")
    ends = sorted({cell["distance"] for one in stored for cell in one["found"]})
    shown = [end for end in ends if end in (1, 2, 4, 8) or end > 8]
    rows = []
    for (task, memory), seeds in groups(stored, "task", "memory").items():
        for kind, words in (("found", memory), ("memory_off", f"{memory}, memory off")):
            cells = [
                span(cell["whole"] for one in seeds for cell in one.get(kind, []) if cell["distance"] == end)
                for end in shown
            ]
            if any(cells):
                rows.append([task, words, str(len(seeds)), *cells])
    return markdown(["task", "memory", "seeds", *(f"{end:,}" for end in shown)], rows)


PARTS = ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64))  # segments of one column


def text() -> str:
    """Bits per byte of held-out documents by segment, by recipe and model, and what a memory saves against local attention."""
    rows: list[list[str]] = []
    by_recipe: dict[str, list[dict[str, Any]]] = {}
    for one in results("memory_text"):
        recipe = one["recipe"]
        words = f"{recipe['steps']} steps, gate rate {recipe['gate_learning_rate']}"
        by_recipe.setdefault(words, []).append(one)
    for words, stored in by_recipe.items():
        local = {one["seed"]: one["bits_per_byte"] for one in stored if one["model"] == "local"}
        for (model,), seeds in groups(stored, "model").items():
            lines = [one["bits_per_byte"] for one in seeds]
            off = [one["memory_off"] for one in seeds if "memory_off" in one]
            rows.append([words, model, str(len(seeds)), *(span(means(lines, part), 3) for part in PARTS)])
            if off:
                rows.append(
                    [words, f"{model}, memory off", str(len(off)), *(span(means(off, part), 3) for part in PARTS)]
                )
                rows.append([words, f"{model}: % less than off", str(len(off)), *saved(lines, off)])
            paired = [one for one in seeds if one["seed"] in local]
            if model != "local" and paired:
                own = [one["bits_per_byte"] for one in paired]
                cells = saved(own, [local[one["seed"]] for one in paired])
                rows.append([words, f"{model}: % less than local", str(len(paired)), *cells])
    heads = (f"{a + 1}" if b == a + 1 else f"{a + 1}–{b}" for a, b in PARTS)
    return markdown(["recipe", "model", "seeds", *heads], rows)


def saved(own: list[list[float]], other: list[list[float]]) -> list[str]:
    """By how many percent the means of each part are below the other's of the same seed."""
    pairs = (zip(means(own, part), means(other, part), strict=True) for part in PARTS)
    return [span((100 * (1 - ours / theirs) for ours, theirs in pair), 1) for pair in pairs]


def means(lines: Iterable[list[float]], part: tuple[int, int]) -> list[float]:
    """Mean over the segments of a part, of each line."""
    return [sum(line[slice(*part)]) / len(line[slice(*part)]) for line in lines]


def capacity() -> str:
    """Right answers by update, head size and number of facts."""
    stored = results("memory_capacity")
    facts = sorted({cell["facts"] for one in stored for cell in one["found"]})
    rows = [
        [update, str(size), str(2 * int(size) ** 2), str(len(seeds))]
        + [span(cell["right"] for one in seeds for cell in one["found"] if cell["facts"] == count) for count in facts]
        for (update, size), seeds in groups(stored, "update", "head_dim").items()
    ]
    return markdown(["update", "head_dim", "numbers in M", "seeds", *(f"{count} facts" for count in facts)], rows)


def pairs() -> str:
    """What one change of the recipe of `pairs` does: the first token of the value, the second after it, and both."""
    rows = [
        [one["variant"], *(f"{part:.2f}" for cell in one["found"] for part in (*cell["tokens"], cell["whole"]))]
        for one in results("memory_pairs")
    ]
    ends = [cell["distance"] for cell in results("memory_pairs")[0]["found"]]
    return markdown(["change", *(f"{part}, {end}" for end in ends for part in ("first", "second", "both"))], rows)


def passkeys() -> list[dict[str, Any]]:
    """What `memory_passkey.py` measured, in one order whatever was measured first."""
    order = [("linear", "delta", "delta_bounded"), ("random", "repeated"), ("start", "middle", "end")]

    def place_of(one: dict[str, Any]) -> list[int]:
        return [names.index(one[field]) for names, field in zip(order, ("update", "filler", "place"), strict=True)]

    return sorted(results("memory_passkey"), key=place_of)


def reach() -> str:
    """Numbers found by update, filler and number of segment boundaries."""
    stored = passkeys()
    ends = sorted({cell["boundaries"] for one in stored if one["place"] == "start" for cell in one["found"]})
    rows = []
    for (update, filler), seeds in groups(
        [one for one in stored if one["place"] == "start"], "update", "filler"
    ).items():
        cells = [
            span(cell["whole"] for one in seeds for cell in one["found"] if cell["boundaries"] == end) for end in ends
        ]
        rows.append([update, filler, str(len(seeds)), *cells])
    return markdown(["update", "filler", "seeds", *(f"{end:,}" for end in ends)], rows)


def controls() -> str:
    """What is answered with another memory, by update and filler."""
    stored = [one for one in passkeys() if one.get("controls")]
    names = list(stored[0]["controls"])
    rows = [
        [update, filler, str(len(seeds)), *(span(one["controls"][name] for one in seeds) for name in names)]
        for (update, filler), seeds in groups(stored, "update", "filler").items()
    ]
    return markdown(["update", "filler", "seeds", *names], rows)


def places() -> str:
    """Numbers found in a text of a million tokens, by place."""
    rows = []
    for (update, filler), stored in groups(passkeys(), "update", "filler").items():
        seeds = {one["seed"] for one in stored}
        by_place = groups(stored, "place").values()
        cells = [span(one["found"][-1]["whole"] for one in measured) for measured in by_place]
        rows.append([update, filler, str(len(seeds)), *cells])
    return markdown(["update", "filler", "seeds", "start", "middle", "end"], rows)


def pipeline() -> str:
    """What `evaluate --passkey` finds of the numbers of configs/passkey.yaml: by number of boundaries, and at a million tokens."""
    lines = (FOLDER / "passkey-config.jsonl").read_text(encoding="utf-8").splitlines()
    stored = [one for one in map(json.loads, lines) if one["step"] == 6000]
    kinds: dict[str, dict[str, list[float]]] = {}
    for one in stored:
        for found, off in zip(one["memory"], one["no_memory"], strict=True):
            column = f"{found['boundaries']:,}" if found.get("depth") is None else f"1M, depth {found['depth']:g}"
            kinds.setdefault("own memory: own number", {}).setdefault(column, []).append(found["found"])
            for name, words in CONTROLS.items():
                kinds.setdefault(words, {}).setdefault(column, []).append(found["controls"][name])
            kinds.setdefault("no memory: own number", {}).setdefault(column, []).append(off["found"])
    columns = list(next(iter(kinds.values())))
    rows = [[words, *(span(cells[column]) for column in columns)] for words, cells in kinds.items()]
    return markdown(["", *columns], rows)


def draw() -> None:
    """The plot of numbers found by distance."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "infini-llama", "font.size": 9}
    figure, axes = plt.subplots(figsize=(7, 4))
    lines: dict[str, dict[int, list[float]]] = {}
    for one in passkeys():
        if (one["place"], one["filler"]) == ("start", "random"):
            line = lines.setdefault(f"{one['update'].replace('_', ' ')}, growing jitter", {})
            for cell in one["found"]:
                line.setdefault(16 * cell["boundaries"], []).append(100 * cell["whole"])
    for one in results("memory"):
        if one["task"] == "passkey":
            line = lines.setdefault(one["memory"].replace("local", "local attention alone"), {})
            for cell in one["found"]:
                if cell["distance"] in (1, 8, 64, 256) or cell["distance"] > 256:
                    line.setdefault(16 * cell["distance"], []).append(100 * cell["whole"])
    for (label, line), marker in zip(lines.items(), "oD^vs", strict=False):
        points = sorted(line.items())
        axes.plot([x for x, _ in points], [sum(y) / len(y) for _, y in points], marker=marker, ms=4, label=label)
    tokens, found = zip(*PAPER, strict=True)
    axes.plot([1000 * x for x in tokens], found, "k--x", ms=5, label="paper, 1B model, linear, fine-tuned at 5K tokens")
    axes.axvspan(16, 112, color="0.9", lw=0, label="distances of our training")
    axes.set(xscale="log", ylim=(-3, 104), xlabel="tokens between number and question", ylabel="numbers found, %")
    axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})
    plt.close(figure)


TABLES = {
    "pipeline": pipeline,
    "reach": reach,
    "controls": controls,
    "places": places,
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
