"""A dataset as a record and as a document: counts, lengths, row tables and rows as text.

On request, the document also has statistics of the tokens.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.errors import TokenizerFails, tokenizer_faults
from infini_llama.configs.reading import changed
from infini_llama.tasks.document import (
    Block,
    Chart,
    Curve,
    Detail,
    Document,
    bullets,
    cell,
    code,
    facts,
    section,
    subsection,
    table,
    text_block,
)
from infini_llama.tasks.formatting import (
    Cells,
    in_bytes,
    in_words,
    packed,
    side_by_side,
)
from infini_llama.tasks.preprocess.tokens.reader import PackedRows, TokenReader
from infini_llama.tasks.preprocess.tokens.shards import document_lengths, map_shard
from infini_llama.tasks.records.dataset import (
    DatasetRef,
    DatasetSummary,
    DocumentLengths,
    RowTableSummary,
    SourceSummary,
    SplitSummary,
    VerifyReport,
)
from infini_llama.tasks.records.decision import Decision
from infini_llama.tasks.records.manifest import (
    SPLITS,
    BySplit,
    DatasetContent,
    Inexpressible,
    LeftOut,
    Origin,
    SourceStats,
    SplitContent,
)
from infini_llama.tasks.storage.artifacts import (
    ROW_TABLES,
    has_all_files,
    read_dataset,
    read_row_table,
    row_tables,
)
from infini_llama.tasks.storage.dataset_files import (
    read_token_bytes,
    read_tokenizer,
    verify_dataset,
)

SAMPLES = 3
LENGTHS = {"p5": "5th percentile", "p95": "95th percentile"}
# Tokens of a split whose frequencies are counted; more would only take time.
MOST_TOKENS = 50_000_000
BINS = 40
COMMON = 24  # tokens in the table of the most frequent ones


def describe(path: Path) -> DatasetSummary:
    """Facts of the dataset in folder `path`.

    These are its source, splits, document lengths and row tables, and the first rows as text.

    Raises:
        Damaged: the folder is no complete dataset.
    """
    manifest = read_dataset(path)
    content = manifest.content
    meta = manifest.meta
    tables = [
        folder for folder in row_tables(path) if has_all_files(folder, ROW_TABLES)
    ]
    summary = DatasetSummary(
        path=str(path),
        digest=manifest.digest,
        created=manifest.created,
        source=meta.provenance.source,
        license=meta.provenance.license,
        vocab_size=content.vocab_size,
        dtype=content.dtype,
        bytes_on_disk=sum(file.size for file in manifest.files.values()),
        splits=BySplit(
            train=_split(path, content.train),
            validation=_split(path, content.validation),
        ),
        row_tables={folder.name: _rows(folder) for folder in tables},
        left_out=meta.left_out,
        inexpressible=meta.inexpressible,
        samples=_samples(path, tables[0].name) if tables else (),
    )
    if meta.workers:
        summary = changed(summary, workers=meta.workers)
    if content.train.sources:
        summary = changed(summary, sources=_sources(meta.provenance.sources, content))
    return summary


def built(created: str, workers: Decision | None) -> str:
    """The time at which a dataset was built, and by which workers, if they were chosen."""
    return f"{created} by {workers.value} ({workers.reason})" if workers else created


def _sources(
    sources: Iterable[Origin],
    content: DatasetContent,
) -> dict[str, SourceSummary]:
    """Each of several sources by name."""
    train = {stats.name: stats for stats in content.train.sources}
    held_out = {stats.name: stats for stats in content.validation.sources}
    # Of a source without text in the split.
    nothing = SourceStats(name="", documents=0, tokens=0, bytes=0)
    summaries = {}
    for source in sources:
        stats = train.get(source.name, nothing)
        validation = held_out.get(source.name, nothing)
        summaries[source.name] = SourceSummary(
            weight=source.weight,
            license=source.license,
            loss_on=source.loss_on,
            documents=stats.documents,
            tokens=stats.tokens,
            bytes=stats.bytes,
            validation_documents=validation.documents,
            validation_tokens=validation.tokens,
        )
    return summaries


def _rows(folder: Path) -> RowTableSummary:
    manifest = read_row_table(folder)
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
            shortest=content.shortest_document,
            p5=p5,
            median=median,
            p95=p95,
            longest=content.longest_document,
        ),
    )


def _samples(path: Path, row_table: str) -> tuple[str, ...]:
    tokenizer = read_tokenizer(path)
    reader = TokenReader(path, row_table, "train")
    rows = np.linspace(0, len(reader) - 1, SAMPLES).astype(np.int64)
    return tuple(_decoded(tokenizer, row.tolist()) for row in reader.gather(rows))


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    try:
        with tokenizer_faults():
            return tokenizer.decode(ids, skip_special_tokens=False)
    except TokenizerFails as fault:
        return f"({fault})"


def dataset_document(
    dataset: DatasetSummary,
    verified: VerifyReport | None = None,
    reference: DatasetRef | None = None,
    measured: tuple[Block, ...] = (),
) -> Document:
    """The dataset that `describe` summarised.

    Args:
        verified: what verify-data found.
        reference: of the run that uses the dataset.
        measured: sections of what was counted of its tokens.
    """
    if reference is not None:
        dataset = changed(dataset, **dict(reference.text))
    splits = {split: dataset.splits[split] for split in SPLITS}
    numbers = {
        name: in_words(split.model_dump(exclude={"document_tokens"}))
        for name, split in splits.items()
    }
    lengths = [
        {"split": name, **_lengths(split.document_tokens)}
        for name, split in splits.items()
    ]
    sources = [
        {"source": name} | source.model_dump(by_alias=True)
        for name, source in dataset.sources.items()
    ]
    skipped = "Skipped" if reference else "Skipped when it was built"
    parts = (
        f"{cell(dataset.source)}, built {cell(built(dataset.created, dataset.workers))}",
        facts(_headline(dataset)),
        *section("Checks", *(_checks(verified) if verified else ())),
        *section("Splits", table(side_by_side(numbers))),
        *section("Tokens per document", table(lengths)),
        *measured,
        *section("Sources", table(sources)),
        *section(
            "Rows",
            *(_row_facts(name, rows) for name, rows in dataset.row_tables.items()),
        ),
        *section(skipped, _left_out(dataset.left_out)),
        *section("Text without tokens", _inexpressible(dataset.inexpressible)),
        *section("Sequences as text", *map(text_block, dataset.samples)),
        *section("Files", _files(dataset, reference)),
    )
    return Document(f"Dataset {Path(dataset.path).name}", parts)


def _headline(dataset: DatasetSummary) -> Cells:
    """The most important numbers of a dataset."""
    splits = {split: dataset.splits[split] for split in SPLITS}
    rows = ", ".join(f"{rows.rows.train:,}" for rows in dataset.row_tables.values())
    return {
        "documents": f"{sum(split.documents for split in splits.values()):,}",
        "tokens": f"{sum(split.tokens for split in splits.values()):,}",
        "of text": in_bytes(sum(split.bytes for split in splits.values())),
        "bytes per token": f"{dataset.splits.train.bytes_per_token:.2f}",
        "vocabulary": f"{dataset.vocab_size:,}",
        "training rows": rows or "none",
    }


def _checks(verified: VerifyReport) -> Iterator[Block]:
    yield (
        f"{verified.level}: {in_bytes(verified.checked_bytes)} read in {verified.seconds:.1f} s, "
        "all checks passed"
    )
    yield table(
        [{"check": check.name, "found": check.detail} for check in verified.checks]
    )


def _lengths(tokens: DocumentLengths) -> Cells:
    return {LENGTHS.get(name, name): value for name, value in tokens}


def _row_facts(name: str, rows: RowTableSummary) -> str:
    about = {"row table": name} | rows.model_dump(
        exclude={"rows", "packing", "sources"}
    )
    columns = {}
    for split in SPLITS:
        column: dict[str, object] = {"rows": rows.rows[split]}
        if rows.sources:
            column |= {f"of {part.name}": part.rows for part in rows.sources[split]}
        if rows.packing:
            column |= packed(rows.packing[split])
        columns[split] = column
    return subsection(
        cell(name), f"{facts(in_words(about))}\n\n{table(side_by_side(columns))}"
    )


def _left_out(report: LeftOut) -> str:
    """How many of the records that were read are not in the dataset, and why."""
    rows = [{"why": why, "how many": count} for why, count in report.reasons().items()]
    if not rows and not report.other_files and not report.own_files:
        return ""
    others = (
        *(
            f"{cell(place)}: {count:,} file(s) left out, which are no text"
            for place, count in report.own_files.items()
        ),
        *(
            f"{count:,} {cell(kind)} file(s) in folders of text were not read"
            for kind, count in report.other_files.items()
        ),
    )
    return (
        f"Of {report.records:,} records read:\n\n{table(rows)}\n\n"
        f"{bullets(chain(map(cell, report.bad), others))}"
    ).rstrip()


def _inexpressible(lost: Inexpressible) -> str:
    if not lost.files:
        return ""
    return (
        f"{lost.share:.2%} of the text, {lost.unknown:,} unknown tokens:\n\n"
        f"{bullets(map(cell, lost.files))}"
    )


def _files(dataset: DatasetSummary, reference: DatasetRef | None) -> str:
    about = {
        "license": dataset.license,
        "kept as": dataset.dtype,
        "on disk": in_bytes(dataset.bytes_on_disk),
    }
    if reference is not None:
        about["this run"] = (
            f"built {' and '.join(reference.built)}"
            if reference.built
            else "complete already, nothing built"
        )
    places = bullets(
        (f"folder: {code(dataset.path)}", f"digest: {code(dataset.digest)}")
    )
    return f"{facts(about)}\n\n{places}"


def measured_dataset(path: Path, verified: VerifyReport | None = None) -> Document:
    """The document of the dataset in folder `path`, with statistics of its tokens.

    The tokens are read as far as MOST_TOKENS.

    Args:
        verified: what `infini-llama verify` found.

    Raises:
        DataError: the folder is no complete dataset, or a file is damaged.
    """
    if verified is None:
        verify_dataset(path)
    summary = describe(path)
    content = read_dataset(path).content
    counts = training_counts(path, content)
    lengths = {split: document_lengths(path, content[split].shards) for split in SPLITS}
    widths = list[Curve]()
    if content.lossless:  # otherwise a token has no bytes of its own
        widths.append(_widths(counts, read_token_bytes(path)))
    drawn = (
        Chart(
            "Tokens per document, share of documents",
            _histograms(lengths),
            "tokens",
            log_x=True,
        ),
        Chart("Bytes per token, share of all tokens", widths, "bytes"),
        Chart(
            "How often the n-th most frequent token occurs",
            [_ranks(counts)],
            "n",
            log=True,
            log_x=True,
        ),
        *(_fill(path, name) for name in summary.row_tables),
    )
    measured = (
        *section("Distributions", *drawn),
        *section("Tokens", *_tokens(path, counts)),
    )
    return dataset_document(summary, verified, measured=measured)


def training_counts(path: Path, content: DatasetContent) -> np.ndarray:
    """How often each token occurs in the first MOST_TOKENS training tokens, int64 [vocab_size]."""
    counts = np.zeros(content.vocab_size, dtype=np.int64)
    left = MOST_TOKENS
    for shard in content.train.shards:
        values = map_shard(path / shard.file)[1][:left]
        counts += np.bincount(values, minlength=len(counts))
        left -= len(values)
    return counts


def _histograms(of: dict[str, np.ndarray]) -> list[Curve]:
    """Share of each one's values in the same bins, of equal ratios."""
    everything = np.concatenate(list(of.values()))
    ratios = np.geomspace(max(1, everything.min()), everything.max() + 1, BINS + 1)
    edges = np.unique(np.round(ratios))
    shares = {
        name: np.histogram(values, edges)[0] / max(1, len(values))
        for name, values in of.items()
    }
    return [
        Curve(name, edges.tolist(), share.tolist(), "bars")
        for name, share in shares.items()
    ]


def _widths(counts: np.ndarray, token_bytes: np.ndarray) -> Curve:
    """Share of the text's tokens that stand for so many bytes.

    The last bar also has the longest thousandth of them.
    """
    widths = np.bincount(token_bytes, weights=counts) / max(1, counts.sum())
    last = int(np.searchsorted(np.cumsum(widths), 0.999))
    widths = np.append(widths[:last], widths[last:].sum())
    edges = np.arange(len(widths) + 1) - 0.5
    return Curve("share of tokens", edges.tolist(), widths.tolist(), "bars")


def _ranks(counts: np.ndarray) -> Curve:
    sizes = np.sort(counts[counts > 0])[::-1]
    chosen = (
        np.unique(np.geomspace(1, len(sizes), 200).astype(np.int64)) - 1
        if len(sizes)
        else []
    )
    return Curve(
        "occurrences",
        [float(n + 1) for n in chosen],
        [float(sizes[n]) for n in chosen],
    )


def _fill(path: Path, row_table: str) -> Chart:
    """Fraction of a sequence that is no padding, where documents are packed into rows."""
    reader = TokenReader(path, row_table, "train")
    curves = []
    if isinstance(reader.rows, PackedRows) and len(reader):
        filled = reader.rows.fill()
        edges = np.linspace(0, 1, 21)
        counts = np.histogram(filled / reader.sequence_length, edges)[0] / len(reader)
        curves.append(Curve("rows", edges.tolist(), counts.tolist(), "bars"))
    title = f"Fraction of a sequence that is no padding ({row_table})"
    return Chart(title, curves, "fraction of positions")


def _tokens(path: Path, counts: np.ndarray) -> Iterator[Block]:
    tokenizer = read_tokenizer(path)
    counted = int(counts.sum())
    common = np.argsort(-counts, kind="stable")[:COMMON]
    never = int((counts == 0).sum())
    rows = [
        {
            "id": str(token),
            "text": repr(_decoded(tokenizer, [token])),
            "share": f"{counts[token] / max(1, counted):.2%}",
        }
        for token in common.tolist()
        if counts[token]
    ]
    yield (
        f"Of {counted:,} training tokens; {never:,} of {len(counts):,} in the vocabulary never "
        "occur among them."
    )
    yield Detail(f"The {len(rows)} most frequent ones", table(rows))
