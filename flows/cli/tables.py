"""Text that commands print for people: records and documents, through Markdown that rich renders.

--json prints the same records.
"""

import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, ClassVar

import yaml
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableElement
from rich.table import Table
from rich.text import Text

from infini_llama.configs.errors import escaped
from infini_llama.tasks.document import as_markdown
from infini_llama.tasks.formatting import (
    Cells,
    control_rows,
    distance_rows,
    in_bytes,
    in_time,
    in_words,
    passkey_rows,
)

if TYPE_CHECKING:
    from infini_llama.tasks.records.dataset import DatasetRef
    from infini_llama.tasks.records.estimate import Estimate
    from infini_llama.tasks.records.evaluation import PasskeyRetrieval, Perplexity
    from infini_llama.tasks.records.heads import HeadScores
    from infini_llama.tasks.records.summary import RunResults
    from infini_llama.tasks.runs.gc import Collected

WIDTH = 140  # maximum columns of a table, and the width without a terminal


def reference_text(reference: "DatasetRef", home: Path) -> str:
    """The dataset that `preprocess` built or found, as text.

    It has one line per split, and one per row table.
    """
    tables = [
        {
            "row table": table.row_table,
            "sequence length": table.sequence_length,
            "training rows": table.rows,
        }
        for table in reference.row_tables
    ]
    splits = {"train": reference.train, "validation": reference.validation}
    return as_text(
        {
            "dataset": str(home / reference.path),
            "digest": reference.digest,
            "built": " and ".join(reference.built)
            or "nothing; the dataset was complete",
            "vocabulary": reference.vocab_size,
            "splits": {name: in_words(dict(split)) for name, split in splits.items()},
            "row tables": tables,
        }
    )


ESTIMATE_WORDS = {
    "of_matrices": "in matrices",
    "tokens_per_step": "tokens per step",
    "flops": "FLOPs",
    "batches": "data batches",
    "checkpoint_copy": "copy for background saves",
    "process": "interpreter and libraries",
    "holes": "kept by the allocator",
}


def _renamed(values: Cells) -> dict[str, object]:
    return {ESTIMATE_WORDS.get(name, name): value for name, value in values.items()}


def estimate_text(estimate: "Estimate") -> str:
    """An estimate with units: FLOPs in powers of ten, bytes in MB or GB."""
    layout = estimate.layout
    where = f"memory of one of {layout.workers} worker(s) on {layout.device}, {layout.precision}"
    run = estimate.run.model_dump(exclude_none=True)
    if estimate.run.flops is not None:
        run["flops"] = f"{estimate.run.flops:.3g}"
    return as_text(
        {
            "parameters": _renamed(estimate.parameters.model_dump()),
            "FLOPs per token, forward and backward": {
                n: f"{value:.3g}" for n, value in estimate.flops_per_token
            },
            "run": _renamed(run),
            where: _renamed(
                {part: in_bytes(size) for part, size in estimate.memory.items()}
            ),
            "on disk": {"checkpoint": in_bytes(estimate.checkpoint)},
        }
    )


def evaluation_text(evaluation: "Perplexity") -> str:
    """Results of `evaluate`: one line with and one without memory, and the losses by position."""
    measured = evaluation.measurements()
    columns: dict[str, Sequence[float | None]] = {}
    for words, result in measured:
        if result.loss_by_part:
            columns[f"loss {words}".strip()] = result.loss_by_part
    for words, result in measured:
        if result.bits_per_byte_by_part:
            columns[f"bits per byte {words}".strip()] = result.bits_per_byte_by_part
    size = measured[0][1].part or 0
    count = len(next(iter(columns.values()), ()))
    length = measured[0][1].length or size * count
    rows = [
        {"tokens": f"{at * size + 1}-{min((at + 1) * size, length)}"}
        | {name: values[at] for name, values in columns.items()}
        for at in range(count)
    ]
    kept = {"loss", "perplexity", "bits_per_byte", "tokens"}
    record = evaluation.model_dump(include={"run", "checkpoint", "text", "stream"})
    record["measured"] = [
        {"": words} | result.model_dump(include=kept) for words, result in measured
    ]
    if rows:
        record["loss by position"] = rows
    return as_text(record)


def passkey_text(result: "PasskeyRetrieval") -> str:
    """Fraction of passkeys found: one line per length, and one column per depth.

    Or it has one line per number of segment boundaries.
    """
    about = result.model_dump(
        include={
            "run",
            "checkpoint",
            "trained_length",
            "samples",
            "form",
            "filler",
            "text",
        },
        exclude_none=True,
    )
    fractions = {
        f"found {words}".strip(): passkey_rows(cells) + distance_rows(cells)
        for words, cells in result.measurements()
    }
    controls = {"controls": control_rows(result.memory)} if result.memory else {}
    return as_text(about | fractions | controls)


def heads_text(scores: "HeadScores") -> str:
    """The heads that retrieve, and the keys of a configuration that follow."""
    rows = [
        {
            "layer": layer,
            "head": head,
            "retrieval": scores.retrieval[layer][head],
            "induction": scores.induction[layer][head],
        }
        for layer, head in scores.retrieving
    ]
    about = {
        "model": scores.model,
        "numbers found with full attention": f"{scores.found} of {scores.texts}",
    }
    text = as_text(about | ({"heads that retrieve": rows} if rows else {}))
    if not scores.can_answer:
        return (
            f"{text}\n\nthe model cannot answer with full attention, so that no head can learn "
            "this from a memory"
        )
    keys = scores.keys()
    if keys is None:
        return f"{text}\n\nno head retrieves: a memory has no head to start from"
    values = keys.to_json()
    sections = {
        "model": {"attention": "infini", "memory_layers": values["memory_layers"]},
        "train": {name: values[name] for name in ("init_gate", "frozen_layers")},
    }
    written = yaml.safe_dump(
        sections, sort_keys=False, default_flow_style=None, width=WIDTH
    )
    return (
        f"{text}\n\nthe configuration that follows, as `infini-llama import --attention infini` "
        f"writes it:\n\n{written.rstrip()}"
    )


def runs_text(runs: "Sequence[RunResults]") -> str:
    """One line per run, with units for ages and sizes."""
    rows = [
        {
            "run": run.run,
            "state": run.state,
            "step": f"{run.step:,}/{run.max_steps:,}",
            "loss": run.train_loss,
            "validation": run.validation_loss,
            "last activity": f"{in_time(run.age)} ago",
            "size": in_bytes(run.bytes),
        }
        for run in runs
    ]
    return as_text({"runs": rows})


def collected_text(collected: "Collected") -> str:
    """The files that `gc` found, and deleted or would delete."""
    files = [dict(file) | {"bytes": in_bytes(file.bytes)} for file in collected.files]
    tables = {
        "unreferenced files": files,
        "in use and kept": [dict(file) for file in collected.in_use],
    }
    text = as_text({part: rows for part, rows in tables.items() if rows})
    if not files:
        return f"{text}\n\nnothing to delete".strip()
    action = "deleted" if collected.removed else "to delete with --yes"
    return f"{text}\n\n{len(files)} {action}, {in_bytes(collected.bytes)}"


def as_text(record: Cells) -> str:
    """A record as text.

    Simple values come first, then one table per collection of records and one block per longer
    text.
    """
    return terminal(as_markdown(record))


def terminal(markdown: str) -> str:
    """Markdown as text in the width of the terminal.

    Long words continue on the next line, and nothing is cut.
    """
    target = StringIO()
    width = WIDTH
    if sys.stdout.isatty():
        width = min(WIDTH, get_terminal_size((WIDTH, 24)).columns)
    console = Console(
        file=target,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None,
    )
    console.print(PlainMarkdown(markdown))
    return escaped(
        "\n".join(line.rstrip() for line in target.getvalue().split("\n")).strip()
    )


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar = {}


class _Text(CodeBlock):
    """Without colours and a frame, so that it can be copied."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield Text(str(self.text).rstrip("\n"), overflow="fold")


class _Table(TableElement):
    """A table whose long words continue on the next line.

    Names and values, which have no heads, stand without lines.
    """

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        assert self.header is not None and self.header.row is not None
        heads = [cell.content for cell in self.header.row.cells]
        has_heads = any(head.plain for head in heads)
        if has_heads:
            table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        else:
            table = Table(box=None, show_header=False, pad_edge=False)
        rows = self.body.rows if self.body is not None else []
        for number, head in enumerate(heads):
            is_name = not has_heads and number == 0
            table.add_column(head, overflow="fold", no_wrap=is_name)
        for row in rows:
            table.add_row(*(cell.content for cell in row.cells))
        yield table


class PlainMarkdown(Markdown):
    """Headings as plain lines, tables in full, texts as they are."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = Markdown.elements | {
        "heading_open": _Heading,
        "fence": _Text,
        "table_open": _Table,
    }
