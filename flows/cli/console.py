"""Console output of a run: progress bars on a terminal, plain lines elsewhere, and a summary."""

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from infini_llama.configs.errors import escaped
from infini_llama.configs.reading import JsonObject
from infini_llama.tasks.progress import Reached, progress_of

if TYPE_CHECKING:
    from rich.progress import TaskID

    from infini_llama.tasks.records.summary import RunSummary

Answer = tuple[JsonObject, str]  # of a command: a record for --json, and text
LINES_APART = 2.0  # seconds between the plain lines of one stage's progress
MIN_WIDTH_FOR_BARS = 110  # terminal columns
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 16


class PlainHandler(logging.Handler):
    """One line per record on stderr.

    Progress is logged at most every `LINES_APART` seconds, besides lines that are due and the last
    one.
    """

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.next_at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        progress = progress_of(record)
        # Short work is not logged.
        due = self.next_at.setdefault(record.name, now + LINES_APART)
        if (
            progress is not None
            and not progress.due
            and progress.done < (progress.total or math.inf)
        ):
            if now < due:
                return
            self.next_at[record.name] = now + LINES_APART
        try:
            print(line(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class BarHandler(logging.Handler):
    """A progress bar for running work.

    Other records, and the last line of finished work, are printed above it.
    """

    def __init__(self, level: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        super().__init__(logging.DEBUG)
        self.lines_from = level
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        columns = [
            TextColumn("{task.fields[stage]:<11}", style="bold"),
            *([BarColumn(bar_width=24)] if console.width >= MIN_WIDTH_FOR_BARS else []),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            # It takes the rest of the line; times are never cut for it.
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
        ]
        self.progress = Progress(*columns, console=console, expand=True)
        self.bars: dict[str, TaskID] = {}
        self.kinds: dict[
            str, tuple[float | None, str]
        ] = {}  # total and unit of each bar
        self.newest: dict[str, str] = {}  # the newest line of each bar
        self.losses: dict[
            int, tuple[float, int]
        ] = {}  # per SPARKS-th of the run: sum and count
        self.saved = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            reported = progress_of(record)
            self._retire_finished("" if reported is None else stage_of(record))
            if (step := getattr(record, "checkpoint", None)) is not None:
                self.saved = f"  saved at {step:,}"
            if reported is not None:
                self._move(record, reported)
            elif record.levelno >= self.lines_from:
                styles = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
                style = styles.get(record.levelname)
                self.progress.console.print(line(record), style=style, soft_wrap=True)
        except Exception:
            self.handleError(record)

    def _move(self, record: logging.LogRecord, reported: Reached) -> None:
        stage = stage_of(record)
        kind = (reported.total, reported.unit)
        # With another kind, the stage has new work.
        if stage not in self.bars or self.kinds[stage] != kind:
            self._retire(stage)
            self.progress.start()
            self.bars[stage] = self.progress.add_task(
                "", total=reported.total, stage=stage
            )
            self.kinds[stage] = kind
        text = words(record)
        if reported.loss is not None:
            if not math.isnan(reported.loss):
                part = min(
                    SPARKS - 1, int(reported.done * SPARKS // (reported.total or 1))
                )
                total, count = self.losses.get(part, (0.0, 0))
                self.losses[part] = (total + reported.loss, count + 1)
            text = (
                f"{text}  {sparkline([total / count for total, count in self.losses.values()])}"
                f"{self.saved}"
            )
        self.progress.update(
            self.bars[stage], completed=reported.done, description=text
        )
        self.newest[stage] = line(record)

    def _retire_finished(self, current: str) -> None:
        """Replace finished bars by their last lines: they do not stay below what follows."""
        finished = {task.id for task in self.progress.tasks if task.finished}
        for stage, bar in list(self.bars.items()):
            if stage != current and bar in finished:
                self._retire(stage)

    def _retire(self, stage: str) -> None:
        if stage in self.bars:
            self.progress.remove_task(self.bars.pop(stage))
            # Before the line is printed: rich draws the bars that it knew last below it.
            self.progress.refresh()
            self.progress.console.print(self.newest.pop(stage), soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()
        super().close()


def sparkline(values: list[float]) -> str:
    """One block character per value, scaled from the lowest to the highest."""
    least = min(values, default=0.0)
    spread = (max(values, default=0.0) - least) or 1.0
    return "".join(
        BLOCKS[round((value - least) / spread * (len(BLOCKS) - 1))] for value in values
    )


def stage_of(record: logging.LogRecord) -> str:
    return record.name.removeprefix("infini_llama.").removeprefix("infini_llama")


def line(record: logging.LogRecord) -> str:
    severity = (
        f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
    )
    return f"{stage_of(record):<11} {severity}{words(record)}"


def words(record: logging.LogRecord) -> str:
    """The message, with the progress appended unless it contains it."""
    message = escaped(record.getMessage())
    progress = progress_of(record)
    if progress is None:
        return message
    far = f"{progress.done:,.10g}" + (
        f"/{progress.total:,.10g}" if progress.total else ""
    )
    return message if far in message else f"{message}  {far} {progress.unit}"


@contextlib.contextmanager
def shown_log(quiet: bool, verbose: bool) -> Iterator[None]:
    """Inside, the log of all stages is shown on stderr."""
    level = logging.DEBUG if verbose else logging.INFO
    if quiet:
        level = logging.WARNING
    bars = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not quiet
    handler = BarHandler(level) if bars else PlainHandler(level)
    logger = logging.getLogger("infini_llama")
    logger.setLevel(logging.DEBUG if bars else level)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        handler.close()


def summary_text(summary: "RunSummary") -> str:
    """Summary of a finished run, for the console."""
    from infini_llama.tasks.formatting import NATS_PER_BIT

    loss = summary.validation_loss
    bits = summary.unigram_entropy_bits
    validation = (
        "not finite or not measured" if loss is None else f"{loss:.4f} nats per token"
    )
    if loss is not None and bits is not None:
        entropy = bits * NATS_PER_BIT
        side = "below" if loss < entropy else "ABOVE"
        validation += (
            f", {abs(entropy - loss):.2f} {side} the unigram entropy of {entropy:.4f}"
        )
    state = "had already finished" if summary.already_finished else "finished"
    targets = (
        ""
        if summary.tokens == summary.input_tokens
        else f" read, of which {summary.tokens:,} are targets"
    )
    training = (
        f"{summary.run} {state}: {summary.steps:,} steps, "
        f"{summary.input_tokens:,} tokens{targets}, {summary.tokens_per_second:,.0f} tokens/s"
    )
    rows: list[tuple[str, object]] = [("run", training), ("validation", validation)]
    if summary.bits_per_byte is not None:
        rows.append(("", f"{summary.bits_per_byte:.3f} bits per byte"))
    if summary.updates_left_out:
        rows.append(("", f"updates skipped: {summary.updates_left_out:,}"))
    rows += [
        ("checkpoint", summary.checkpoint),
        ("report", summary.paths.report),
        ("loss curve", summary.paths.loss_curve),
    ]
    if summary.samples:
        rows.append(("sample", ""))
    text = "\n".join(f"{name:<11} {value}".rstrip() for name, value in rows)
    return "\n".join((text, *summary.samples[:1]))
