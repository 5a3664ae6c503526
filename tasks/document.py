"""The description of a run, a dataset or a machine.

It is Markdown with charts, which Prefect, a page and a terminal show alike.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from infini_llama.configs.errors import escaped
from infini_llama.tasks.formatting import Cells, shown


@dataclass(frozen=True)
class Curve:
    """y against x.

    Attributes:
        kind: `line` shows the mean, and where it was thinned also the range; `points` a mark for
            each value; `level` is one value for all x; `bars` stand between neighbours of x, of
            which there is one more.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    kind: Literal["line", "points", "level", "bars"] = "line"

    @property
    def has_values(self) -> bool:
        return any(value is not None and math.isfinite(value) for value in self.y)


@dataclass(frozen=True)
class Chart:
    """The data of one picture.

    Attributes:
        marks: vertical lines, such as the beginnings of attempts.
    """

    title: str
    curves: list[Curve]
    x_label: str = "step"
    log: bool = False
    log_x: bool = False
    marks: Sequence[float] = field(default=())


@dataclass(frozen=True)
class Detail:
    """Markdown that a page folds under `title`, and that Prefect and a terminal leave out."""

    title: str
    text: str


Block = str | Chart | Detail  # a str is a block of Markdown


@dataclass(frozen=True)
class Document:
    title: str
    blocks: tuple[Block, ...]


def markdown(document: Document, picture: str = "") -> str:
    """The document as Prefect shows it, without details and charts.

    Args:
        picture: an image; it stands where the first chart would.
    """
    shown_blocks = [f"# {cell(document.title)}"]
    for block in document.blocks:
        if isinstance(block, Chart) and picture:
            shown_blocks.append(picture)
            picture = ""
        elif isinstance(block, str):
            shown_blocks.append(block)
    # A section with only charts and details has no heading here.
    kept = [
        block
        for block, after in pairwise([*shown_blocks, "## "])
        if not (block.startswith("## ") and after.startswith("## "))
    ]
    # PostgreSQL refuses NUL, and UTF-8 a lone surrogate.
    return escaped("\n\n".join(kept)) + "\n"


def section(title: str, *blocks: Block) -> tuple[Block, ...]:
    """A heading and the blocks below it; empty without blocks."""
    present = tuple(block for block in blocks if _has_content(block))
    return (f"## {title}", *present) if present else ()


def subsection(title: str, text: str) -> str:
    """A heading and the text below it, as one block; empty without text."""
    return f"### {title}\n\n{text}" if text else ""


def _has_content(block: Block) -> bool:
    if isinstance(block, Chart):
        return any(curve.has_values for curve in block.curves)
    return bool(block.text if isinstance(block, Detail) else block)


def table(records: Sequence[Cells]) -> str:
    """A column for each key that any record has; numbers are right-aligned."""
    if not records:
        return ""
    columns = list(dict.fromkeys(key for record in records for key in record))
    rules: list[str] = []
    for key in columns:
        is_number = all(_is_number(record.get(key)) for record in records)
        rules.append("---:" if is_number else "---")
    lines = [_line(map(cell, columns)), _line(rules)]
    for record in records:
        values = [record.get(key) for key in columns]
        lines.append(_line(cell(shown(value)) for value in values))
    return "\n".join(lines)


def facts(values: Cells) -> str:
    """Names and values, one pair per line, in a table without heads.

    None and empty ones are left out.
    """
    rows = [
        _line((cell(name), cell(shown(value))))
        for name, value in values.items()
        if value not in (None, "", [], (), {})
    ]
    return "\n".join(("|  |  |", "| --- | --- |", *rows)) if rows else ""


def bullets(lines: Iterable[str]) -> str:
    """A list of lines, which are Markdown.

    It is for long values: Prefect does not wrap the cells of a table.
    """
    return "\n".join(f"- {line}" for line in lines)


def cell(value: object) -> str:
    """A value as text on one line, in which nothing is Markdown or ends a column."""
    line = " ".join(str(value).split())
    return re.sub(
        r"[\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)", r"\\\g<0>", line
    )


def code(value: object) -> str:
    """A path, digest or command as it is, to be copied."""
    line = str(value).replace("\n", " ")
    fence = "`" * (1 + _longest_run_of_ticks(line))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def text_block(text: str, longest: int = 1200) -> str:
    """Text as it is, in a fence that nothing in it can close.

    Args:
        longest: longer text is cut, in characters.
    """
    cut = text if len(text) <= longest else text[:longest] + " …"
    fence = "`" * max(3, 1 + _longest_run_of_ticks(cut))
    return f"{fence}text\n{cut}\n{fence}"


def as_markdown(record: Cells) -> str:
    """A record as Markdown.

    Simple values come first, then one table per collection of records and one block per longer
    text.
    """
    blocks = [
        facts({key: value for key, value in record.items() if not _is_nested(value)})
    ]
    for key, value in record.items():
        if isinstance(value, Mapping):
            blocks.append(subsection(cell(key), _records_by_name(value)))
        elif isinstance(value, list | tuple) and _is_nested(value):
            blocks.append(subsection(cell(key), _records_and_texts(value)))
    return "\n\n".join(filter(None, blocks))


def _records_by_name(values: Mapping[str, object]) -> str:
    """A table with a row per record, if all values are records; names and values otherwise."""
    rows = [
        {"": name, **cells}
        for name, cells in values.items()
        if isinstance(cells, Mapping)
    ]
    return table(rows) if len(rows) == len(values) else facts(values)


def _records_and_texts(values: Sequence[object]) -> str:
    """A table with a row per record, and a block per text below it."""
    rows: list[Cells] = []
    texts: list[str] = []
    for value in values:
        if isinstance(value, Mapping):
            rows.append(value)
        else:
            texts.append(text_block(str(value), len(str(value))))
    return "\n\n".join(filter(None, (table(rows), *texts)))


def _is_nested(value: object) -> bool:
    """Whether the value is a record, or a list with a record or a text of several lines."""
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(item, Mapping) or "\n" in str(item) for item in value)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _is_number(value: object) -> bool:
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool)
    )


def _longest_run_of_ticks(text: str) -> int:
    return max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
