"""A document as one HTML page in one file. No script, and nothing from the network."""

import html
from collections.abc import Sequence
from itertools import groupby

from markdown_it import MarkdownIt

from infini_llama.tasks.document import Block, Chart, Detail, Document
from infini_llama.tasks.report.charts import DARK, LIGHT, figure

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --raised: #f6f7f8; --ink: #16191d; \
--soft: #5c646e; --line: #d9dde2; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171a; --raised: #1d2125; --ink: #e8eaed; --soft: #9aa3ad; \
--line: #353b42; DARK }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); \
max-width: 72rem; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem; \
border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, ul { color: var(--soft); margin: .25rem 0 1rem; overflow-wrap: anywhere; }
code { font: .85rem ui-monospace, monospace; color: var(--ink); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); \
gap: 1.25rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; }
.key { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .85rem; color: var(--soft); }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; white-space: nowrap; }
th, td { padding: .3rem 1.25rem .3rem 0; vertical-align: top; \
border-bottom: 1px solid var(--line); }
td[style] { white-space: nowrap; }
table.facts { width: 100%; } table.facts thead { display: none; } table.facts td { \
overflow-wrap: anywhere; padding-right: 0; }
table.facts td:first-child { width: 12rem; color: var(--soft); padding-right: 1.25rem; }
h1 + p + .scroll tbody { display: grid; \
grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem; }
h1 + p + .scroll tr { display: flex; flex-direction: column-reverse; justify-content: flex-end; \
background: var(--raised);
  border-radius: 8px; padding: .6rem .8rem; }
h1 + p + .scroll td { border: 0; padding: 0; font-size: 1.25rem; font-weight: 600; }
h1 + p + .scroll td:first-child { font-size: .85rem; font-weight: 400; width: auto; }
pre { font: .85rem/1.45 ui-monospace, monospace; background: var(--raised); border-radius: 8px; \
padding: .8rem 1rem; margin: .5rem 0 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 32rem; overflow-y: auto; }
details { margin: .75rem 0; } summary { cursor: pointer; color: var(--soft); }
@media (max-width: 40rem) {
  .scroll thead { display: none; }
  .scroll table, .scroll tbody, .scroll tr { display: block; width: auto; }
  .scroll tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .scroll td { display: flex; gap: 1rem; justify-content: space-between; text-align: right; \
white-space: normal;
    overflow-wrap: anywhere; padding: .1rem 0; border: 0; }
  .scroll td::before { content: attr(data-name); color: var(--soft); flex: none; max-width: 45%; \
text-align: left; }
  .scroll td[data-name=""] { display: block; text-align: left; } .scroll td:empty { display: none; }
  table.facts td:first-child { width: auto; padding: 0; }
}
@media print { pre { max-height: none; } }
"""


def page(document: Document, reload_every: int = 0) -> str:
    """The whole page; with `reload_every`, the browser reads it again so many seconds later."""
    reload = (
        f'<meta http-equiv="refresh" content="{reload_every}">\n'
        if reload_every
        else ""
    )
    title = html.escape(document.title)
    written = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{reload}<title>{title}</title>\n<style>{_style()}</style></head><body>\n"
        f"<h1>{title}</h1>\n{_body(document.blocks)}</body></html>\n"
    )
    # No encoding can write a lone surrogate.
    return written.encode("utf-8", "replace").decode("utf-8")


def _style() -> str:
    def colours(values: Sequence[str]) -> str:
        return " ".join(
            f"--series-{number}: {value};" for number, value in enumerate(values, 1)
        )

    return STYLE.replace("LIGHT", colours(LIGHT)).replace("DARK", colours(DARK))


def _body(blocks: Sequence[Block]) -> str:
    """Charts that follow one another stand side by side where the page is wide."""
    written: list[str] = []
    for is_chart, group in groupby(blocks, key=lambda block: isinstance(block, Chart)):
        if is_chart:
            drawn = "".join(
                figure(block) for block in group if isinstance(block, Chart)
            )
            written.append(f'<div class="charts">{drawn}</div>\n')
        else:
            written += (_text(block) for block in group if not isinstance(block, Chart))
    return "".join(written)


def _text(block: str | Detail) -> str:
    if isinstance(block, Detail):
        title = html.escape(block.title)
        return f"<details><summary>{title}</summary>{_html(block.text)}</details>\n"
    return _html(block)


def _html(markdown: str) -> str:
    """HTML of Markdown in which neither HTML nor images are let through.

    A narrow page shows a row as lines of name and value.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = parser.parse(markdown)
    heads: list[str] = []
    column = 0
    opened = -1
    for number, token in enumerate(tokens):
        if token.type == "table_open":
            heads = []
            opened = number
        elif token.type == "th_open":
            heads.append(
                "".join(part.content for part in tokens[number + 1].children or ())
            )
        elif token.type == "thead_close" and not any(heads):
            tokens[opened].attrSet("class", "facts")
        elif token.type == "tr_open":
            column = 0
        elif token.type == "td_open":
            token.attrSet("data-name", heads[column])
            column += 1
    written = parser.renderer.render(tokens, parser.options, {})
    written = written.replace("<table", '<div class="scroll"><table')
    return written.replace("</table>", "</table></div>")
