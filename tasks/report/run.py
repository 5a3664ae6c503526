"""A run as a document, also of a run that continues.

It has results, curves, time, attempts, checkpoints, samples, data, model and machine.
"""

import logging
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml

from infini_llama.tasks.document import (
    Block,
    Detail,
    Document,
    bullets,
    cell,
    code,
    facts,
    section,
    subsection,
    table,
    text_block,
)
from infini_llama.tasks.formatting import (
    NATS_PER_BIT,
    Cells,
    control_rows,
    distance_rows,
    in_bytes,
    in_time,
    in_words,
    now,
    packed,
    passkey_rows,
    share,
    shown,
    side_by_side,
)
from infini_llama.tasks.records.evaluation import PasskeyResult
from infini_llama.tasks.records.manifest import SPLITS
from infini_llama.tasks.records.metrics import (
    PasskeyLine,
    PerplexityLine,
    SampleLine,
    ValidationLine,
)
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.report.charts import save_picture
from infini_llama.tasks.report.curves import (
    charts_of_evaluations,
    charts_of_run,
    loss_chart,
)
from infini_llama.tasks.report.dataset import built
from infini_llama.tasks.report.page import page
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.artifacts import EXPORT, has_all_files
from infini_llama.tasks.storage.files import write_atomic

log = logging.getLogger("infini_llama.report")
# Of each, the newest ones are shown.
MOST_VALIDATIONS = 40
MOST_ATTEMPTS = 20
MOST_SAMPLES = 3
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
    """Write loss.png and report.html into the folder of the run, and return their paths.

    A warning names evaluations that are missing. The flow calls it after the evaluation, while
    cards of the training are made before.

    Raises:
        ConfigError: it is the folder of no run.
    """
    run = RunReader(path)
    for kind in run.missing_evaluations:
        log.warning(
            "%s has no %s of its newest checkpoint, although evaluate.after_training lists it. "
            "Unless it is being made, run the same command again.",
            run.path,
            kind,
        )
    report = run.folder.report
    write_atomic(report, run_page(run))
    return loss_picture(run), report


def loss_picture(run: RunReader) -> Path:
    """Draw the loss curve as PNG into the folder of the run."""
    picture = run.folder.loss_curve
    save_picture(loss_chart(run), picture)
    return picture


def run_page(run: RunReader) -> str:
    return page(
        run_document(run), reload_every=RELOAD_EVERY if run.state == "running" else 0
    )


def run_document(run: RunReader, ended: str = "") -> Document:
    """The run up to now.

    Args:
        ended: one sentence on how training ended, where the caller knows it.
    """
    reached = (
        f"{cell(run.state)}; step {run.step:,} of {run.max_steps:,}; written {now()}"
    )
    attempts = list(reversed(run.attempts))
    samples = [
        f"Step {sample.step:,}:\n\n{text_block(sample.text)}"
        for sample in _newest_first(run.samples)
    ]
    config = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    parts = (
        cell(ended),
        reached,
        facts(headline(run)),
        *section(
            "Curves",
            *charts_of_run(run),
            Detail("Validation losses", table(_validations(run))),
        ),
        *section("Time", table(_time(run))),
        *section("Checkpoints", table(_checkpoints(run))),
        *section(
            "Attempts",
            _attempts(attempts[:MOST_ATTEMPTS]),
            Detail("Earlier attempts", _attempts(attempts[MOST_ATTEMPTS:])),
        ),
        *section("Evaluations", *_evaluations(run)),
        *section(
            "Samples",
            *samples[:MOST_SAMPLES],
            Detail("Earlier samples", "\n\n".join(samples[MOST_SAMPLES:])),
        ),
        *section("Data", facts(data_card(run)), *_rows_and_filters(run)),
        *section(
            "Model",
            facts(_model(run)),
            Detail("Architecture in full", facts(run.lineage.model.to_dict())),
        ),
        *section("Environment", *_environment(run)),
        *section(
            "Files",
            _places(run.path),
            Detail("config.yaml", text_block(config, len(config))),
        ),
    )
    return Document(f"Run {run.name}", tuple(filter(None, parts)))


def headline(run: RunReader) -> dict[str, str]:
    """The most important numbers that the run has."""
    results = run.results
    last = run.validated[-1] if run.validated else None
    before = run.before_training
    loss = results.train_loss
    best = results.best_validation_loss
    bits = results.bits_per_byte
    speed = results.tokens_per_second
    wall = results.seconds
    other_targets = results.tokens != results.input_tokens
    without = results.steps_without_targets
    numbers = {
        "validation loss before the first step": before
        and ("not finite" if before.loss is None else f"{before.loss:.4f}"),
        "training loss, nats per token": None if loss is None else f"{loss:.4f}",
        "validation loss, nats per token": last and measured(last),
        "best validation loss": None if best is None else f"{best:.4f}",
        "bits per byte": None if bits is None else f"{bits:.3f}",
        "parameters": results.parameters and f"{results.parameters:,}",
        "tokens read": f"{results.input_tokens:,}" if run.trained else None,
        "targets among them": f"{results.tokens:,}" if other_targets else None,
        "steps without targets": f"{results.steps_without_targets:,}"
        if without
        else None,
        "tokens per second": speed and f"{speed:,.0f}",
        "MFU": None if results.mfu is None else share(results.mfu),
        "goodput": share(results.goodput) if wall else None,
        "since the first attempt": in_time(wall) if wall else None,
    }
    return {name: text for name, text in numbers.items() if isinstance(text, str)}


def measured(line: ValidationLine) -> str:
    """A validation loss in words."""
    if line.loss is not None:
        return f"{line.loss:.4f}"
    return "not measured: no targets" if line.tokens == 0 else "not finite"


def _validations(run: RunReader) -> list[Cells]:
    """The newest validations, the newest first."""
    return [
        {
            "step": line.step,
            "loss, nats per token": measured(line),
            "bits per byte": line.bits_per_byte,
        }
        for line in reversed(run.validated[-MOST_VALIDATIONS:])
    ]


def _time(run: RunReader) -> list[Cells]:
    """The time since the first attempt by part, the largest first."""
    spent = sorted(run.goodput.parts().items(), key=lambda part: -part[1])
    wall = run.goodput.wall
    return [
        {
            "part": name.replace("_", " "),
            "time": in_time(seconds),
            "share": share(seconds / wall),
        }
        for name, seconds in spent
        if wall and seconds >= 0.05
    ]


def _checkpoints(run: RunReader) -> list[Cells]:
    return [
        {
            "checkpoint": checkpoint.name,
            "validation loss, nats per token": (
                "not evaluated there"
                if checkpoint.validation_loss is None
                else f"{checkpoint.validation_loss:.4f}"
            ),
            "size": in_bytes(checkpoint.bytes),
            "": checkpoint.pointers,
        }
        for checkpoint in run.checkpoints
    ]


def _attempts(attempts: list[AttemptRecord]) -> str:
    rows = [
        {
            "attempt": record.attempt,
            "from step": record.from_step,
            "newest checkpoint": record.checkpoint_step,
            "took": in_time(record.seconds)
            if record.seconds is not None
            else "unknown",
            "end": f"{record.kind} ({record.code})",
        }
        for record in attempts
    ]
    why = bullets(
        f"attempt {record.attempt}: {cell(record.message)}"
        for record in attempts
        if record.code
    )
    return "\n\n".join(filter(None, (table(rows), why)))


def _evaluations(run: RunReader) -> Iterator[Block]:
    """Evaluations of the model: losses of text, and numbers found in it by length and depth."""
    texts = [line for line in run.evaluations if isinstance(line, PerplexityLine)]
    passkeys = [line for line in run.evaluations if isinstance(line, PasskeyLine)]
    yield table(list(_losses(texts)))
    yield subsection(
        "Passkey: numbers found, by length and depth",
        table(list(_passkeys(passkeys, passkey_rows))),
    )
    yield subsection(
        "Passkey: numbers found, by segment boundaries",
        table(list(_passkeys(passkeys, distance_rows))),
    )
    yield subsection(
        "Passkey: numbers found with a memory that is not the text's own",
        table(list(_controls(passkeys))),
    )
    yield from charts_of_evaluations(run)


def _losses(lines: Iterable[PerplexityLine]) -> Iterator[Cells]:
    for line in lines:
        for words, result in line.measurements():
            losses = in_words(
                result.model_dump(include={"loss", "perplexity", "bits_per_byte"})
            )
            yield {
                "step": line.step,
                "": words,
                **losses,
                "text": shown(line.text),
            }


def _passkeys(
    lines: Iterable[PasskeyLine],
    rows_of: Callable[[Iterable[PasskeyResult]], list[dict[str, object]]],
) -> Iterator[Cells]:
    for line in lines:
        for words, cells in line.measurements():
            about = {
                "step": line.step,
                "": words,
                "form": line.form,
                "filler": line.filler,
            }
            yield from (about | row for row in rows_of(cells))


def _controls(lines: Iterable[PasskeyLine]) -> Iterator[Cells]:
    for line in lines:
        yield from (
            {"step": line.step, **row} for row in control_rows(line.memory or ())
        )


def _newest_first(samples: list[SampleLine]) -> list[SampleLine]:
    """Samples by step, the newest first; those of one step in the order of their prompts."""
    return sorted(samples, key=lambda sample: -sample.step)


def data_card(run: RunReader) -> Cells:
    """The text, as the dataset's manifests describe it."""
    dataset = run.lineage.dataset
    if not run.dataset:
        return {
            "dataset": dataset.path,
            "digest": dataset.digest,
            "row length": f"{dataset.sequence_length:,} tokens",
            "note": "the dataset was moved or removed, or is damaged; only the run's own records "
            "of it are shown",
        }
    tokens = run.dataset.tokens
    rows = run.dataset.rows.content
    content = tokens.content
    text = run.lineage.text
    counts = {
        split: f"{content[split].documents:,} documents, {in_bytes(content[split].bytes)} of text, "
        f"{content[split].tokens:,} tokens, {rows.rows[split]:,} sequences"
        for split in SPLITS
    }
    width = content.train.bytes / content.train.tokens
    bits = run.dataset.rows.meta.unigram_entropy_bits
    entropy = (
        ""
        if bits is None
        else f"{bits * NATS_PER_BIT:.3f} nats per target (validation)"
    )
    return {
        "dataset": dataset.path,
        "source": text.source,
        "license": text.license,
        "training": counts[SPLITS[0]],
        "validation": counts[SPLITS[1]],
        "vocabulary": f"{content.vocab_size:,} tokens, {width:.2f} bytes each",
        "unigram entropy": entropy,
        "sequences": f"{rows.sequence_length:,} tokens, {rows.strategy}",
        "built": built(tokens.created, tokens.meta.workers),
        "digest": tokens.digest,
    }


def _rows_and_filters(run: RunReader) -> Iterator[Block]:
    """Figures of how well the rows are filled, and what was left out of the text."""
    if run.dataset:
        costs = run.dataset.rows.meta.packing
        yield table(
            side_by_side({split: packed(costs[split]) for split in SPLITS})
            if costs
            else []
        )
    yield Detail(
        "Records read and skipped", facts(in_words(dict(run.lineage.text.left_out)))
    )


def _model(run: RunReader) -> Cells:
    model = run.lineage.model.to_dict()
    result = run.result
    return {
        "parameters": result.parameters if result else None,
        "architecture": {name: model[name] for name in ARCHITECTURE if name in model},
        "started from": dict(run.lineage.init_from) if run.lineage.init_from else None,
        "weights (sha256)": result.weights_sha256 if result else None,
    }


def _environment(run: RunReader) -> Iterator[Block]:
    record = run.environment
    if not record:
        return
    machine = record.facts
    plan = record.plan
    about = {
        "machine": f"{machine.host}, {machine.platform}",
        "CPU": f"{machine.cpu.model}, {machine.cores} usable core(s)",
        "GPUs": [gpu.name for gpu in machine.gpus],
        "memory": in_bytes(machine.memory.total) if machine.memory.total else None,
        "Python": machine.python,
    }
    settings = {
        name: value for name, value in plan if not isinstance(value, dict | tuple)
    }
    yield facts(about | in_words(settings))
    yield table([choice.to_json() for choice in plan.choices])
    yield table(
        [{"patch": patch.name, "fixes": patch.fault} for patch in record.patches]
    )
    versions = (facts(machine.versions), facts(plan.env))
    yield Detail(
        "Versions and environment variables", "\n\n".join(filter(None, versions))
    )


def _places(path: Path) -> str:
    places: dict[str, object] = {
        "run folder": path,
        "report": path / "report.html",
        "logs of the workers": path / "logs",
    }
    if (path / "tensorboard").is_dir():
        folder = shlex.quote(str(path / "tensorboard"))
        places["TensorBoard"] = f"tensorboard --logdir {folder}"
    if has_all_files(path / EXPORT, EXPORT):
        places["export for transformers"] = path / EXPORT
    return bullets(f"{name}: {code(place)}" for name, place in places.items())
