"""Compares runs: differences in configuration, results, and curves."""

import logging
from pathlib import Path

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import JsonObject, dotted
from infini_llama.tasks.document import Document, section, table
from infini_llama.tasks.formatting import in_bytes, in_time, now, share, side_by_side
from infini_llama.tasks.records.summary import Comparison
from infini_llama.tasks.report.charts import LIGHT
from infini_llama.tasks.report.curves import charts_of_runs
from infini_llama.tasks.runs.run_reader import RunReader

log = logging.getLogger("infini_llama.compare")
MOST = len(LIGHT)  # as many as there are colours
OWN = ("runtime.name", "runtime.home")  # differ without a difference
NOT_THE_SAME = (
    "The validation losses are not of the same sequences; if text or tokenizer differ, compare "
    "only bits per byte of the same text."
)


def open_runs(paths: list[Path]) -> dict[str, RunReader]:
    """Open the runs in these folders, by name.

    Raises:
        ConfigError: fewer than two runs, too many to distinguish, or one of them twice.
    """
    if not 2 <= len(paths) <= MOST:
        raise ConfigError(f"compare was given {len(paths)} run(s); give 2 to {MOST}.")
    runs = {path.name: RunReader(path) for path in paths}
    if len(runs) < len(paths):
        raise ConfigError(
            "compare was given two runs with the same name; give runs with different names."
        )
    return runs


def compare(runs: dict[str, RunReader]) -> Comparison:
    """The runs' results, and every setting, plan and dataset in which any two differ.

    Raises:
        ConfigError: a folder is that of no run.
    """
    unplanned = [name for name, run in runs.items() if run.environment is None]
    if 0 < len(unplanned) < len(runs):
        log.warning(
            "%s: environment.json is missing, so the settings of its plan are not compared.",
            ", ".join(unplanned),
        )
    settings = {name: _settings(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for of_run in settings.values() for key in of_run)
    beside = {
        key: {name: of_run.get(key) for name, of_run in settings.items()}
        for key in keys
    }
    first = next(iter(runs))
    differences = {
        key: values
        for key, values in beside.items()
        if any(value != values[first] for value in values.values())
    }
    datasets = [run.lineage.dataset for run in runs.values()]
    rows = {(dataset.digest, dataset.row_table_digest) for dataset in datasets}
    sequences = {run.lineage.train.eval_tokens for run in runs.values()}
    return Comparison(
        runs={name: run.results for name, run in runs.items()},
        differences=differences,
        same_validation=len(rows) == len(sequences) == 1,
    )


def comparison_document(runs: dict[str, RunReader], comparison: Comparison) -> Document:
    """The result of `compare` for these runs, with their curves."""
    differences = [
        {"": key, **values} for key, values in comparison.differences.items()
    ]
    parts = (
        f"Written {now()}."
        + ("" if comparison.same_validation else f" {NOT_THE_SAME}"),
        *section("Results", table(columns_of_runs(comparison))),
        *section("Differences", table(differences) or "None."),
        *section("Curves", *charts_of_runs(list(runs.values()))),
    )
    return Document(", ".join(runs), parts)


def columns_of_runs(comparison: Comparison) -> list[dict[str, object]]:
    """A row for each number, with a column for each run; numbers that no run has are left out."""
    formats = {
        "mfu": ("MFU", share),
        "goodput": ("goodput", share),
        "seconds": ("time", in_time),
        "step_seconds": ("time in steps", in_time),
        "age": ("since last activity", in_time),
        "bytes": ("size", in_bytes),
    }
    columns: dict[str, dict[str, object]] = {}
    for run, results in comparison.runs.items():
        column = columns.setdefault(run, {})
        for name, value in results.model_dump(exclude={"run", "dataset"}).items():
            words, form = formats.get(
                name, (name.replace("_", " "), lambda value: value)
            )
            column[words] = None if value is None else form(value)
    rows = side_by_side(columns)
    return [row for row in rows if any(row[run] is not None for run in columns)]


def _settings(run: RunReader) -> JsonObject:
    """Dotted keys of the configuration, of the machine's plan for it, and the dataset's digest."""
    settings = {
        key: value for key, value in dotted(run.config).items() if key not in OWN
    }
    plan = run.environment.plan.to_json() if run.environment else {}
    planned = {
        f"plan.{key}": value
        for key, value in plan.items()
        if not isinstance(value, dict | list)
    }
    dataset: JsonObject = {
        "dataset": run.lineage.dataset.path,
        "dataset.digest": run.lineage.dataset.digest,
    }
    return settings | planned | dataset
