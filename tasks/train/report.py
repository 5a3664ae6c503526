"""What people look at after a run: the loss curve as a picture, and one page that needs no network."""

import base64
import html
import json
from pathlib import Path

from tasks.train.run_folder import RunFolder, read_metrics

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }}
img {{ max-width: 100%; background: #fff; border-radius: 6px; }}
table {{ border-collapse: collapse; }} td {{ padding: .2rem 1.5rem .2rem 0; vertical-align: top; overflow-wrap: anywhere; }}
td:first-child {{ white-space: nowrap; }}
pre {{ padding: 1rem; border: 1px solid #8886; border-radius: 6px; overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1>
<img alt="Training and validation loss against the step" src="data:image/png;base64,{picture}">
<h2>Result</h2><table>{rows}</table>
<h2>Samples</h2>{samples}
</body></html>
"""


def write_report(run_dir: Path, summary: dict) -> dict[str, str]:
    """Writes loss.png and report.html into the run's folder and returns their paths."""
    picture = run_dir / "loss.png"
    draw_losses(read_metrics(RunFolder(run_dir)), summary["unigram_entropy_bits"], picture)
    facts = {
        "steps": f"{summary['steps']:,}" + (", stopped early" if summary["stopped_early"] is not None else ""),
        "parameters": f"{summary['parameters']:,}",
        "tokens seen": f"{summary['tokens']:,}",
        "validation loss": "not finite"
        if summary["validation_loss"] is None
        else f"{summary['validation_loss']:.4f} nats = {summary['validation_bits_per_token']:.3f} bits a token",
        "unigram entropy": f"{summary['unigram_entropy_bits']:.3f} bits a token",
        "bits per byte": "not finite" if summary["bits_per_byte"] is None else f"{summary['bits_per_byte']:.3f}",
        "speed": f"{summary['tokens_per_second']:,.0f} tokens a second",
        "attempts": str(summary["attempts"]),
        "time": time_spent(summary["goodput"]),
        "checkpoint": summary["checkpoint"],
        "weights (sha256)": summary["weights_sha256"],
    } | environment(run_dir)
    page = PAGE.format(
        title=html.escape(f"Run {summary['run']}"),
        picture=base64.b64encode(picture.read_bytes()).decode(),
        rows="".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in facts.items()
        ),
        samples="".join(f"<pre>{html.escape(text)}</pre>" for text in (summary["sample"], *summary.get("samples", []))),
    )
    report = run_dir / "report.html"
    report.write_text(page, encoding="utf-8")
    return {"loss_curve": str(picture), "report": str(report)}


def time_spent(goodput: dict[str, float]) -> str:
    """The parts of the wall time that took any of it, the longest first."""
    wall = goodput["wall"]
    parts = sorted(
        ((seconds, part) for part, seconds in goodput.items() if part not in ("wall", "share")), reverse=True
    )
    shares = [
        f"{part.replace('_', ' ')} {seconds / wall:.1%}" for seconds, part in parts if wall and seconds / wall > 0.0005
    ]
    return f"{wall:,.0f} s since the first attempt: {', '.join(shares)}"


def environment(run_dir: Path) -> dict[str, str]:
    """What the run was computed on, and which faults of other people's code were mended for it."""
    path = run_dir / "environment.json"
    if not path.exists():  # a run of `train` called as a function, with a plan of its caller's
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    plan = record["plan"]
    names = ("device", "precision", "attention_backend", "compile", "allocator")
    settings = [
        f"{plan['nproc_per_node']} worker(s) x {plan['threads']} thread(s)",
        *(plan.get(name) for name in names),
    ]
    patched = [f"{patch['name']}: {patch['fault']}" for patch in record.get("patches", [])]
    return {"environment": ", ".join(filter(None, settings)), "patches": " ".join(patched) or "none"}


def draw_losses(records: list[dict], unigram_entropy_bits: float, target: Path) -> None:
    """Training and validation loss in bits a token, with the unigram entropy as the line to beat."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bits = 1.4426950408889634
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    trained = [record for record in records if record["kind"] == "train" and record["loss"] is not None]
    validated = [record for record in records if record["kind"] == "validation" and record["loss"] is not None]
    axes.plot(
        [r["step"] for r in trained], [r["loss"] * bits for r in trained], label="train", linewidth=0.8, alpha=0.7
    )
    axes.plot(
        [r["step"] for r in validated],
        [r["loss"] * bits for r in validated],
        label="validation",
        marker="o",
        markersize=4,
    )
    axes.axhline(unigram_entropy_bits, color="grey", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="bits a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)
