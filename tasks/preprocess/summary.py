"""What a dataset holds, for people: counts, lengths and decoded rows as a record, and that as a document."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.reading import changed
from infini_llama.tasks.document import Document, Part, bullets, cell, code, facts, part, section, table, text_block
from infini_llama.tasks.formatting import Cells, in_bytes, in_words, packed, side_by_side
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import document_lengths
from infini_llama.tasks.records.dataset import (
    DatasetRef,
    DatasetSummary,
    DocumentLengths,
    RowTableSummary,
    SourceSummary,
    SplitSummary,
    VerifyReport,
)
from infini_llama.tasks.records.manifest import SPLITS, BySplit, DatasetContent, LeftOut, Provenance, SplitContent
from infini_llama.tasks.storage.artifacts import is_complete, read_dataset, read_row_table

SAMPLES = 3
LENGTHS = {"p5": "5th percentile", "p95": "95th percentile"}


def describe(path: Path) -> DatasetSummary:
    """Facts of the dataset in folder `path`: source, splits, document lengths, row tables, and the first rows as text.

    Raises:
        Damaged: the folder is no complete dataset.
    """
    manifest = read_dataset(path)
    content, meta = manifest.content, manifest.meta
    tables = [table for table in sorted((path / "chunks").glob("[!.]*")) if is_complete(table, "chunks")]
    summary = DatasetSummary(
        path=str(path),
        digest=manifest.digest,
        created=manifest.created,
        source=meta.source,
        license=meta.license,
        vocab_size=content.vocab_size,
        dtype=content.dtype,
        bytes_on_disk=sum(file.size for file in manifest.files.values()),
        splits=BySplit(train=_split(path, content.train), validation=_split(path, content.validation)),
        chunks={table.name: _rows(table) for table in tables},
        left_out=meta.left_out,
        samples=_samples(path, tables[0].name) if tables else (),
    )
    return changed(summary, sources=_sources(meta.sources, content)) if meta.sources else summary


def _sources(sources: Iterable[Provenance], content: DatasetContent) -> dict[str, SourceSummary]:
    """Each of several sources by name."""
    held_out = {stats.name: stats for stats in content.validation.sources}
    found = {}
    for source, stats in zip(sources, content.train.sources, strict=True):
        own = held_out.get(source.name)
        found[source.name] = SourceSummary(
            weight=source.weight,
            license=source.license,
            documents=stats.documents,
            tokens=stats.tokens,
            bytes=stats.bytes,
            validation_documents=own.documents if own else 0,
            validation_tokens=own.tokens if own else 0,
        )
    return found


def _rows(table: Path) -> RowTableSummary:
    manifest = read_row_table(table)
    packing = {"packing": manifest.meta.packing} if manifest.meta.packing else {}
    return RowTableSummary.model_validate(manifest.content.to_json() | packing)


def _split(path: Path, content: SplitContent) -> SplitSummary:
    lengths = document_lengths(path, content.shards)
    p5, median, p95 = (int(np.quantile(lengths, share)) for share in (0.05, 0.5, 0.95))
    return SplitSummary(
        documents=content.documents,
        tokens=content.tokens,
        bytes=content.bytes,
        bytes_per_token=content.bytes / content.tokens,
        shards=len(content.shards),
        unigram_entropy_bits=content.unigram_entropy_bits,
        document_tokens=DocumentLengths(
            shortest=content.shortest_document, p5=p5, median=median, p95=p95, longest=content.longest_document
        ),
    )


def _samples(path: Path, chunks: str) -> tuple[str, ...]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    reader = TokenReader(path, chunks, "train")
    rows = np.linspace(0, len(reader) - 1, SAMPLES).astype(np.int64)
    return tuple(tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in reader.gather(rows))


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
        *section("Rows", *(_row_facts(name, rows) for name, rows in dataset.chunks.items())),
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


def _row_facts(name: str, rows: RowTableSummary) -> str:
    about = {"row table": name} | rows.model_dump(exclude={"rows", "packing"})
    costs = {split: packed(rows.packing[split]) if rows.packing else {} for split in SPLITS}
    columns = {split: {"rows": rows.rows[split], **costs[split]} for split in SPLITS}
    return part(cell(name), f"{facts(in_words(about))}\n\n{table(side_by_side(columns))}")


def _left_out(report: LeftOut) -> str:
    """How many of the records that were read are not in the dataset, and why."""
    rows = [{"why": why, "how many": count} for why, count in report.reasons().items()]
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
