"""How training went, as Markdown for Prefect's page of the run: from the run's folder, whether it finished or not."""

import base64
from pathlib import Path

from infini_llama.tasks.formatting import NATS_PER_BIT, cell, in_bytes, in_time, shown, table, text_block
from infini_llama.tasks.report.run import headline, loss_picture
from infini_llama.tasks.runs.record import RunRecord

SHOWN_ATTEMPTS = 20


def card(path: Path, ended: str) -> str:
    """Loss curve, metrics, checkpoints, where the time went, attempts, what the model writes, and where everything is.

    Args:
        path: of the run's folder.
        ended: one sentence: how training ended.
    """
    lines = [f"## Run {path.name}", "", cell(ended), ""]
    if not (path / "lineage.json").exists():  # refused before it began
        return "\n".join(lines)
    run = RunRecord(path)
    if run.trained:
        inside = base64.b64encode(loss_picture(run).read_bytes()).decode()  # needs neither network nor file
        lines += [f"![Training and validation loss against the step](data:image/png;base64,{inside})", ""]
    lines += ["### Metrics", "", *table(("metric", "value"), _metrics(run))]
    lines += ["### Checkpoints", "", *_checkpoints(run)]
    if run.goodput.wall:
        lines += ["### Time", "", *_time(run)]
    lines += ["### Attempts", "", *_attempts(run)]
    if run.samples:
        lines += ["### Samples", ""]
        for sample in run.samples[-3:]:
            lines += [f"Step {sample.step:,}:", "", *text_block(sample.text)]
    # Not in a table, whose cells Prefect does not wrap.
    lines += ["### Paths", "", *(f"- {name}: `{place}`" for name, place in _places(path))]
    return "\n".join(lines)


def _metrics(run: RunRecord) -> list[tuple[str, str]]:
    rows = [("step", f"{run.step:,} of {run.max_steps:,}"), *headline(run).items()]
    if losses := run.validation_losses:
        rows.append(("best validation loss, nats per token", f"{min(losses):.4f}"))
    if run.dataset:
        entropy = run.dataset.tokens.content.validation.unigram_entropy_bits
        rows.append(("unigram entropy, nats per token", f"{entropy * NATS_PER_BIT:.3f}"))
    if run.result and run.result.weights_sha256:
        rows.append(("weights (sha256)", f"`{run.result.weights_sha256}`"))
    return rows


def _checkpoints(run: RunRecord) -> list[str]:
    rows = [
        (
            one.name,
            "not evaluated there" if one.validation_loss is None else f"{one.validation_loss:.4f}",
            in_bytes(one.bytes),
            one.pointers,
        )
        for one in run.checkpoints
    ]
    heads = ("kept", "validation loss, nats per token", "size", "which")
    return table(heads, rows) if rows else ["None was committed.", ""]


def _time(run: RunRecord) -> list[str]:
    parts = {name.replace("_", " "): seconds for name, seconds in run.goodput.parts().items()}
    spent = sorted(((seconds, name) for name, seconds in parts.items() if seconds >= 0.05), reverse=True)
    wall = run.goodput.wall
    return table(("part", "time", "share"), ((name, in_time(s), f"{s / wall:.1%}") for s, name in spent))


def _attempts(run: RunRecord) -> list[str]:
    shown_attempts = run.attempts[-SHOWN_ATTEMPTS:]
    rows = [
        (
            record.attempt,
            shown(record.from_step),
            shown(record.checkpoint_step),
            in_time(record.seconds) if record.seconds is not None else "unknown",
            f"{record.kind} ({record.code})",
        )
        for record in shown_attempts
    ]
    why = [f"- attempt {record.attempt}: {cell(record.message)}" for record in shown_attempts if record.code]
    return [*table(("attempt", "from step", "newest checkpoint", "took", "end"), rows), *why, ""]


def _places(path: Path) -> list[tuple[str, str]]:
    return [
        ("run folder", str(path)),
        ("report", str(path / "report.html")),
        ("logs of the workers", str(path / "logs")),
        ("TensorBoard", f"tensorboard --logdir {path / 'tensorboard'}"),
    ]
