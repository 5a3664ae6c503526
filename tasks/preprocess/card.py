"""What a dataset holds and whether it is whole, as Markdown for Prefect's page of the run."""

from typing import Any

from tasks.cards import size, table, text_block

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
        ("on disk", size(dataset["bytes_on_disk"])),
        (
            "this run",
            f"built {' and '.join(reference['built'])}" if reference["built"] else "complete already, nothing built",
        ),
        ("rows", f"{rows['sequence_length']:,} tokens each, cut by '{rows['strategy']}'"),
        (
            "checked",
            f"{'whole' if report['ok'] else 'DAMAGED'}: {len(report['checks'])} checks, {size(report['checked_bytes'])} read",
        ),
        ("folder", f"`{dataset['path']}`"),
        ("digest", f"`{dataset['digest']}`"),
    ]
    lines += table(("what", "value"), ((name, _words(value)) for name, value in facts))
    lines += ["### Text", ""]
    lines += table(
        ("split", "documents", "tokens", "bytes", "bytes a token", "shards", "rows", "unigram entropy (bits a token)"),
        (
            (
                name,
                f"{one['documents']:,}",
                f"{one['tokens']:,}",
                f"{one['bytes']:,}",
                f"{one['bytes_per_token']:.2f}",
                one["shards"],
                f"{rows['rows'][name]:,}",
                f"{one['unigram_entropy_bits']:.3f}",
            )
            for name, one in splits.items()
        ),
    )
    lines += ["### Tokens of a document", ""]
    lengths = ((name, *(f"{one['document_tokens'][at]:,}" for at in LENGTHS)) for name, one in splits.items())
    lines += table(("split", "shortest", "5 % below", "median", "95 % below", "longest"), lengths)
    if left_out := {name: number for name, number in dataset["left_out"].items() if number}:
        lines += [
            "### Left out",
            "",
            *table(("why", "how many"), ((name.replace("_", " "), _words(n)) for name, n in left_out.items())),
        ]
    lines += ["### Rows as the model sees them", ""]
    for sample in dataset["samples"]:
        lines += text_block(sample, 600)
    return "\n".join(lines)


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
