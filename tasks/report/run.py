"""The report of a run, report.html: results, data, speed, attempts. Written when a run ends, or any time by `infini-llama report`."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import yaml

from infini_llama.tasks.formatting import (
    NATS_PER_BIT,
    Cells,
    control_rows,
    distance_rows,
    in_bytes,
    in_time,
    in_words,
    packed,
    passkey_rows,
    shown,
    side_by_side,
)
from infini_llama.tasks.records.manifest import SPLITS
from infini_llama.tasks.records.metrics import PasskeyLine, PerplexityLine
from infini_llama.tasks.report import page
from infini_llama.tasks.report.charts import figures, save_picture
from infini_llama.tasks.report.curves import charts_of_evaluations, charts_of_run, loss_chart
from infini_llama.tasks.runs.record import DatasetManifests, RunRecord
from infini_llama.tasks.storage.artifacts import write_atomic

MOST_VALIDATIONS = 40
RELOAD_EVERY = 30  # seconds, of the page of a running run
ARCHITECTURE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "attention",
)


def write_report(path: Path) -> tuple[Path, Path]:
    """Writes loss.png and report.html into the folder of the run, and returns their paths.

    Raises:
        ConfigError: it is the folder of no run.
    """
    run = RunRecord(path)
    report = path / "report.html"
    write_atomic(report, run_page(run))
    return loss_picture(run), report


def loss_picture(run: RunRecord) -> Path:
    """The loss curve as PNG in the folder of the run; drawn again only if there are newer metrics."""
    picture, metrics = run.path / "loss.png", run.path / "metrics.jsonl"
    is_new = picture.exists() and metrics.exists() and picture.stat().st_mtime >= metrics.stat().st_mtime
    if not is_new:
        save_picture(loss_chart(run), picture)
    return picture


def run_page(run: RunRecord) -> str:
    config = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    return page.page(
        f"Run {run.name}",
        f"<h1>Run {page.text(run.name)}</h1>",
        f'<p class="note">{page.text(run.state)}; step {run.step:,} of {run.max_steps:,}; written {page.now()}</p>',
        page.tiles(headline(run)),
        page.section(
            "Curves",
            figures(charts_of_run(run)),
            page.details("Validation losses", page.table(_validations(run))),
        ),
        page.section("Time", _time(run)),
        page.section("Evaluations", *_evaluations(run)),
        page.section("Samples", *_samples(run)),
        page.section("Data", page.facts(data_card(run)), *(_rows_and_filters(run.dataset) if run.dataset else ())),
        page.section(
            "Model",
            page.facts(_model(run)),
            page.details("Architecture in full", page.facts(run.lineage.model.to_dict())),
        ),
        page.section("Environment", *_environment(run)),
        page.section("Checkpoints", page.table(_checkpoints(run))),
        page.section("Attempts", page.table(_attempts(run))),
        page.section("Configuration", page.details("config.yaml", page.preformatted(config))),
        reload_every=RELOAD_EVERY if run.state == "running" else 0,
    )


def headline(run: RunRecord) -> dict[str, str]:
    """The most important numbers that the run has."""
    losses, last = run.train_losses, run.validated[-1] if run.validated else None
    bits, speed = last and last.bits_per_byte, run.tokens_per_second
    mfu, wall = run.trained[-1].mfu if run.trained else None, run.goodput.wall
    found = {
        "training loss, nats per token": f"{losses[-1]:.4f}" if losses else None,
        "validation loss, nats per token": last and ("not finite" if last.loss is None else f"{last.loss:.4f}"),
        "bits per byte": None if bits is None else f"{bits:.3f}",
        "parameters": run.result and run.result.parameters and f"{run.result.parameters:,}",
        "tokens seen": f"{run.tokens:,}" if run.trained else None,
        "tokens per second": speed and f"{speed:,.0f}",
        "MFU": None if mfu is None else f"{mfu:.1%}",
        "goodput": f"{run.goodput.share:.1%}" if wall else None,
        "since the first attempt": in_time(wall) if wall else None,
    }
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _validations(run: RunRecord) -> list[Cells]:
    """The last ones, the newest first."""
    return [
        {"step": line.step, "loss, nats per token": line.loss, "bits per byte": line.bits_per_byte}
        for line in reversed(run.validated[-MOST_VALIDATIONS:])
    ]


def _time(run: RunRecord) -> str:
    parts = {name.replace("_", " "): seconds for name, seconds in run.goodput.parts().items()}
    return page.parts_of_a_whole(dict(sorted(parts.items(), key=lambda part: -part[1])), "s")


def _evaluations(run: RunRecord) -> list[str]:
    """What was measured of the model by itself: losses of text, and numbers found in it by length and depth."""
    losses = chain.from_iterable(_losses(line) for line in run.evaluations if isinstance(line, PerplexityLine))
    found = list(chain.from_iterable(_passkeys(line) for line in run.evaluations if isinstance(line, PasskeyLine)))
    across = list(chain.from_iterable(_distances(line) for line in run.evaluations if isinstance(line, PasskeyLine)))
    heading = "<h3>Passkey: numbers found, by length and depth</h3>" if found else ""
    far = "<h3>Passkey: numbers found, by segment boundaries</h3>" if across else ""
    drawn = figures(charts_of_evaluations(run))
    pictures = f"<h3>By distance and part</h3>{drawn}" if drawn else ""
    controls = list(chain.from_iterable(_controls(line) for line in run.evaluations if isinstance(line, PasskeyLine)))
    swapped = "<h3>Passkey: numbers found with a memory that is not the text's own</h3>" if controls else ""
    tables = [heading, page.table(found), far, page.table(across), swapped, page.table(controls)]
    return [page.table(list(losses)), *tables, pictures]


def _losses(line: PerplexityLine) -> Iterator[Cells]:
    for words, measured in line.measurements():
        kept = in_words(measured.model_dump(include={"loss", "perplexity", "bits_per_byte"}))
        yield {"step": line.step, "": words, **kept, "text": shown(line.text)}


def _passkeys(line: PasskeyLine) -> Iterator[Cells]:
    for words, cells in line.measurements():
        yield from ({"step": line.step, "": words, **row} for row in passkey_rows(cells))


def _distances(line: PasskeyLine) -> Iterator[Cells]:
    for words, cells in line.measurements():
        about = {"step": line.step, "": words, "form": line.form, "filler": line.filler}
        yield from (about | row for row in distance_rows(cells))


def _controls(line: PasskeyLine) -> Iterator[Cells]:
    yield from ({"step": line.step, **row} for row in control_rows(line.memory or ()))


def _samples(run: RunRecord) -> Iterator[str]:
    """Texts by step, the newest first."""
    for step in sorted({sample.step for sample in run.samples}, reverse=True):
        yield f"<h3>Step {step:,}</h3>"
        yield from (page.preformatted(sample.text) for sample in run.samples if sample.step == step)


def data_card(run: RunRecord) -> Cells:
    """What the dataset's manifests say of the text."""
    dataset = run.lineage.dataset
    if not run.dataset:
        return {
            "dataset": dataset.path,
            "digest": dataset.digest,
            "row length": f"{dataset.sequence_length:,} tokens",
            "note": "the dataset was moved or removed, or is damaged; only the run's own records of it are shown",
        }
    tokens, rows = run.dataset.tokens, run.dataset.rows.content
    content, meta = tokens.content, tokens.meta
    counts = {
        split: f"{content[split].documents:,} documents, {in_bytes(content[split].bytes)} of text, "
        f"{content[split].tokens:,} tokens, {rows.rows[split]:,} sequences"
        for split in SPLITS
    }
    width = content.train.bytes / content.train.tokens
    return {
        "dataset": dataset.path,
        "source": meta.source,
        "license": meta.license,
        "training": counts[SPLITS[0]],
        "validation": counts[SPLITS[1]],
        "vocabulary": f"{content.vocab_size:,} tokens, {width:.2f} bytes each",
        "unigram entropy": f"{content.validation.unigram_entropy_bits * NATS_PER_BIT:.3f} nats per token (validation)",
        "sequences": f"{rows.sequence_length:,} tokens, {rows.strategy}",
        "built": tokens.created,
        "digest": tokens.digest,
    }


def _rows_and_filters(dataset: DatasetManifests) -> list[str]:
    """How well the rows are filled, and what was left out of the text."""
    costs = dataset.rows.meta.packing
    return [
        page.table(side_by_side({split: packed(costs[split]) for split in SPLITS}) if costs else []),
        page.details("Records read and skipped", page.facts(in_words(dict(dataset.tokens.meta.left_out)))),
    ]


def _model(run: RunRecord) -> Cells:
    model, result = run.lineage.model.to_dict(), run.result
    return {
        "parameters": result.parameters if result else None,
        "architecture": {name: model[name] for name in ARCHITECTURE if name in model},
        "started from": dict(run.lineage.init_from) if run.lineage.init_from else None,
        "weights (sha256)": result.weights_sha256 if result else None,
    }


def _environment(run: RunRecord) -> list[str]:
    if not (record := run.environment):
        return []
    facts, plan = record.facts, record.plan
    machine = {
        "machine": f"{facts.host}, {facts.platform}",
        "CPU": f"{facts.cpu.model}, {facts.cores} usable core(s)",
        "GPUs": [gpu.name for gpu in facts.gpus],
        "memory": in_bytes(facts.memory.total) if facts.memory.total else None,
        "Python": facts.python,
    }
    settings = {name: value for name, value in plan or () if not isinstance(value, dict | tuple)}
    patches = [{"patch": patch.name, "fixes": patch.fault} for patch in record.patches]
    versions = page.facts(facts.versions) + page.facts(plan.env if plan else {})
    return [
        page.facts(machine | in_words(settings)),
        page.table(patches),
        page.details("Versions and environment variables", versions),
    ]


def _checkpoints(run: RunRecord) -> list[Cells]:
    return [
        {
            "checkpoint": one.name,
            "validation loss": one.validation_loss,
            "size": in_bytes(one.bytes),
            "": one.pointers,
        }
        for one in run.checkpoints
    ]


def _attempts(run: RunRecord) -> list[Cells]:
    return [
        {
            "attempt": record.attempt,
            "from step": record.from_step,
            "newest checkpoint": record.checkpoint_step,
            "took": in_time(record.seconds) if record.seconds is not None else None,
            "end": f"{record.kind} ({record.code})",
            "": record.message,
        }
        for record in run.attempts
    ]
