"""How rich renders Markdown for a terminal: headings as plain lines, tables in full, texts as they are."""

from typing import ClassVar

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableElement
from rich.table import Table
from rich.text import Text


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar = {}


class _Text(CodeBlock):
    """Without colours and a frame, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(str(self.text).rstrip("\n"), overflow="fold")


class _Table(TableElement):
    """Long words continue on the next line; names and values, which have no heads, stand without lines."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        assert self.header is not None and self.header.row is not None
        heads = [cell.content for cell in self.header.row.cells]
        if any(head.plain for head in heads):
            table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        else:
            table = Table(box=None, show_header=False, pad_edge=False)
        rows = self.body.rows if self.body is not None else []
        for number, head in enumerate(heads):
            is_name = not any(head.plain for head in heads) and number == 0
            table.add_column(head, overflow="fold", no_wrap=is_name)
        for row in rows:
            table.add_row(*(cell.content for cell in row.cells))
        yield table


class Plain(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = Markdown.elements | {
        "heading_open": _Heading,
        "fence": _Text,
        "table_open": _Table,
    }
