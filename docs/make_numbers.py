"""Writes every measured figure of README.md, docs/ and benchmarks/results/README.md: `python docs/make_numbers.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a figure in a sentence between `<!-- number: NAME -->` and
`<!-- end -->`. NAME is a function or an entry of NUMBERS in this file, which reads benchmarks/results. The tables of the pages about
Infini-attention come from benchmarks/memory_results.py in the same way. A test compares all of them.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from infini_llama.configs.loading import load_config
from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.config import parameters
from infini_llama.tasks.patch_environment.footprint import bytes_needed, model_of
from infini_llama.tasks.patch_environment.plan import BLOCKED_TOKENS
from infini_llama.tasks.records.plan import Precision

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
SIZES = ("cpu", "gpu", "tiny_20m", "small", "medium", "large", "xl", "3b", "6b", "7b")
PAGES = [
    ROOT / "README.md",
    RESULTS / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
MARKED = re.compile(r"(<!-- (table|number): (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)


def result(name: str) -> Any:
    """The content of a file in benchmarks/results; a list for JSON Lines."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return (
        [json.loads(line) for line in text.splitlines()]
        if name.endswith(".jsonl")
        else json.loads(text)
    )


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Median and range, such as 1.26 (1.20 to 1.39)."""
    found = sorted(values)
    return f"{median(found):,.{digits}f} ({found[0]:,.{digits}f} to {found[-1]:,.{digits}f})"


def stored(summary: dict[str, float], digits: int = 2) -> str:
    """The same of a stored {"median", "lowest", "highest"}."""
    return f"{summary['median']:.{digits}f} ({summary['lowest']:.{digits}f} to {summary['highest']:.{digits}f})"


def table(head: list[str], rows: Iterable[list[str]], script: str, *files: str) -> str:
    """A Markdown table with the line that names its script, its files and the machine that they were taken on."""
    machines = dict.fromkeys(machine(name) for name in files)
    source = f"`benchmarks/{script}` → {', '.join(f'`{name}`' for name in files)}; {'; '.join(machines)}"
    return f"{markdown(head, rows)}\n\n*{source}.*"


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in [head, *rows]]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def machine(name: str) -> str:
    """Cores, platforms, and the lowest to the highest load, as far as the rows of a file state them."""
    content = result(name)
    rows: list[Any] = content
    if isinstance(content, dict):
        rows = [content | row for row in content.get("rows") or [{}]]
    known: dict[Any, None] = {}
    loads: list[float] = []
    for row in rows:
        facts = row.get("machine") or {
            "platform": row.get("platform"),
            "cores": row.get("cores") or row.get("threads"),
        }
        facts = (
            facts
            if isinstance(facts, dict)
            else {"platform": facts, "cores": row["cores"]}
        )
        cpu = facts.get("cpu") or facts.get("processor") or row.get("processor")
        cpu = cpu["model"] if isinstance(cpu, dict) else cpu
        load: Any = facts.get("load_at_the_end") or facts.get("load") or row.get("load")
        while isinstance(load, list):
            load = load[0] if load else None
        loads += [load] if load else []
        platform = str(facts["platform"]).partition("-with")[0]
        known |= dict.fromkeys(
            filter(
                None, [cpu, facts.get("cores") and f"{facts['cores']} cores", platform]
            )
        )
    lowest, highest = (f"{end(loads):.1f}" if loads else "" for end in (min, max))
    load_range = (
        [f"load {lowest}" + (f" to {highest}" if highest != lowest else "")]
        if loads
        else []
    )
    return ", ".join([*known, *load_range])


def attention_loads() -> str:
    loads = [row["load"] for row in result("attention-backends.json")["rows"]]
    return f"{min(loads):.0f} to {max(loads):.0f}"


def training_ratio(
    row: dict[str, Any], mode: str, peer: str, allocator: str
) -> tuple[float, float, float]:
    """Time of a peer's step over ours in the same round and mode: median of each start, then their median, lowest and highest.

    Of a single start, those of its rounds.
    """
    starts = [
        [
            theirs / ours
            for theirs, ours in zip(
                start["lanes"][f"{peer}, {mode}, {allocator}"]["wall"],
                start["lanes"][f"ours, {mode}"]["wall"],
                strict=True,
            )
        ]
        for start in row["starts"]
    ]
    values = [median(rounds) for rounds in starts] if len(starts) > 1 else starts[0]
    return median(values), min(values), max(values)


def training_eager() -> str:
    rows = sorted(
        result("training.json")["rows"],
        key=lambda row: (row["processor"], row["size"] != "s", row["vocabulary"]),
    )
    peers = [
        (peer, allocator)
        for peer in ("trainer", "litgpt")
        for allocator in ("as shipped", "our allocator")
    ]
    cells = [
        [
            f"{row['processor']}; {row['size']}, {row['vocabulary']:,}",
            training_speed(row),
        ]
        + [
            "{:.2f} ({:.2f} to {:.2f})".format(
                *training_ratio(row, "eager", peer, allocator)
            )
            for peer, allocator in peers
        ]
        for row in rows
    ]
    peers_of = [
        f"{'Trainer' if peer == 'trainer' else peer}, {allocator}"
        for peer, allocator in peers
    ]
    head = [
        "processor; model, vocabulary",
        "infini-llama: tokens per second",
        *peers_of,
    ]
    return table(head, cells, "training.py", "training.json")


def training_speed(row: dict[str, Any]) -> str:
    tokens = row["tokens_per_step"] * row["steps_per_turn"]
    return f"{median(tokens / median(start['lanes']['ours, eager']['wall']) for start in row['starts']):,.0f}"


def training_ratios(mode: str, peer: str, allocator: str) -> str:
    """The lowest and highest of the medians of all rows that have the mode."""
    rows = [
        row
        for row in result("training.json")["rows"]
        if f"ours, {mode}" in row["starts"][0]["lanes"]
    ]
    found = [training_ratio(row, mode, peer, allocator)[0] for row in rows]
    return f"{min(found):.2f} to {max(found):.2f}"


def compiled_steps() -> str:
    """Time of our eager step over our compiled one in the same round, without AMX: the lowest and highest median of a start."""
    rows = [
        row
        for row in result("training.json")["rows"]
        if not row["processor"].endswith("AMX")
    ]
    starts = [start["lanes"] for row in rows for start in row["starts"]]
    found = [
        median(
            eager / compiled
            for eager, compiled in zip(
                lanes["ours, eager"]["wall"],
                lanes["ours, compiled"]["wall"],
                strict=True,
            )
        )
        for lanes in starts
        if "ours, compiled" in lanes
    ]
    return f"{min(found):.2f} to {max(found):.2f}"


def products_share() -> str:
    """Of the profiles of eager steps in fp32."""
    starts = [
        start for row in result("training.json")["rows"] for start in row["starts"]
    ]
    profiles = [
        start["profiles"]
        for start in starts
        if start["settings"]["ours, eager"]["precision"] == "fp32"
    ]
    shares = [100 * profile["ours, eager"]["parts"]["products"] for profile in profiles]
    return f"{min(shares):.0f} to {max(shares):.0f} %"


SETTINGS = {
    "sdpa": "`attention_backend: sdpa`",
    "blocked": "`attention_backend: blocked`",
    "system allocator": "`allocator: system`",
    "one thread per worker": "a worker per core",
    "compile block": "`train.compile: block`",
    "compile whole": "`train.compile: whole`",
}


def environment_settings() -> str:
    """Speed of the default plan over that of a plan with one other setting."""
    measured_rows = result("environment.json")["rows"]
    found = {
        (row["processor"], row["vocabulary"]): row["tokens_per_second"]
        for row in measured_rows
    }

    def ratio(name: str, speeds: dict[str, list[float]]) -> str:
        pairs = zip(speeds["default"], speeds.get(name, ()), strict=False)
        return (
            spread(default / other for default, other in pairs)
            if name in speeds
            else ""
        )

    measured = [
        name for name in SETTINGS if any(name in speeds for speeds in found.values())
    ]
    rows = [
        [SETTINGS[name], *(ratio(name, speeds) for speeds in found.values())]
        for name in measured
    ]
    head = [
        "instead",
        *(f"{processor}; vocabulary {vocabulary:,}" for processor, vocabulary in found),
    ]
    return table(head, rows, "environment.py", "environment.json")


HEADS = {
    (8, 4, 32): "8 heads of 32, 4 of keys",
    (8, 4, 64): "8 heads of 64, 4 of keys",
    (12, 12, 64): "12 heads of 64",
}
FORMS = {"blocked": "kept", "recomputed": "computed again"}


def attention_backends() -> str:
    cells: dict[tuple[str, int, int, int], dict[tuple[Any, ...], str]] = {}
    for row in result("attention-backends.json")["rows"]:
        line = cells.setdefault(
            (row["precision"], row["threads"], row["document"], row["length"]), {}
        )
        heads = (row["heads"], row["kv_heads"], row["head_size"])
        line |= {(heads, form): spread(attention_ratios(row, form)) for form in FORMS}
    head = [
        "precision",
        "threads",
        "tokens per sequence",
        *(f"{name}: {form}" for name in HEADS.values() for form in FORMS.values()),
    ]
    rows = [
        [
            precision,
            str(threads),
            f"{length:,}{f' of documents of {document}' if document else ''}",
            *(
                cells[precision, threads, document, length].get((heads, form), "")
                for heads in HEADS
                for form in FORMS
            ),
        ]
        for precision, threads, document, length in sorted(cells)
    ]
    return table(head, rows, "attention.py --backends", "attention-backends.json")


def attention_ratios(row: dict[str, Any], form: str) -> list[float]:
    """Time of sdpa over that of a form of `blocked`, round by round."""
    return [
        sdpa / own
        for sdpa, own in zip(row["seconds"]["sdpa"], row["seconds"][form], strict=True)
    ]


def blocked_range(precision: Precision) -> str:
    """Medians of the shapes for which a plan uses `blocked` with its weights kept."""
    ratios = list[float]()
    for row in result("attention-backends.json")["rows"]:
        first, last = BLOCKED_TOKENS.get(
            (precision, row["threads"], True, bool(row["document"])), (1, 0)
        )
        if row["precision"] == precision and first <= row["length"] <= last:
            ratios.append(median(attention_ratios(row, "blocked")))
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def infini_steps() -> str:
    """Step of Infini-attention over that of local attention."""
    rows = result("infini_step.json")["rows"]
    cells = [
        [
            f"{row['size']}, {row['segment']}",
            str(row["threads"]),
            f"{median(row['seconds']['infini']):.2f}",
            spread(
                own / local
                for own, local in zip(
                    row["seconds"]["infini"], row["seconds"]["local"], strict=True
                )
            ),
        ]
        for row in rows
    ]
    head = [
        "model, tokens per segment",
        "threads",
        "seconds per step",
        "relative to local attention",
    ]
    return table(head, cells, "infini_step.py", "infini_step.json")


def chunked_loss() -> str:
    runs = result("loss.json")["runs"]

    def cell(variant: list[dict[str, Any]]) -> str:
        return f"{1000 * median(run['seconds'] for run in variant):,.0f} ms, {median(run['bytes'] for run in variant) / 1e6:,.0f} MB"

    names = dict.fromkeys(name for found in runs.values() for name in found)
    rows = [[name, *(cell(found[name]) for found in runs.values())] for name in names]
    return table(
        ["variant", *(f"vocabulary {name}" for name in runs)],
        rows,
        "loss.py",
        "loss.json",
    )


def loss_memory() -> str:
    found = result("loss.json")["runs"]["32,000 fp32"]
    whole, chunks = (
        median(run["bytes"] for run in found[name])
        for name in ("all at once", "chunks of 1024")
    )
    return f"{whole / chunks:.0f}"


PROGRAMS = {
    "ours, default": "infini-llama, the tokenizer learned as well",
    "ours, gigatoken": "infini-llama, gigatoken",
    "ours, tokenizers": "infini-llama, `tokenizers`",
    "megatron-fast": "Megatron-LM's script, gigatoken",
    "datatrove": "datatrove, DocumentTokenizer",
    "datasets.map": "`datasets.map` and group_texts",
    "litdata": "litdata, TokensLoader",
    "ours, unchanged": "infini-llama again, nothing changed",
}
CORPORA = {
    "preparation-default.json": "ordinary",
    "preparation.json": "ordinary",
    "preparation-1gb.json": "ordinary, repeated",
    "preparation-dictionary.json": "entries of 200 bytes",
    "preparation-long.json": "documents of 10 MB",
    "preparation-small.json": "ordinary",
}


def preparation_rows(*files: str) -> list[list[str]]:
    rows = []
    for file in files:
        content = result(file)
        for name in (name for name in PROGRAMS if name in content["runs"]):
            runs = content["runs"][name]
            text = f"{CORPORA[file]}, {content['corpus_bytes'] / 1e6:,.0f} MB"
            seconds, cpu = (
                spread(run[clock] for run in runs)
                for clock in ("work_seconds", "cpu_seconds")
            )
            peak = f"{median(run['peak_megabytes'] for run in runs):,.0f}"
            rows.append([text, PROGRAMS[name], seconds, cpu, peak])
    return rows


PREPARATION_HEAD = ["text", "program", "seconds", "CPU seconds", "peak MB"]


def preparation() -> str:
    files = ("preparation.json", "preparation-1gb.json")
    return table(PREPARATION_HEAD, preparation_rows(*files), "preparation.py", *files)


def preparation_default() -> str:
    file = "preparation-default.json"
    return table(PREPARATION_HEAD, preparation_rows(file), "preparation.py", file)


def preparation_small() -> str:
    file = "preparation-small.json"
    return table(PREPARATION_HEAD, preparation_rows(file), "preparation.py", file)


def preparation_kinds() -> str:
    files = ("preparation-dictionary.json", "preparation-long.json")
    return table(
        PREPARATION_HEAD, preparation_rows(*files), "preparation.py --kind", *files
    )


def preparation_ratio(file: str, field: str) -> str:
    """infini-llama over Megatron-LM's script, within each round."""
    runs = result(file)["runs"]
    pairs = zip(runs["ours, gigatoken"], runs["megatron-fast"], strict=True)
    return spread(ours[field] / theirs[field] for ours, theirs in pairs)


def default_ratio(program: str) -> str:
    """Time of a program with a given tokenizer over ours, which learns one, within each round."""
    runs = result("preparation-default.json")["runs"]
    pairs = zip(runs[program], runs["ours, default"], strict=True)
    return spread(
        theirs["work_seconds"] / ours["work_seconds"] for theirs, ours in pairs
    )


def surveys() -> str:
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for run in result("survey.json")["runs"]:
        found.setdefault((run["documents"] // 1000 * 1000, run["files"]), {})[
            run["what"]
        ] = run
    rows = [
        [f"{documents:,}", f"{files:,}", f"{runs['first']['bytes'] / 1e6:,.1f}"]
        + [f"{runs[what]['cpu_seconds']:.1f}" for what in ("first", "again", "added")]
        + [f"{runs['first']['peak_megabytes']:.0f}"]
        for (documents, files), runs in found.items()
    ]
    head = [
        "documents",
        "files",
        "MB of text",
        "first preparation: CPU seconds",
        "again",
        "one file added",
        "peak MB",
    ]
    return table(head, rows, "survey.py", "survey.json")


def reading() -> str:
    runs = result("reader.json")["runs"]
    kinds = {
        "read": "ns per token, random batches",
        "best_fit": "ns per document, packing",
    }
    rows = [
        [
            kinds[kind],
            program.replace("ours", "infini-llama"),
            spread(values, 2 if kind == "read" else 0),
        ]
        for (kind, program), values in sorted(
            (tuple(name.split(", ")), values) for name, values in runs.items()
        )
    ]
    return table(["measured", "program", "CPU time"], rows, "reader.py", "reader.json")


def preparing_ahead() -> str:
    rows = [
        [
            f"`configs/{row['config']}.yaml`",
            *(
                f"{100 * row[side]['share_of_data']:.2f} %"
                for side in ("prepared", "while training")
            ),
        ]
        for row in result("preparing_ahead.json")["rows"]
    ]
    head = ["model", "prepared dataset", "tokenizing while training"]
    return table(head, rows, "preparing_ahead.py", "preparing_ahead.json")


def checkpoints() -> str:
    rows = [
        [
            f"{row['bytes'] / 1e6:.0f} MB",
            stored(row["stall_over_copy"]),
            stored(row["save_over_torch_save_and_fsync"]),
        ]
        for row in result("checkpoint.jsonl")
    ]
    head = [
        "state",
        "blocked time of a background save ÷ one copy in memory",
        "whole save ÷ torch.save and fsync",
    ]
    return table(head, rows, "checkpoint.py", "checkpoint.jsonl")


def interruptions() -> str:
    seconds = result("interruptions.json")["seconds"]
    measured = {
        "SIGTERM to the committed checkpoint": ("SIGTERM", "committed"),
        "SIGTERM to the exit of the command": ("SIGTERM", "ended"),
        "SIGSTOP of a rank to its detection": ("SIGSTOP", "named"),
        "SIGSTOP of a rank to the first step of the next attempt": (
            "SIGSTOP",
            "continues",
        ),
    }
    rows = [
        [label, spread((run[key] for run in seconds[name]), 1)]
        for label, (name, key) in measured.items()
    ]
    return table(
        ["from … to …", "seconds"], rows, "interruptions.py", "interruptions.json"
    )


def overheads() -> str:
    found = result("overheads.json")
    names = {
        "data": "waiting for data",
        "metrics_and_curves": "metrics and curves",
        "stall_of_saves": "blocked by saves",
    }
    return table(
        [*names.values()],
        [[f"{100 * found[name]:.2f} %" for name in names]],
        "overheads.py",
        "overheads.json",
    )


def commands() -> str:
    seconds = result("startup.json")["seconds"]
    names = {
        "--help": "`infini-llama --help`",
        "finished run again, --no-prefect": "`run --no-prefect` of a finished run",
        "finished run again, embedded server": "`run` of a finished run, with the embedded Prefect server",
        "import the preparation": "imports of a preparation",
        "import the preparation and awkward, which gigatoken needs": "the same, of more than 4 MB of text (gigatoken, awkward)",
        "import torch, as torchrun does": "imports of torchrun",
        "import torch, as DDP does": "imports of a rank by torch alone (DDP: torch._dynamo)",
        "import what a worker needs": "imports of a rank",
        "import matplotlib, as the report does": "imports of the report by matplotlib",
        "torchrun and DDP alone, to a step": "torchrun and DDP alone, two ranks: to a step",
        "new run, to its first step": "a new run with two ranks, `--no-prefect`: to its first step",
        "torchrun and DDP alone, from the step to the end": "torchrun and DDP alone: from the step to the end",
        "new run, from its last checkpoint to its end": "a new run: from its last checkpoint to its end",
    }
    rows = [[label, spread(seconds[name])] for name, label in names.items()]
    return table(["command", "seconds"], rows, "startup.py", "startup.json")


def orchestration() -> str:
    found = result("orchestration.json")["seconds"]
    labels = {
        "torchrun": "torchrun alone",
        "run --no-prefect": "`run --no-prefect`",
        "run": "`run`, server running",
    }
    fields = {
        "first_step": "to the first step",
        "total": "to the end",
        "cpu": "CPU seconds",
    }
    rows = [
        [label, *(spread((run[field] for run in found[name]), 1) for field in fields)]
        for name, label in labels.items()
    ]
    return table(
        ["command", *fields.values()], rows, "orchestration.py", "orchestration.json"
    )


def orchestration_finished() -> str:
    found = result("orchestration-finished.json")["seconds"]
    names = ("import prefect.main", "run --no-prefect", "run")
    rows = [
        [f"`{name}`", spread((run["cpu"] for run in found[name]), 1)] for name in names
    ]
    script = "orchestration.py --finished"
    return table(
        ["finished run requested again", "CPU seconds"],
        rows,
        script,
        "orchestration-finished.json",
    )


def context_parallel() -> str:
    def cell(row: dict[str, Any]) -> list[str]:
        fields = (("megabytes", 0), ("seconds", 1))
        summary = [
            (row[name], row[f"{name}_from"], row[f"{name}_to"], digits)
            for name, digits in fields
        ]
        return [
            f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"
            for value, low, high, digits in summary
        ]

    rows = [
        [row["update"], str(row["context_parallel"]), *cell(row)]
        for row in result("context_parallel.json")["rows"]
    ]
    head = ["memory update", "workers per sequence", "peak MB", "CPU seconds per step"]
    return table(head, rows, "context_parallel.py", "context_parallel.json")


def context_parallel_peak(workers: int) -> str:
    rows = result("context_parallel.json")["rows"]
    (row,) = (
        row
        for row in rows
        if (row["update"], row["context_parallel"]) == ("linear", workers)
    )
    return f"{row['megabytes']:,.0f}"


def streaming() -> str:
    rows = [
        [
            f"{row['tokens']:,}",
            f"{row['state']:,}",
            f"{row['resident'] / 1e6:.0f}",
            f"{row['us_a_token']:.0f}",
        ]
        for row in result("streaming.json")["reports"]
    ]
    head = ["tokens read", "bytes of state", "resident MB", "µs per token"]
    return table(head, rows, "streaming.py", "streaming.json")


def many_shards() -> str:
    fields = {
        "read_manifest_seconds": "read the manifest",
        "verify_quick_seconds": "quick verification",
        "open_reader_seconds": "open a reader",
        "batch_of_8_after_resume_seconds": "first batch after a resume",
    }
    rows = [
        [f"{row['shards']:,}", f"{row['manifest_bytes'] / 1e6:.1f}"]
        + [
            f"{row[field]:.4f}" if row[field] < 0.1 else f"{row[field]:.1f}"
            for field in fields
        ]
        + [f"{row['peak_memory_bytes'] / 1e9:.2f}"]
        for row in result("scaling.json")["measured"]
    ]
    head = [
        "shards",
        "MB of manifest",
        *(f"{label}: CPU seconds" for label in fields.values()),
        "peak GB",
    ]
    return table(head, rows, "scaling.py", "scaling.json")


def size(name: str) -> PipelineConfig:
    config = load_config(f"configs/{name}.yaml")
    return config.with_vocab_size(config.data.tokenizer.vocab_size)


def model_sizes() -> str:
    rows = []
    for name in SIZES:
        model, vocabulary = size(name).model, size(name).data.tokenizer.vocab_size
        heads = f"{model.num_attention_heads} / {model.num_key_value_heads or model.num_attention_heads}"
        counts = [
            model.hidden_size,
            model.num_hidden_layers,
            vocabulary,
            parameters(model_of(size(name))),
        ]
        hidden, layers, tokens, total = (f"{count:,}" for count in counts)
        rows.append([f"`configs/{name}.yaml`", hidden, layers, heads, tokens, total])
    head = [
        "configuration",
        "hidden size",
        "layers",
        "heads / key-value heads",
        "vocabulary",
        "parameters",
    ]
    return markdown(head, rows)


def memory_by_preset() -> str:
    def gigabytes(config: PipelineConfig, processes: int) -> str:
        return f"{sum(bytes_needed(config, 1, 'bf16', 'cuda', processes).values()) / 1e9:.1f}"

    rows = []
    for name in SIZES[2:]:
        found = size(name).model_copy(deep=True)
        found.data.sequence_length = 2048
        cells = []
        for recompute, strategy, processes in (
            ("none", "ddp", 1),
            ("full", "ddp", 1),
            ("full", "fsdp", 8),
        ):
            train = {"activation_checkpointing": recompute, "parallel": strategy}
            changed = found.model_copy(
                update={"train": found.train.model_copy(update=train)}
            )
            cells.append(gigabytes(changed, processes))
        rows.append([f"`{name}`", *cells])
    checkpointing = "`train.activation_checkpointing=full`"
    head = [
        "preset",
        "1 GPU",
        f"1 GPU, {checkpointing}",
        f"8 GPUs, {checkpointing} and `train.parallel=fsdp`",
    ]
    return markdown(head, rows)


def streaming_resident(tokens: int) -> str:
    (row,) = (
        row for row in result("streaming.json")["reports"] if row["tokens"] == tokens
    )
    return f"{row['resident'] / 1e6:.0f}"


def recipes() -> str:
    rows = []
    for row in result("recipes.json")["rows"]:
        counts = [f"{row[name]:,}" for name in ("parameters", "steps", "tokens")]
        losses = [f"{row['validation_loss']:.4f}", f"{row['bits_per_byte']:.3f}"]
        rows.append([f"`configs/{row['config']}.yaml`", *counts, *losses])
    head = [
        "configuration",
        "parameters",
        "steps",
        "tokens",
        "validation loss",
        "bits per byte",
    ]
    return markdown(head, rows)


def million_found() -> str:
    found = [row["found"][-1] for row in result("memory_passkey.json")["results"]]
    numbers = sum(cell["numbers"] for cell in found)
    return (
        f"{sum(round(cell['whole'] * cell['numbers']) for cell in found)} of {numbers}"
    )


def control_range(name: str) -> str:
    """What all models answered with another memory."""
    found = sorted(
        row["controls"][name]
        for row in result("memory_passkey.json")["results"]
        if row.get("controls")
    )
    ends = [f"{value:.2f}" for value in (found[0], found[-1])]
    return " to ".join(dict.fromkeys(ends))


def passkey_seconds() -> str:
    found = sorted(
        row["cpu_seconds"] for row in result("memory_passkey.json")["results"]
    )
    return f"{found[0]:.0f} to {found[-1]:.0f}"


def text_time() -> str:
    """Training time of the model with a memory over that of local attention, of the same seed and bytes."""
    rows = [
        row
        for row in result("memory_text.json")["results"]
        if row["recipe"]["steps"] == 1200
    ]
    seconds = {(row["model"], row["seed"]): row["cpu_seconds"] for row in rows}
    ratios = sorted(
        value / seconds["local", seed]
        for (model, seed), value in seconds.items()
        if model != "local"
    )
    return f"{ratios[0]:.1f} to {ratios[-1]:.1f}"


def recall() -> str:
    """Lowest and highest accuracy of the seeds."""

    def cell(found: list[float]) -> str:
        return f"{min(found):.3f}–{max(found):.3f}" if found else ""

    by_variant: dict[str, list[dict[str, Any]]] = {}
    for row in result("recall.json")["results"]:
        by_variant.setdefault(row["variant"], []).append(row)
    rows = []
    for variant, seeds in by_variant.items():
        off = [
            row["accuracy without memory"]
            for row in seeds
            if "accuracy without memory" in row
        ]
        rows.append(
            [
                variant,
                *(
                    cell([row["accuracy"][length] for row in seeds])
                    for length in ("4", "32")
                ),
                cell(off),
            ]
        )
    head = [
        "attention",
        "4 segments (trained)",
        "32 segments (not trained)",
        "4 segments, memory off",
    ]
    return table(head, rows, "recall.py", "recall.json")


def cost_by_length() -> str:
    runs = result("attention-cpu.json")["runs"]
    lengths = [int(length) for length in next(iter(runs.values()))]
    rows = [
        [
            name,
            *(
                f"{1e6 * median(run['seconds'] for run in found[str(n)]) / n:,.0f}"
                for n in lengths
            ),
        ]
        for name, found in runs.items()
        if not name.endswith("gradient cut")
    ]
    return table(
        ["sequence length", *(f"{n:,}" for n in lengths)],
        rows,
        "attention.py",
        "attention-cpu.json",
    )


def console() -> str:
    """What `infini-llama run configs/tiny.yaml` prints, without speeds, most steps, the dataset's key and folders."""
    (row,) = (row for row in result("recipes.json")["rows"] if row["config"] == "tiny")
    printed = [
        re.sub(r"(?<=stdlib-)[0-9a-f]{12}", "…", line).replace(
            " workspace/", " …/workspace/"
        )
        for line in row["console_without_speed"]
    ]
    lines = [
        line for line in printed if not re.match(r"train +(step|checkpoint)", line)
    ]
    steps = [line for line in printed if re.match(r"train +(step|checkpoint)", line)]
    last = next(place for place, line in enumerate(lines) if line.startswith("run "))
    return "\n".join(
        ["```text", *lines[:last], steps[0], "…", *steps[-2:], *lines[last:], "```"]
    )


def all_of(name: str, field: str) -> str:
    """The number of rows in a file, all of which have a true `field`."""
    rows = result(name)
    rows = rows["cells"] if isinstance(rows, dict) else rows
    assert all(row[field] for row in rows), f"{name} has a row without {field}"
    return str(len(rows))


# Fmt: skip.
TABLES: tuple[Callable[[], str], ...] = (
    training_eager,
    environment_settings,
    attention_backends,
    infini_steps,
    chunked_loss,
    preparation,
    preparation_default,
    preparation_small,
    preparation_kinds,
    surveys,
    reading,
    preparing_ahead,
    checkpoints,
    interruptions,
    overheads,
    commands,
    orchestration,
    orchestration_finished,
    context_parallel,
    streaming,
    many_shards,
    model_sizes,
    memory_by_preset,
    recipes,
    console,
    recall,
    cost_by_length,
)
NUMBERS: dict[str, Callable[[], str]] = {
    "attention_loads": attention_loads,
    "compiled_steps": compiled_steps,
    "trainer_shipped": lambda: training_ratios("eager", "trainer", "as shipped"),
    "trainer_same": lambda: training_ratios("eager", "trainer", "our allocator"),
    "litgpt_shipped": lambda: training_ratios("eager", "litgpt", "as shipped"),
    "litgpt_same": lambda: training_ratios("eager", "litgpt", "our allocator"),
    "trainer_compiled_shipped": lambda: training_ratios(
        "compiled", "trainer", "as shipped"
    ),
    "litgpt_compiled_shipped": lambda: training_ratios(
        "compiled", "litgpt", "as shipped"
    ),
    "trainer_compiled": lambda: training_ratios("compiled", "trainer", "our allocator"),
    "litgpt_compiled": lambda: training_ratios("compiled", "litgpt", "our allocator"),
    "blocked_fp32": lambda: blocked_range("fp32"),
    "blocked_bf16": lambda: blocked_range("bf16"),
    "products_share": products_share,
    "loss_memory": loss_memory,
    "map_over_default": lambda: default_ratio("datasets.map"),
    "datatrove_over_default": lambda: default_ratio("datatrove"),
    "cpu_1gb": lambda: preparation_ratio("preparation-1gb.json", "cpu_seconds"),
    "wall_1gb": lambda: preparation_ratio("preparation-1gb.json", "work_seconds"),
    "memory_1gb": lambda: preparation_ratio("preparation-1gb.json", "peak_megabytes"),
    "prefect_longer": lambda: (
        f"{result('orchestration.json')['median']['run over torchrun']['total']:.1f}"
    ),
    "direct_longer": lambda: (
        f"{result('orchestration.json')['median']['run --no-prefect over torchrun']['total']:.1f}"
    ),
    "state_bytes": lambda: f"{result('streaming.json')['reports'][0]['state']:,}",
    "resident_10k": lambda: streaming_resident(10_000),
    "resident_1m": lambda: streaming_resident(1_000_000),
    "shards_read": lambda: (
        f"{result('scaling.json')['measured'][-1]['read_manifest_seconds']:.0f}"
    ),
    "shards_verify": lambda: (
        f"{result('scaling.json')['measured'][-1]['verify_quick_seconds']:.0f}"
    ),
    "shared_sequence_mb": lambda: context_parallel_peak(1),
    "shared_by_4_mb": lambda: context_parallel_peak(4),
    "passkey_steps": lambda: f"{load_config('configs/passkey.yaml').train.max_steps:,}",
    "million_found": million_found,
    "passkey_seconds": passkey_seconds,
    "text_time": text_time,
    "swapped_own": lambda: control_range("swapped, own"),
    "swapped_other": lambda: control_range("swapped, other"),
    "filler_alone": lambda: control_range("filler alone"),
    "faults": lambda: all_of("faults.jsonl", "bitwise_equal"),
    "exactness": lambda: all_of("exactness.json", "bitwise"),
}


def with_numbers(page: str) -> str:
    """The text of a page with the figures of the stored results between its marks; marks of other scripts stay as they are."""
    tables = {function.__name__: function for function in TABLES}

    def fill(found: re.Match[str]) -> str:
        start, kind, name, _, end = found.groups()
        if kind == "number":
            return f"{start}{NUMBERS[name]()}{end}"
        return f"{start}\n\n{tables[name]()}\n\n{end}" if name in tables else found[0]

    return MARKED.sub(fill, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(
            with_numbers(path.read_text(encoding="utf-8")), encoding="utf-8"
        )
