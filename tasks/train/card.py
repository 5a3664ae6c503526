"""How a run went, as Markdown for Prefect's page of the run: read from the run's folder, whether it finished or not."""

import base64
import io
from pathlib import Path

from tasks.cards import cell, duration, table, text_block
from tasks.train import checkpoints
from tasks.train.report import draw_losses, time_spent
from tasks.train.run_folder import RunFolder, attempts, read_metrics

BITS = 1.4426950408889634
POINTS = 400  # of a curve: more make the picture larger, not clearer


def card(run: RunFolder, reference: dict, ended: str) -> str:
    """Loss curve, metrics, checkpoints, where the time went, attempts, what the model writes, and where everything is.

    Args:
        reference: of `preprocess.stage.preprocess`.
        ended: one sentence: how training ended.
    """
    records, summary = read_metrics(run), run.read(run.summary)
    lines = [f"## Run {run.path.name}", "", cell(ended), ""]
    if any(record["kind"] == "train" and record["loss"] is not None for record in records):
        curve = _picture(records, reference["validation"]["unigram_entropy_bits"])
        lines += [f"![Training and validation loss in bits a token against the step]({curve})", ""]
    lines += ["### Metrics", "", *table(("metric", "value"), _metrics(records, summary, reference))]
    lines += ["### Checkpoints", "", *_checkpoints(run)]
    if summary:
        lines += ["### Time", "", cell(time_spent(summary["goodput"])), ""]
    lines += ["### Attempts", "", *_attempts(run)]
    if summary:
        lines += ["### What the model writes", ""]
        for sample in (summary["sample"], *summary.get("samples", [])):
            lines += text_block(sample)
    places = [
        ("run folder", run.path),
        ("report", run.path / "report.html"),
        ("log of each worker", run.path / "logs"),
        ("TensorBoard", f"tensorboard --logdir {run.path / 'tensorboard'}"),
    ]
    lines += ["### Where it is", "", *table(("what", "where"), ((name, f"`{place}`") for name, place in places))]
    return "\n".join(lines)


def _picture(records: list[dict], unigram_entropy_bits: float) -> str:
    """The loss curve within the text itself, so that it needs neither network nor file."""
    trained = [record for record in records if record["kind"] == "train"]
    step = -(-len(trained) // POINTS)
    rest = [record for record in records if record["kind"] != "train"]
    drawn = io.BytesIO()
    draw_losses([*trained[::step], *rest], unigram_entropy_bits, drawn)
    return f"data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()}"


def _metrics(records: list[dict], summary: dict, reference: dict) -> list[tuple[str, str]]:
    trained = [record for record in records if record["kind"] == "train"]
    validated = [record for record in records if record["kind"] == "validation" and record["loss"] is not None]
    rows = [("steps", f"{trained[-1]['step']:,}" if trained else "0")]
    if trained:
        rows += [("tokens seen", f"{trained[-1]['tokens']:,}")]
        rows += [("training loss", _loss(trained[-1]["loss"]))]
    if validated:
        best = min(validated, key=lambda record: record["loss"])
        rows += [
            ("validation loss", _loss(validated[-1]["loss"])),
            ("best validation loss", f"{_loss(best['loss'])}, at step {best['step']:,}"),
            ("bits a byte", f"{validated[-1]['bits_per_byte']:.3f}"),
        ]
    rows += [("unigram entropy", f"{reference['validation']['unigram_entropy_bits']:.3f} bits a token")]
    if summary:
        rows += [
            ("parameters", f"{summary['parameters']:,}"),
            ("speed", f"{summary['tokens_per_second']:,.0f} tokens a second"),
            ("goodput", f"{summary['goodput']['share']:.0%} of the time since the first attempt was training"),
            ("updates left out", f"{summary['updates_left_out']:,}"),
            ("weights (sha256)", f"`{summary['weights_sha256']}`"),
        ]
    return rows


def _loss(nats: float | None) -> str:
    return "not finite" if nats is None else f"{nats:.4f} nats = {nats * BITS:.3f} bits a token"


def _checkpoints(run: RunFolder) -> list[str]:
    kept, best = checkpoints.committed(run.checkpoints), checkpoints.best(run.checkpoints)
    rows = []
    for number, path in enumerate(kept):
        marks = [name for name, is_it in (("newest", number == 0), ("best", path == best)) if is_it]
        loss = checkpoints.read_state(path)["validation_loss"]
        rows.append((path.name, "not evaluated there" if loss is None else _loss(loss), ", ".join(marks)))
    return table(("kept", "validation loss", "which"), rows) if rows else ["None was committed.", ""]


def _attempts(run: RunFolder) -> list[str]:
    rows = [
        (
            record["attempt"],
            f"step {record.get('from_step', 0):,}",
            f"step {record.get('checkpoint_step', 0):,}",
            duration(record["seconds"]) if "seconds" in record else "unknown",
        )
        for record in attempts(run)
    ]
    ends = [f"- attempt {record['attempt']}: {cell(record['message'])}" for record in attempts(run)]
    return [*table(("attempt", "from", "newest checkpoint at its end", "took"), rows), *ends, ""]


def run_of(config: dict) -> RunFolder:
    """The folder of the run that a configuration describes."""
    return RunFolder(Path(config["runtime"]["home"]) / "runs" / config["runtime"]["name"])
