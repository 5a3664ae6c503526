"""What a dataset holds, for people: counts, lengths, and rows decoded."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.tokens.reader import TokenReader, document_lengths
from infini_llama.tasks.records.dataset import (
    DatasetSummary,
    DocumentLengths,
    RowTableSummary,
    SourceSummary,
    SplitSummary,
)
from infini_llama.tasks.records.manifest import BySplit, DatasetContent, Provenance, SplitContent
from infini_llama.tasks.storage.artifacts import is_complete, read_dataset, read_row_table

SAMPLES = 3


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
