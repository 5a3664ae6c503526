"""Datasets, runs and reports as text tables; --json prints the same records."""

import sys
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infini_llama.tasks.records.evaluation import PasskeyRetrieval, Perplexity

WIDTH = 140  # maximum columns of a table, and the width without a terminal


def describe_run(path: Path) -> dict:
    """Progress, losses, checkpoints and attempts of a run, from its folder."""
    from infini_llama.tasks.runs import checkpoints
    from infini_llama.tasks.runs.run_folder import RunFolder, attempts, read_metrics

    run = RunFolder(path)
    lineage, records = run.require_lineage(), read_metrics(run)
    trained = [record for record in records if record["kind"] == "train"]
    best = checkpoints.best(run.checkpoints)
    return {
        "run": path.name,
        "finished": run.summary.exists(),
        "dataset": lineage.dataset.path,
        "model": lineage.model,
        "step": trained[-1]["step"] if trained else 0,
        "train_loss": trained[-1]["loss"] if trained else None,
        "validation": [record for record in records if record["kind"] == "validation"],
        "checkpoints": [
            {
                "step": checkpoints.step_of(folder),
                "validation_loss": loss,
                "best": folder == best,
            }
            for folder, loss in checkpoints.losses(run.checkpoints).items()
        ],
        "attempts": [attempt.model_dump(mode="json", exclude_unset=True) for attempt in attempts(run)],
        "summary": run.read_or_rebuild(run.summary) or None,
    }


def run_text(record: dict) -> str:
    """A run as text: of each attempt, what fits a terminal; --json has all."""
    kept = ("attempt", "kind", "code", "from_step", "checkpoint_step", "seconds", "message")
    attempts = [_spaced({name: attempt.get(name) for name in kept}) for attempt in record["attempts"]]
    shown = {name: value for name, value in record.items() if name not in ("model", "summary")}
    shown |= {"validation": [_spaced(one) for one in record["validation"]], "attempts": attempts}
    shown |= {
        "checkpoints": [_spaced(one) for one in record["checkpoints"]],
        "summary": _spaced(record["summary"] or {}),
    }
    return as_text(_spaced({name: value for name, value in shown.items() if value} | {"model": record["model"]}))


def _spaced(facts: dict) -> dict:
    """Names of fields as words."""
    return {name.replace("_", " "): value for name, value in facts.items()}


DATASET_WORDS = {"unigram_entropy_bits": "entropy, bits", "p5": "5th percentile", "p95": "95th percentile"}


def dataset_text(record: dict) -> str:
    """A dataset as text: one line per split, and one per row table of a split."""
    from infini_llama.tasks.formatting import packed

    lengths = {
        split: {DATASET_WORDS.get(name, name): value for name, value in facts["document_tokens"].items()}
        for split, facts in record["splits"].items()
    }
    splits = {
        split: _spaced(
            {DATASET_WORDS.get(name, name): value for name, value in facts.items() if name != "document_tokens"}
        )
        for split, facts in record["splits"].items()
    }
    tables = [
        {
            "table": name,
            "strategy": table["strategy"],
            "sequence length": table["sequence_length"],
            "split": split,
            "rows": rows,
            **packed(table["packing"].get(split, {})),
        }
        for name, table in record["chunks"].items()
        for split, rows in table["rows"].items()
    ]
    shown = {key: value for key, value in record.items() if key not in ("chunks", "left_out", "samples")}
    shown |= {"splits": splits, "tokens per document": lengths, "row tables": tables}
    return as_text(_spaced(shown) | {"skipped": _spaced(record["left_out"]), "samples": record["samples"]})


ESTIMATE_WORDS = {
    "of_matrices": "in matrices",
    "tokens_a_step": "tokens per step",
    "flops": "FLOPs",
    "batches": "data batches",
    "checkpoint_copy": "copy for background saves",
    "process": "interpreter and libraries",
    "holes": "kept by the allocator",
}


def estimate_text(record: dict) -> str:
    """An estimate with units: FLOPs in powers of ten, bytes in MB or GB."""
    flops = {name: f"{value:.3g}" for name, value in record["flops_per_token"].items()}
    layout = record["layout"]
    memory = {ESTIMATE_WORDS.get(part, part): _bytes(size) for part, size in record["memory"].items()}
    run = record["run"] | {"flops": f"{record['run']['flops']:.3g}"}
    where = f"memory of one of {layout['workers']} worker(s) on {layout['device']}, {layout['precision']}"
    return as_text(
        {
            "parameters": {ESTIMATE_WORDS.get(name, name): count for name, count in record["parameters"].items()},
            "FLOPs per token, forward and backward": flops,
            "run": {ESTIMATE_WORDS.get(name, name): value for name, value in run.items()},
            where: memory,
            "on disk": {"checkpoint": _bytes(record["checkpoint"])},
        }
    )


MEASURED = {"model": "", "memory": "with memory", "no_memory": "without memory"}


def evaluation_text(record: "Perplexity") -> str:
    """Results of `evaluate`: one line with and one without memory, and the losses by position."""
    found = {words: one for name, words in MEASURED.items() if (one := getattr(record, name)) is not None}
    shown = record.model_dump(include={"run", "checkpoint", "text", "stream"})
    kept = {"loss", "perplexity", "bits_per_byte", "tokens"}
    shown["measured"] = [{"": words} | one.model_dump(include=kept) for words, one in found.items()]
    parts = {words: one.loss_by_part for words, one in found.items() if one.loss_by_part}
    if parts:
        size = next(iter(found.values())).part
        count = len(next(iter(parts.values())))
        rows = [
            {"tokens": f"{at * size + 1}-{(at + 1) * size}"}
            | {words or "loss": losses[at] for words, losses in parts.items()}
            for at in range(count)
        ]
        shown["loss by position"] = rows
    return as_text(shown)


def passkey_text(record: "PasskeyRetrieval") -> str:
    """Fraction of passkeys found: one line per length, one column per depth; or one line per number of segment ends."""
    shown = record.model_dump(include={"run", "checkpoint", "trained_length", "samples"})
    for name, words in MEASURED.items():
        if (cells := getattr(record, name)) is not None:
            lines: dict[int, dict] = {}
            for one in cells:
                if one.right_by_token is not None:
                    tokens = " ".join(f"{share:.0%}" for share in one.right_by_token)
                    lines[len(lines)] = {
                        "segment ends": one.segments,
                        "tokens": one.tokens,
                        "found": f"{one.found:.0%}",
                        "by token": tokens,
                    }
                    continue
                line = lines.setdefault(one.length, {"tokens": one.tokens})
                line[f"depth {one.depth:g}"] = f"{one.found:.0%}"
            shown[f"found {words}".strip()] = list(lines.values())
    return as_text(shown)


def runs_text(runs: list[dict]) -> str:
    """One line per run, with units for ages and sizes."""
    from infini_llama.tasks.formatting import in_bytes, in_time

    rows = [
        {
            "run": run["run"],
            "state": run["state"],
            "step": f"{run['step']:,}/{run['max_steps']:,}",
            "loss": run["train_loss"],
            "validation": run["validation_loss"],
            "last activity": f"{in_time(run['age'])} ago",
            "size": in_bytes(run["bytes"]),
        }
        for run in runs
    ]
    return as_text({"runs": rows})


def leftovers_text(record: dict) -> str:
    """What `gc` found, and what it deleted or would delete."""
    from infini_llama.tasks.formatting import in_bytes

    files = [file | {"bytes": in_bytes(file["bytes"])} for file in record["files"]]
    tables = {"unreferenced files": files, "in use and kept": record["in_use"]}
    text = as_text({part: rows for part, rows in tables.items() if rows})
    if not files:
        return f"{text}\n\nnothing to delete".strip()
    action = "deleted" if record["removed"] else "to delete with --yes"
    return f"{text}\n\n{len(files)} {action}, {in_bytes(record['bytes'])}"


def _bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def as_text(record: dict) -> str:
    """A record as text: simple values first, then one table per collection of records and one block per longer text."""
    from rich.console import Console

    target = StringIO()
    width = min(WIDTH, get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH
    console = Console(file=target, width=width, highlight=False, markup=False, emoji=False, color_system=None)
    console.print(_facts({key: value for key, value in record.items() if not _nested(value)}))
    for key, value in record.items():
        if not _nested(value):
            continue
        console.print(f"\n{key}")
        if isinstance(value, dict):
            console.print(
                _table([{"": name} | facts for name, facts in value.items()])
                if _all_dicts(value.values())
                else _facts(value)
            )
        elif _all_dicts(value):
            console.print(_table(value))
        else:
            for text in value:
                console.rule(style="none")
                console.print(text)
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()).strip()


def _nested(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, dict) or "\n" in str(item) for item in value)
    )


def _all_dicts(values: Iterable) -> bool:
    return all(isinstance(value, dict) for value in values)


def _facts(record: dict) -> Any:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in record.items():
        table.add_row(str(key), _cell(value))
    return table


def _table(records: list[dict]) -> Any:
    from rich import box
    from rich.table import Table

    columns = list(dict.fromkeys(key for record in records for key in record))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")  # long words continue on the next line; nothing is cut
    for record in records:
        table.add_row(*(_cell(record.get(column)) for column in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_cell(item)}" for key, item in value.items())
    return str(value)
