"""Intervals in steps, tokens or minutes."""

import re
from typing import Literal, NamedTuple

# So many digits that no number overflows.
_ABOVE_0 = r"(\d{0,15}[1-9]\d{0,15}(?:\.\d+)?|0+\.\d*[1-9]\d*)"
DURATION = rf"^\s*{_ABOVE_0}\s*([kMG]?)\s*(steps?|tokens?|minutes?|hours?)\s*$"
COUNT = rf"^\s*{_ABOVE_0}\s*[kMGT]?\s*$"
SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Duration(NamedTuple):
    """An interval of `number` steps, tokens or seconds."""

    number: float
    unit: Literal["steps", "tokens", "seconds"]


def duration(value: int | str) -> Duration:
    """Parse an interval that has passed the schema.

    Args:
        value: 200 or "200 steps", "10M tokens", "15 minutes", "2 hours".
    """
    if isinstance(value, int):
        return Duration(value, "steps")
    match = re.fullmatch(DURATION, value)
    assert match is not None, value
    number = float(match[1]) * SCALE[match[2]]
    unit = match[3].rstrip("s")
    if unit in ("step", "token"):
        return Duration(max(1, round(number)), "steps" if unit == "step" else "tokens")
    return Duration(number * (60 if unit == "minute" else 3600), "seconds")


def count(value: int | str) -> int:
    """Parse a number that has passed the schema: 10_000_000 or "10M"."""
    if isinstance(value, int):
        return value
    text = value.strip()
    number = float(text.rstrip("kMGT").strip())
    return max(1, round(number * SCALE.get(text[-1], 1)))
