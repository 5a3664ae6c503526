"""Compares runs: differences in configuration, results, and curves."""

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.formatting import in_time, share
from infini_llama.tasks.report import page
from infini_llama.tasks.report.charts import Chart, Curve, figures
from infini_llama.tasks.runs.record import RunRecord

MOST = len(page.LIGHT)  # as many as there are colours
OWN = ("runtime.name", "runtime.home")  # differ without a difference


def compare(paths: list[Path]) -> dict[str, Any]:
    """The runs' results, and every setting, plan and dataset in which any two differ.

    Returns:
        {"runs": {name: results}, "differences": {key: {name: value}}, "same_validation": whether their validation losses are of
        the same rows of the same dataset}.

    Raises:
        ConfigError: fewer than two runs, more than can be told apart, one of them twice, or the folder of no run.
    """
    runs = _records(paths)
    settings = {name: _settings(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for one in settings.values() for key in one)
    beside = {key: {name: one.get(key) for name, one in settings.items()} for key in keys}
    differing = {
        key: values for key, values in beside.items() if any(v != next(iter(values.values())) for v in values.values())
    }
    rows = {(run.lineage.dataset.digest, run.lineage.dataset.chunks_digest) for run in runs.values()}
    sequences = {run.lineage.train.get("eval_sequences") for run in runs.values()}
    return {
        "runs": {name: results(run) for name, run in runs.items()},
        "differences": differing,
        "same_validation": len(rows) == len(sequences) == 1,
    }


def results(run: RunRecord) -> dict[str, Any]:
    """What came of a run so far, in numbers."""
    trained, validated = run.trained, run.validated
    losses = [record["loss"] for record in trained if record["loss"] is not None]
    measured = [record["loss"] for record in validated if record["loss"] is not None]
    seconds = sum(record["step_time"] for record in trained)
    return {
        "state": run.state,
        "step": run.step,
        "parameters": run.result.get("parameters"),
        "tokens": trained[-1]["tokens"] if trained else 0,
        "train_loss": losses[-1] if losses else None,
        "validation_loss": validated[-1]["loss"] if validated else None,
        "best_validation_loss": min(measured, default=None),
        "bits_per_byte": validated[-1]["bits_per_byte"] if validated else None,
        "tokens_per_second": trained[-1]["tokens"] / seconds if seconds else None,
        "mfu": trained[-1].get("mfu") if trained else None,
        "goodput": run.goodput.share,
        "seconds": run.goodput.wall,
        "attempts": len(run.attempts),
    }


def comparison_page(paths: list[Path], record: dict[str, Any]) -> str:
    """The page of `record`, which `compare` returned for the runs in these folders."""
    runs = _records(paths)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    warning = "" if record["same_validation"] else NOT_THE_SAME
    return page.page(
        "Runs compared",
        f"<h1>{page.text(', '.join(runs))}</h1>",
        f'<p class="note">written {now}. {warning}</p>',
        page.section("Results", page.table(columns_of_runs(record["runs"]))),
        page.section("Differences", page.table(rows_of_keys(record["differences"])) or "<p>None.</p>"),
        page.section("Curves", figures(_charts(list(runs.values())))),
    )


NOT_THE_SAME = (
    "The validation losses are not of the same sequences; if text or tokenizer differ, compare only bits per byte of the same "
    "text."
)


def columns_of_runs(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A record for each number, with a column for each run; numbers that no run has are left out."""
    names = list(dict.fromkeys(name for values in runs.values() for name in values))
    formats = {"mfu": ("MFU", share), "goodput": ("goodput", share), "seconds": ("time", in_time)}
    rows = []
    for name in names:
        words, form = formats.get(name, (name.replace("_", " "), lambda value: value))
        known = {run: None if values[name] is None else form(values[name]) for run, values in runs.items()}
        rows.append({"": words} | known)
    return [row for row in rows if any(value is not None for name, value in row.items() if name)]


def rows_of_keys(differences: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"": key} | values for key, values in differences.items()]


def _records(paths: list[Path]) -> dict[str, RunRecord]:
    if not 2 <= len(paths) <= MOST:
        raise ConfigError(f"compare was given {len(paths)} run(s); give 2 to {MOST}.")
    runs = {path.name: RunRecord(path) for path in paths}
    if len(runs) < len(paths):
        raise ConfigError("compare was given two runs with the same name; give runs with different names.")
    return runs


def _settings(run: RunRecord) -> dict[str, Any]:
    """Dotted keys of the configuration, of what the machine's plan made of it, and the dataset's digest."""
    config = _dotted(run.config, "")
    plan = run.environment.get("plan", {})
    planned = {f"plan.{key}": value for key, value in plan.items() if not isinstance(value, dict | list)}
    dataset = {"dataset": run.lineage.dataset.path, "dataset.digest": run.lineage.dataset.digest}
    return {key: value for key, value in config.items() if key not in OWN} | planned | dataset


def _dotted(section: dict[str, Any], before: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= _dotted(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


def _charts(runs: list[RunRecord]) -> list[Chart]:
    def chart(title: str, x_label: str, curve: Callable[[RunRecord], Curve]) -> Chart:
        return Chart(title, [curve(run) for run in runs], x_label)

    def trained(name: str, factor: float = 1.0) -> Callable[[RunRecord], Curve]:
        return lambda run: _curve(run, run.trained, name, lambda step: step, factor)

    def validated(name: str, place: Callable[[RunRecord], Callable[[int], float]]) -> Callable[[RunRecord], Curve]:
        return lambda run: _curve(run, run.validated, name, place(run), points=True)

    def gates(run: RunRecord) -> Curve:
        records = [record for record in run.trained if record.get("gates")]
        flat = [[g for layer in r["gates"] for g in (layer if isinstance(layer, list) else [layer])] for r in records]
        return Curve(run.name, [r["step"] for r in records], [sum(values) / len(values) for values in flat])

    return [
        chart("Training loss, nats per token", "step", trained("loss")),
        chart("Validation loss, nats per token", "tokens", validated("loss", tokens_at)),
        chart("Validation, bits per byte", "tokens", validated("bits_per_byte", tokens_at)),
        chart("Validation loss, nats per token", "seconds of steps", validated("loss", seconds_at)),
        chart("Learning rate", "step", trained("learning_rate")),
        chart("Gradient norm", "step", trained("grad_norm")),
        chart("Tokens per second", "step", trained("tokens_per_second")),
        chart("Model FLOPs utilization, %", "step", trained("mfu", 100)),
        chart("Mean share of memory in the output", "step", gates),
    ]


def _curve(
    run: RunRecord,
    records: list[dict[str, Any]],
    name: str,
    place: Callable[[int], float],
    factor: float = 1.0,
    points: bool = False,
) -> Curve:
    there = [record for record in records if record.get(name) is not None]
    x = [place(record["step"]) for record in there]
    return Curve(run.name, x, [record[name] * factor for record in there], "points" if points else "line")


def tokens_at(run: RunRecord) -> Callable[[int], float]:
    """Tokens seen by a step."""
    seen = {record["step"]: record["tokens"] for record in run.trained}
    return lambda step: seen.get(step, 0)


def seconds_at(run: RunRecord) -> Callable[[int], float]:
    """Time that the steps up to one took, without what is between them."""
    times = accumulate(record["step_time"] for record in run.trained)
    spent = dict(zip((record["step"] for record in run.trained), times, strict=True))
    return lambda step: spent.get(step, 0.0)
