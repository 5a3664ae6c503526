"""What a dataset holds and whether it is whole, as Markdown for Prefect's page of the run."""

from infini_llama.tasks.formatting import NATS_PER_BIT, cell, in_bytes, table, text_block
from infini_llama.tasks.records.dataset import DatasetRef, DatasetSummary, DocumentLengths, SplitSummary, VerifyReport
from infini_llama.tasks.records.manifest import SPLITS, LeftOut


def card(dataset: DatasetSummary, reference: DatasetRef, report: VerifyReport) -> str:
    """Sources, tokens, lengths, rows, what was left out, the checks, and rows as text."""
    rows = dataset.chunks[reference.chunks]
    lines = [f"## Dataset {reference.name}", ""]
    checked = f"{len(report.checks)} checks, {in_bytes(report.checked_bytes)} read"
    facts = [
        ("source", dataset.source),
        ("license", dataset.license),
        ("vocabulary", f"{dataset.vocab_size:,} tokens ({dataset.dtype})"),
        ("on disk", in_bytes(dataset.bytes_on_disk)),
        (
            "this run",
            f"built {' and '.join(reference.built)}" if reference.built else "complete already, nothing built",
        ),
        ("rows", f"{rows.sequence_length:,} tokens each, strategy '{rows.strategy}'"),
        ("checked", f"{'whole' if report.ok else 'DAMAGED'}: {checked}"),
    ]
    lines += table(("what", "value"), facts)
    lines += [f"- folder: `{dataset.path}`", f"- digest: `{dataset.digest}`", "", "### Text", ""]
    heads = ("split", "documents", "tokens", "bytes per token", "shards", "rows", "unigram entropy")
    lines += table(heads, (_split(name, dataset.splits[name], rows.rows[name]) for name in SPLITS))
    lines += [
        "The unigram entropy, in nats per token, is the loss of a model that only knows how often each token occurs.",
        "",
    ]
    lines += ["### Tokens per document", ""]
    lengths = (_lengths(name, dataset.splits[name].document_tokens) for name in SPLITS)
    lines += table(("split", "shortest", "5th percentile", "median", "95th percentile", "longest"), lengths)
    lines += _left_out(dataset.left_out)
    lines += ["### Decoded sequences", ""]
    for sample in dataset.samples:
        lines += text_block(sample, 600)
    return "\n".join(lines)


def _split(name: str, one: SplitSummary, rows: int) -> tuple[str, ...]:
    per_token, entropy = f"{one.bytes_per_token:.2f}", f"{one.unigram_entropy_bits * NATS_PER_BIT:.3f}"
    return name, f"{one.documents:,}", f"{one.tokens:,}", per_token, str(one.shards), f"{rows:,}", entropy


def _lengths(name: str, tokens: DocumentLengths) -> tuple[str, ...]:
    return name, *(f"{count:,}" for count in (tokens.shortest, tokens.p5, tokens.median, tokens.p95, tokens.longest))


def _left_out(report: LeftOut) -> list[str]:
    """Of the records that were read, how many are not in the dataset, and why."""
    kept = "" if report.duplicates_dropped else " (kept: data.deduplicate is off)"
    reasons = [
        ("empty", report.empty),
        ("too short", report.too_short),
        (f"exact duplicates{kept}", report.duplicates),
        ("also validation", report.also_validation),
        ("bad records", report.bad_records),
        ("bad files", report.bad_files),
    ]
    rows = [(reason, f"{count:,}") for reason, count in reasons if count]
    if not rows:
        return []
    lines = ["### Skipped", "", f"Of {report.records:,} records read:", "", *table(("why", "how many"), rows)]
    return [*lines, *(f"- {cell(reason)}" for reason in report.bad), ""]
