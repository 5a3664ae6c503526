"""One HTML page in one file: its frame, sections, tables and bars. No script, and nothing from the network."""

import html
from collections.abc import Sequence
from datetime import UTC, datetime

from infini_llama.tasks.formatting import Cells, shown

# The eight colours stay apart for colour-blind readers, on both grounds.
LIGHT = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#008300", "#4a3aa7", "#e34948")
DARK = ("#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#22a022", "#9085e9", "#e66767")

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --raised: #f6f7f8; --ink: #16191d; --soft: #5c646e; --line: #d9dde2; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171a; --raised: #1d2125; --ink: #e8eaed; --soft: #9aa3ad; --line: #353b42; DARK }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 72rem; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, .note { color: var(--soft); margin: .25rem 0 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--raised); border-radius: 8px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tile span { color: var(--soft); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.25rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; }
.key { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .85rem; color: var(--soft); }
.key i, .parts i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; white-space: nowrap; }
th, td { padding: .3rem 1.25rem .3rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
td.number { text-align: right; white-space: nowrap; } th.number { text-align: right; }
table.facts { width: 100%; } table.facts th { width: 12rem; } table.facts td { overflow-wrap: anywhere; padding-right: 0; }
.bar { display: flex; height: 1.5rem; border-radius: 6px; overflow: hidden; margin: .5rem 0 .75rem; gap: 1px; }
.bar i { display: block; min-width: 2px; }
.parts { display: flex; flex-wrap: wrap; gap: .2rem 1.25rem; font-size: .9rem; font-variant-numeric: tabular-nums; }
pre { font: .85rem/1.45 ui-monospace, monospace; background: var(--raised); border-radius: 8px; padding: .8rem 1rem; margin: .5rem 0 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 32rem; overflow-y: auto; }
details { margin: .75rem 0; } summary { cursor: pointer; color: var(--soft); }
@media (max-width: 40rem) {
  table.facts, table.facts tbody, table.facts tr, table.facts th, table.facts td { display: block; width: auto; }
  table.facts th { border: 0; padding-bottom: 0; } table.facts td { padding-top: 0; }
  .scroll thead { display: none; }
  .scroll table, .scroll tbody, .scroll tr { display: block; } .scroll tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .scroll td, .scroll td.number { display: flex; gap: 1rem; justify-content: space-between; text-align: right; white-space: normal;
    overflow-wrap: anywhere; padding: .1rem 0; border: 0; }
  .scroll td::before { content: attr(data-name); color: var(--soft); flex: none; max-width: 45%; text-align: left; }
  .scroll td[data-name=""] { display: block; text-align: left; } .scroll td:empty { display: none; }
}
@media print { pre { max-height: none; } }
"""


def style() -> str:
    def colours(values: Sequence[str]) -> str:
        return " ".join(f"--series-{number}: {value};" for number, value in enumerate(values, 1))

    return STYLE.replace("LIGHT", colours(LIGHT)).replace("DARK", colours(DARK))


def page(title: str, *parts: str, reload_every: int = 0) -> str:
    """The whole document; `parts` are HTML, `title` is text; with `reload_every`, the browser reads it again so many seconds later."""
    reload = f'<meta http-equiv="refresh" content="{reload_every}">\n' if reload_every else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{reload}<title>{text(title)}</title>\n<style>{style()}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def now() -> str:
    """The time of writing, for people."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def text(value: object) -> str:
    """Text as HTML; a lone surrogate, which no encoding can write, becomes a question mark."""
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"))


def section(title: str, *parts: str) -> str:
    """A heading and what is below it; nothing at all where nothing is."""
    inside = "\n".join(filter(None, parts))
    return f"<section><h2>{text(title)}</h2>\n{inside}\n</section>" if inside else ""


def tiles(values: dict[str, str]) -> str:
    shown = (f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value in values.items())
    return f'<div class="tiles">{"".join(shown)}</div>'


def facts(values: Cells) -> str:
    """Names and values, one a line; None and empty ones are left out."""
    rows = (
        f'<tr><th scope="row">{text(name)}</th><td>{text(shown(value))}</td></tr>'
        for name, value in values.items()
        if value not in (None, "", [], (), {})
    )
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>' if values else ""


def table(records: Sequence[Cells]) -> str:
    """A column for each key that any record has; numbers are right-aligned."""
    if not records:
        return ""
    columns = list(dict.fromkeys(key for record in records for key in record))
    numeric = {key for key in columns if all(_number(record.get(key)) for record in records)}

    kind = {key: " class=number" if key in numeric else "" for key in columns}
    head = "".join(f"<th{kind[key]}>{text(key)}</th>" for key in columns)
    # A narrow page shows a row as lines of name and value.
    name = {key: f' data-name="{text(key)}"' for key in columns}
    rows = (
        "".join(f"<td{kind[key]}{name[key]}>{text(shown(record.get(key)))}</td>" for key in columns)
        for record in records
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def parts_of_a_whole(values: dict[str, float], unit: str) -> str:
    """A bar divided into the positive values, with a key that says how much each is."""
    positive = {name: value for name, value in values.items() if value > 0}
    whole = sum(positive.values())
    if not whole:
        return ""
    colour = {name: f"var(--series-{number % len(LIGHT) + 1})" for number, name in enumerate(positive)}
    bar = "".join(
        f'<i style="width:{value / whole:.3%};background:{colour[name]}" title="{text(name)}"></i>'
        for name, value in positive.items()
    )
    key = "".join(
        f'<span><i style="background:{colour[name]}"></i>{text(name)} {value / whole:.1%} ({value:,.1f} {unit})</span>'
        for name, value in positive.items()
    )
    return f'<div class="bar">{bar}</div><div class="parts">{key}</div>'


def details(title: str, inside: str) -> str:
    return f"<details><summary>{text(title)}</summary>{inside}</details>" if inside else ""


def preformatted(value: str) -> str:
    return f"<pre>{text(value)}</pre>"


def _number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
