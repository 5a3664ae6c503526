"""Values, sizes, durations and results in the words that people read."""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from infini_llama.tasks.records.evaluation import PasskeyResult
from infini_llama.tasks.records.manifest import RowCosts

NATS_PER_BIT = math.log(2)
# Of a card, a page or a text table: values by the words that stand beside them.
Cells = Mapping[str, object]


def shown(value: object) -> str:
    """A value as text, with thousands separators and four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={shown(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(shown(item) for item in value) or "nothing"
    return str(value)


def in_bytes(size: float) -> str:
    """Bytes in the largest unit that matters, for example 1.2 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def in_millions(number: float) -> str:
    """1.2 million, 340 million, 7.1 billion; small numbers in full."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.{0 if number >= 10 * unit else 1}f} {name}"
    return f"{number:,.0f}"


def in_time(seconds: float) -> str:
    """Seconds in the two largest units that matter, for example 3 h 20 min."""
    rest = round(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def now() -> str:
    """The time of writing, for people."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def packed(costs: RowCosts) -> dict[str, str]:
    """The cost of packing a split."""
    return {
        "filled": f"{costs.efficiency:.2%}",
        "documents cut": f"{costs.cut_documents:,}",
        "tokens in no row": f"{costs.lost_tokens:,}",
        "targets": f"{costs.targets:,}",
    }


def passkey_rows(cells: Iterable[PasskeyResult]) -> list[dict[str, object]]:
    """Fraction of passkeys found: one row per length, one column per depth."""
    rows: dict[int, dict[str, object]] = {}
    for cell in cells:
        if cell.depth is not None:
            row = rows.setdefault(cell.length, {"tokens": cell.tokens})
            row[f"depth {cell.depth:g}"] = f"{cell.found:.0%}"
    return list(rows.values())


def distance_rows(cells: Iterable[PasskeyResult]) -> list[dict[str, object]]:
    """Fraction of passkeys found: one row per number of segment boundaries."""
    return [
        {
            "boundaries": cell.boundaries,
            "tokens": cell.tokens,
            "found": f"{cell.found:.0%}",
            "by token": " ".join(f"{right:.0%}" for right in cell.right_by_token),
        }
        for cell in cells
        if cell.depth is None
    ]


def control_rows(cells: Iterable[PasskeyResult]) -> list[dict[str, object]]:
    """Answers with a memory that is not the text's own: one row per cell that has controls."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    rows: list[dict[str, object]] = []
    for cell in cells:
        if cell.controls:
            row: dict[str, object] = {"tokens": cell.tokens}
            if cell.depth is not None:
                row["depth"] = f"{cell.depth:g}"
            row["own number, another text's memory"] = share(cell.controls.swapped_own)
            row["the other text's number"] = share(cell.controls.swapped_other)
            row["own number, filler's memory"] = share(cell.controls.filler_alone)
            rows.append(row)
    return rows


def in_words(values: Cells) -> dict[str, object]:
    """Field names as words; entropies, which records have in bits, in the unit of the loss."""
    words: dict[str, object] = {}
    for name, value in values.items():
        if name == "unigram_entropy_bits" and isinstance(value, float):
            words["unigram entropy, nats per token"] = value * NATS_PER_BIT
        else:
            words[name.replace("_", " ")] = value
    return words


def side_by_side(columns: Mapping[str, Cells]) -> list[dict[str, object]]:
    """One row per name that any column has, one column per mapping."""
    names = dict.fromkeys(name for values in columns.values() for name in values)
    return [
        {"": name} | {column: values.get(name) for column, values in columns.items()}
        for name in names
    ]


def share(value: float) -> str:
    """A part of a whole, for example 81.3%."""
    return f"{value:.1%}"
