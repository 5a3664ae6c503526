"""What a dataset holds and whether it is whole, as Markdown for Prefect's page of the run."""

from typing import Any

from infini_llama.tasks.formatting import cell, in_bytes, table, text_block

LENGTHS = ("shortest", "p5", "median", "p95", "longest")


def card(dataset: dict[str, Any], reference: dict[str, Any], report: dict[str, Any]) -> str:
    """Sources, tokens, lengths, rows, what was left out, the checks, and rows as text.

    Args:
        dataset: of `summary.describe`.
        reference: of `stage.preprocess`.
        report: of `verify_data.checks.verify`.
    """
    splits, rows = dataset["splits"], dataset["chunks"][reference["chunks"]]
    lines = [f"## Dataset {reference['path'].rpartition('/')[2]}", ""]
    facts = [
        ("source", dataset["source"]),
        ("licence", dataset["licence"]),
        ("vocabulary", f"{dataset['vocab_size']:,} tokens ({dataset['dtype']})"),
        ("on disk", in_bytes(dataset["bytes_on_disk"])),
        (
            "this run",
            f"built {' and '.join(reference['built'])}" if reference["built"] else "complete already, nothing built",
        ),
        ("rows", f"{rows['sequence_length']:,} tokens each, cut by '{rows['strategy']}'"),
        (
            "checked",
            f"{'whole' if report['ok'] else 'DAMAGED'}: {len(report['checks'])} checks, {in_bytes(report['checked_bytes'])} read",
        ),
    ]
    lines += table(("what", "value"), ((name, _words(value)) for name, value in facts))
    lines += [f"- folder: `{dataset['path']}`", f"- digest: `{dataset['digest']}`", "", "### Text", ""]
    heads = ("split", "documents", "tokens", "bytes a token", "shards", "rows", "entropy (bits)")
    lines += table(heads, (_split(name, one, rows["rows"][name]) for name, one in splits.items()))
    lines += ["The entropy is that of single tokens: what a model has to beat, in bits a token.", ""]
    lines += ["### Tokens of a document", ""]
    lengths = ((name, *(f"{one['document_tokens'][at]:,}" for at in LENGTHS)) for name, one in splits.items())
    lines += table(("split", "shortest", "5 % below", "median", "95 % below", "longest"), lengths)
    lines += _left_out(dataset["left_out"])
    lines += ["### Rows as the model sees them", ""]
    for sample in dataset["samples"]:
        lines += text_block(sample, 600)
    return "\n".join(lines)


def _split(name: str, one: dict[str, Any], rows: int) -> tuple[str, ...]:
    per_token, entropy = f"{one['bytes_per_token']:.2f}", f"{one['unigram_entropy_bits']:.3f}"
    return name, f"{one['documents']:,}", f"{one['tokens']:,}", per_token, str(one["shards"]), f"{rows:,}", entropy


def _left_out(report: dict[str, Any]) -> list[str]:
    """Of the records that were read, how many are not in the dataset, and why."""
    labels = {name: name.replace("_", " ") for name in report if name not in ("records", "bad", "duplicates_dropped")}
    dropped = report.get("duplicates_dropped")
    labels["duplicates"] = "exact duplicates" if dropped else "exact duplicates (kept: data.deduplicate is off)"
    rows = [(label, f"{report[name]:,}") for name, label in labels.items() if report.get(name)]
    if not rows:
        return []
    lines = ["### Left out", "", f"Of {report['records']:,} records read:", "", *table(("why", "how many"), rows)]
    return [*lines, *(f"- {cell(reason)}" for reason in report.get("bad", [])), ""]


def _words(value: Any) -> str:
    """Anything of the manifest in words: never a raw dict or list."""
    if isinstance(value, dict):
        return ", ".join(f"{str(name).replace('_', ' ')} {_words(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_words(one) for one in value[:5]) + (f" and {len(value) - 5} more" if len(value) > 5 else "")
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else "unknown"
        if value is None
        else str(value)
    )
