"""A dataset as a document: what it holds, where it is from, what was left out, whether it is whole, and rows of it as text."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from infini_llama.tasks.document import Document, Part, bullets, cell, code, facts, part, section, table, text_block
from infini_llama.tasks.formatting import Cells, in_bytes, in_words, packed, side_by_side
from infini_llama.tasks.records.dataset import (
    DatasetRef,
    DatasetSummary,
    DocumentLengths,
    RowTableSummary,
    SplitSummary,
    VerifyReport,
)
from infini_llama.tasks.records.manifest import SPLITS, LeftOut

LENGTHS = {"p5": "5th percentile", "p95": "95th percentile"}


def dataset_document(
    dataset: DatasetSummary,
    verified: VerifyReport | None = None,
    reference: DatasetRef | None = None,
    measured: tuple[Part, ...] = (),
) -> Document:
    """The dataset that `describe` summarised.

    Args:
        verified: what verify-data found.
        reference: of the run that asked for the dataset.
        measured: sections of what was counted of its tokens.
    """
    splits = {split: dataset.splits[split] for split in SPLITS}
    headline = {
        "documents": f"{sum(split.documents for split in splits.values()):,}",
        "tokens": f"{sum(split.tokens for split in splits.values()):,}",
        "of text": in_bytes(sum(split.bytes for split in splits.values())),
        "bytes per token": f"{dataset.splits.train.bytes_per_token:.2f}",
        "vocabulary": f"{dataset.vocab_size:,}",
        "training rows": ", ".join(f"{table.rows.train:,}" for table in dataset.chunks.values()) or "none",
    }
    lengths = [{"split": name, **_lengths(split.document_tokens)} for name, split in splits.items()]
    sources = [{"source": name} | one.model_dump(by_alias=True) for name, one in dataset.sources.items()]
    parts = (
        f"{cell(dataset.source)}, built {cell(dataset.created)}",
        facts(headline),
        *section("Checks", *(_checks(verified) if verified else ())),
        *section("Splits", table(side_by_side({name: _numbers(split) for name, split in splits.items()}))),
        *section("Tokens per document", table(lengths)),
        *measured,
        *section("Sources", table(sources)),
        *section("Rows", *(_rows(name, rows) for name, rows in dataset.chunks.items())),
        *section("Skipped", _left_out(dataset.left_out)),
        *section("Sequences as text", *map(text_block, dataset.samples)),
        *section("Files", _files(dataset, reference)),
    )
    return Document(f"Dataset {Path(dataset.path).name}", parts)


def _checks(verified: VerifyReport) -> Iterator[Part]:
    whole = "all checks passed" if verified.ok else "DAMAGED"
    yield f"{verified.level}: {in_bytes(verified.checked_bytes)} read in {verified.seconds:.1f} s, {whole}"
    yield table([{"check": check.name, "found": check.detail} for check in verified.checks])


def _numbers(split: SplitSummary) -> Cells:
    return in_words(split.model_dump(exclude={"document_tokens"}))


def _lengths(tokens: DocumentLengths) -> Cells:
    return {LENGTHS.get(name, name): value for name, value in tokens}


def _rows(name: str, rows: RowTableSummary) -> str:
    about = {"row table": name} | rows.model_dump(exclude={"rows", "packing"})
    costs = {split: packed(rows.packing[split]) if rows.packing else {} for split in SPLITS}
    columns = {split: {"rows": rows.rows[split], **costs[split]} for split in SPLITS}
    return part(cell(name), f"{facts(in_words(about))}\n\n{table(side_by_side(columns))}")


def _left_out(report: LeftOut) -> str:
    """Of the records that were read, how many are not in the dataset, and why."""
    kept = "" if report.duplicates_dropped else " (kept: data.deduplicate is off)"
    reasons = {
        "empty": report.empty,
        "too short": report.too_short,
        f"exact duplicates{kept}": report.duplicates,
        "also validation": report.also_validation,
        "bad records": report.bad_records,
        "bad files": report.bad_files,
    }
    rows = [{"why": why, "how many": count} for why, count in reasons.items() if count]
    if not rows and not report.other_files:
        return ""
    others = (
        f"{count:,} {cell(kind)} file(s) in folders of text were not read" for kind, count in report.other_files.items()
    )
    return f"Of {report.records:,} records read:\n\n{table(rows)}\n\n{bullets(chain(map(cell, report.bad), others))}".rstrip()


def _files(dataset: DatasetSummary, reference: DatasetRef | None) -> str:
    about = {"license": dataset.license, "kept as": dataset.dtype, "on disk": in_bytes(dataset.bytes_on_disk)}
    if reference is not None:
        built = f"built {' and '.join(reference.built)}" if reference.built else "complete already, nothing built"
        about |= {"this run": built}
    places = bullets((f"folder: {code(dataset.path)}", f"digest: {code(dataset.digest)}"))
    return f"{facts(about)}\n\n{places}"
