"""Pieces of the Markdown cards on a run's page. A card only shows: whatever goes wrong with one is logged, and the work goes on."""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator

log = logging.getLogger("infini_llama.cards")


@contextlib.contextmanager
def never_in_the_way(what: str) -> Iterator[None]:
    """Inside, an error is logged with the name of the card, and no more."""
    try:
        yield
    except Exception as fault:
        log.warning("%s cannot be shown on the run's page (%r); the work itself goes on.", what, fault)


def key_of(*words: str) -> str:
    """An artifact's key, as Prefect allows them: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a Markdown table."""
    heads = list(heads)
    lines = [_line(heads), _line("---" for _ in heads)]
    return [*lines, *(_line(map(cell, row)) for row in rows), ""]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(value: object) -> str:
    """A value within a table: on one line, and no bar that would end its column."""
    return " ".join(str(value).replace("|", "\\|").split())


def text_block(text: str, longest: int = 1200) -> list[str]:
    """Text as it is, in a fence that nothing in it can close; a long one is cut."""
    shown = text if len(text) <= longest else text[:longest] + " …"
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall(r"`+", shown)), default=0))
    return [fence + "text", shown, fence, ""]
