"""The report of a run, report.html: results, data, speed, attempts. Written when a run ends, or any time by `infini-llama report`."""

from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from infini_llama.tasks.formatting import NATS_PER_BIT, in_bytes, in_time, packed, shown
from infini_llama.tasks.report import page
from infini_llama.tasks.report.charts import Chart, Curve, figures, save_picture
from infini_llama.tasks.runs.record import RunRecord
from infini_llama.tasks.storage.artifacts import write_atomic

MOST_VALIDATIONS = 40
RELOAD_EVERY = 30  # seconds, of the page of a running run


def write_report(path: Path) -> dict[str, str]:
    """Writes loss.png and report.html into the folder of the run, and returns their paths.

    Raises:
        ConfigError: it is the folder of no run.
    """
    run = RunRecord(path)
    picture, report = path / "loss.png", path / "report.html"
    save_picture(loss_chart(run), picture)
    write_atomic(report, run_page(run))
    return {"loss_curve": str(picture), "report": str(report)}


def run_page(run: RunRecord) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return page.page(
        f"Run {run.name}",
        f"<h1>Run {page.text(run.name)}</h1>",
        f'<p class="note">{page.text(run.state)}; step {run.step:,} of {run.max_steps:,}; written {now}</p>',
        page.tiles(headline(run)),
        page.section("Curves", figures(curves(run)), page.details("Validation losses", page.table(_validations(run)))),
        page.section("Time", _time(run)),
        page.section("Evaluations", *_evaluations(run)),
        page.section("Samples", *_samples(run)),
        page.section("Data", page.facts(data_card(run)), *_rows_and_filters(run)),
        page.section(
            "Model", page.facts(_model(run)), page.details("Architecture in full", page.facts(run.lineage.model))
        ),
        page.section("Environment", *_environment(run)),
        page.section("Checkpoints", page.table(_checkpoints(run))),
        page.section("Attempts", page.table(_attempts(run))),
        page.section("Configuration", page.details("config.yaml", page.preformatted(_yaml(run.config)))),
        reload_every=RELOAD_EVERY if run.state == "running" else 0,
    )


def headline(run: RunRecord) -> dict[str, str]:
    """The most important numbers that the run has."""
    trained, validated, found = run.trained, run.validated, {}
    if losses := [record["loss"] for record in trained if record["loss"] is not None]:
        found["training loss, nats per token"] = f"{losses[-1]:.4f}"
    if validated:
        last = validated[-1]
        found["validation loss, nats per token"] = "not finite" if last["loss"] is None else f"{last['loss']:.4f}"
        if last["bits_per_byte"] is not None:
            found["bits per byte"] = f"{last['bits_per_byte']:.3f}"
    if parameters := run.result.get("parameters"):
        found["parameters"] = f"{parameters:,}"
    if trained:
        found["tokens seen"] = f"{trained[-1]['tokens']:,}"
        seconds = sum(record["step_time"] for record in trained)
        found["tokens per second"] = f"{trained[-1]['tokens'] / seconds:,.0f}"
        if (mfu := trained[-1].get("mfu")) is not None:
            found["MFU"] = f"{mfu:.1%}"
    if run.goodput.wall:
        found["goodput"] = f"{run.goodput.share:.1%}"
        found["since the first attempt"] = in_time(run.goodput.wall)
    return found


def loss_chart(run: RunRecord) -> Chart:
    """Training and validation loss in nats per token, with the unigram entropy as a baseline."""
    curves = [
        _curve("training", run.trained, "loss"),
        _curve("validation", run.validated, "loss", points=True),
    ]
    if entropy := _entropy(run):
        curves.append(Curve("unigram entropy", [0, 1], [entropy, entropy], "level"))
    return Chart("Loss, nats per token", curves, marks=_starts(run))


def curves(run: RunRecord) -> list[Chart]:
    """Every chart of a run; what it has not recorded is left out where it is drawn."""
    trained, validated, marks = run.trained, run.validated, _starts(run)

    def one(title: str, name: str, factor: float = 1.0, log: bool = False) -> Chart:
        return Chart(title, [_curve(name, trained, name, factor)], marks=marks, log=log)

    spent = [("step", "step_time"), ("waiting for data", "data_time"), ("saving", "save_time")]
    return [
        loss_chart(run),
        Chart("Validation, bits per byte", [_curve("", validated, "bits_per_byte", points=True)], marks=marks),
        one("Learning rate", "learning_rate"),
        one("Gradient norm", "grad_norm"),
        one("Parameter norm", "param_norm"),
        one("Tokens per second", "tokens_per_second"),
        one("Model FLOPs utilization, %", "mfu", 100),
        Chart("Seconds per step", [_curve(label, trained, name) for label, name in spent], marks=marks),
        one("Memory, GB", "memory_peak", 1e-9),
        one("Loss scale", "loss_scale", log=True),
        Chart("Mean gate: fraction of memory in Infini-attention's output", _gates(run), marks=marks),
    ]


def _gates(run: RunRecord) -> list[Curve]:
    records = [record for record in run.trained if record.get("gates")]
    if not records:
        return []
    return [
        Curve(f"layer {layer}", [r["step"] for r in records], [_mean(r["gates"][layer]) for r in records])
        for layer in range(len(records[-1]["gates"]))
    ]


def _mean(value: float | list[float]) -> float:
    return sum(value) / len(value) if isinstance(value, list) else value


def _curve(label: str, records: list[dict], name: str, factor: float = 1.0, points: bool = False) -> Curve:
    there = [record for record in records if record.get(name) is not None]
    values = [record[name] * factor for record in there]
    return Curve(label, [record["step"] for record in there], values, "points" if points else "line")


def _starts(run: RunRecord) -> list[int]:
    """Where attempts after the first took up."""
    return sorted({record.from_step for record in run.attempts if record.from_step})


def _entropy(run: RunRecord) -> float | None:
    """The unigram entropy of the validation text, in nats per token."""
    content = run.dataset["tokens"]["content"] if run.dataset else {}
    bits = content.get("validation", {}).get("unigram_entropy_bits")
    return None if bits is None else bits * NATS_PER_BIT


def _validations(run: RunRecord) -> list[dict[str, Any]]:
    """The last ones, the newest first."""
    return [
        {"step": record["step"], "loss, nats per token": record["loss"], "bits per byte": record["bits_per_byte"]}
        for record in reversed(run.validated[-MOST_VALIDATIONS:])
    ]


def _time(run: RunRecord) -> str:
    parts = {name.replace("_", " "): seconds for name, seconds in run.goodput.parts().items()}
    return page.parts_of_a_whole(dict(sorted(parts.items(), key=lambda part: -part[1])), "s")


def _evaluations(run: RunRecord) -> list[str]:
    """What was measured of the model by itself: losses of text, and numbers found in it by length and depth."""
    rows, found, across = [], [], []
    for record in run.evaluations:
        for name, words in (("model", ""), ("memory", "with memory"), ("no_memory", "without memory")):
            if name not in record:
                continue
            about = {"step": record["step"], "": words}
            if record["kind"] == "passkey":
                depths: dict[int, dict[str, Any]] = {}
                for one in record[name]:
                    if one.get("right_by_token"):
                        across.append(about | {"segment ends": one["segments"], "found": f"{one['found']:.0%}"})
                        continue
                    line = depths.setdefault(one["length"], about | {"tokens": one["tokens"]})
                    line[f"depth {one['depth']:g}"] = f"{one['found']:.0%}"
                found += depths.values()
            else:
                kept = {key.replace("_", " "): record[name][key] for key in ("loss", "perplexity", "bits_per_byte")}
                rows.append(about | kept | {"text": shown(record["text"])})
    heading = "<h3>Passkey: numbers found, by length and depth</h3>" if found else ""
    far = "<h3>Passkey: numbers found, by segment ends crossed</h3>" if across else ""
    return [page.table(rows), heading, page.table(found), far, page.table(across)]


def _samples(run: RunRecord) -> list[str]:
    """Texts by step, the newest first."""
    steps = sorted({sample["step"] for sample in run.samples}, reverse=True)
    return list(
        chain.from_iterable(
            [f"<h3>Step {step:,}</h3>", *(page.preformatted(s["text"]) for s in run.samples if s["step"] == step)]
            for step in steps
        )
    )


def data_card(run: RunRecord) -> dict[str, Any]:
    """What the dataset's manifests say of the text."""
    dataset = run.lineage.dataset
    if not run.dataset:
        return {
            "dataset": dataset.path,
            "digest": dataset.digest,
            "row length": f"{dataset.sequence_length:,} tokens",
            "note": "the dataset was moved or removed, or is damaged; only the run's own records of it are shown",
        }
    tokens, rows = run.dataset["tokens"], run.dataset["rows"]
    content, meta = tokens["content"], tokens["meta"]

    def counts(split: str) -> str:
        there = content[split]
        return (
            f"{there['documents']:,} documents, {in_bytes(there['bytes'])} of text, {there['tokens']:,} tokens, "
            f"{rows['content']['rows'][split]:,} sequences"
        )

    return {
        "dataset": dataset.path,
        "source": meta.get("source"),
        "licence": meta.get("licence"),
        "training": counts("train"),
        "validation": counts("validation"),
        "vocabulary": f"{content['vocab_size']:,} tokens, {content['train']['bytes'] / content['train']['tokens']:.2f} bytes each",
        "unigram entropy": f"{content['validation']['unigram_entropy_bits'] * NATS_PER_BIT:.3f} nats per token (validation)",
        "sequences": f"{rows['content']['sequence_length']:,} tokens, {rows['content'].get('strategy', '')}",
        "built": tokens["created"],
        "digest": tokens["digest"],
    }


def _rows_and_filters(run: RunRecord) -> list[str]:
    """How well the rows are filled, and what was left out of the text."""
    if not run.dataset:
        return []
    splits = {split: packed(costs) for split, costs in run.dataset["rows"]["meta"].get("packing", {}).items()}
    names = next(iter(splits.values()), {})
    left_out = run.dataset["tokens"]["meta"].get("left_out", {})
    return [
        page.table([{"": name} | {split: facts[name] for split, facts in splits.items()} for name in names]),
        page.details("Records read and skipped", page.facts(_worded(left_out))),
    ]


def _worded(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_", " "): value for name, value in values.items()}


def _model(run: RunRecord) -> dict[str, Any]:
    model = run.lineage.model
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "attention",
    )
    return {
        "parameters": run.result.get("parameters"),
        "architecture": {name: model[name] for name in names if name in model},
        "started from": run.lineage.init_from.to_json() if run.lineage.init_from else None,
        "weights (sha256)": run.result.get("weights_sha256"),
    }


def _environment(run: RunRecord) -> list[str]:
    record = run.environment
    if not record:
        return []
    facts, plan = record["facts"], record["plan"]
    cpu, memory = facts.get("cpu", {}), facts.get("memory", {})
    machine = {
        "machine": f"{facts.get('host', '')}, {facts.get('platform', '')}",
        "CPU": f"{cpu.get('model', '')}, {facts.get('cores', '?')} usable core(s)",
        "GPUs": [gpu.get("name", "?") if isinstance(gpu, dict) else gpu for gpu in facts.get("gpus", [])],
        "memory": in_bytes(memory["total"]) if memory.get("total") else None,
        "Python": facts.get("python"),
    }
    settings = _worded({name: value for name, value in plan.items() if not isinstance(value, dict | list)})
    patches = [{"patch": patch["name"], "fixes": patch["fault"]} for patch in record.get("patches", [])]
    versions = page.facts(facts.get("versions", {})) + page.facts(plan.get("env", {}))
    return [
        page.facts(machine | settings),
        page.table(patches),
        page.details("Versions and environment variables", versions),
    ]


def _checkpoints(run: RunRecord) -> list[dict[str, Any]]:
    return [
        {
            "checkpoint": one["name"],
            "validation loss": one["validation_loss"],
            "size": in_bytes(one["bytes"]),
            "": one["is"],
        }
        for one in run.checkpoints
    ]


def _attempts(run: RunRecord) -> list[dict[str, Any]]:
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


def _yaml(config: dict[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
