"""Values, sizes and times as people write them."""

from collections.abc import Iterable
from typing import Any


def shown(value: Any) -> str:
    """A value as people write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, dict):
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


def in_time(seconds: float) -> str:
    """Seconds in the two largest units that matter, for example 3 h 20 min."""
    rest, found = round(seconds), []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count or (unit == "s" and not found):
            found.append(f"{count} {unit}")
    return " ".join(found[:2])


def packed(costs: dict[str, Any]) -> dict[str, str]:
    """What packing cost a split, as a row table's manifest has it; nothing where that does not say it."""
    filled = {"filled": f"{costs['efficiency']:.2%}"} if "efficiency" in costs else {}
    names = {"cut_documents": "documents cut", "lost_tokens": "tokens in no row", "targets": "targets"}
    return filled | {words: f"{costs[name]:,}" for name, words in names.items() if name in costs}


def share(value: float) -> str:
    """A part of a whole, for example 81.3%."""
    return f"{value:.1%}"
