"""HTML page of a dataset: lengths of documents and tokens, packing, and sequences as text."""

from pathlib import Path

import numpy as np

from infini_llama.tasks.formatting import Cells, in_bytes, in_words, packed, side_by_side
from infini_llama.tasks.preprocess.summary import describe
from infini_llama.tasks.preprocess.tokens.reader import TokenReader, document_lengths, map_list
from infini_llama.tasks.records.dataset import DatasetSummary, RowTableSummary, SplitSummary, VerifyReport
from infini_llama.tasks.records.manifest import SPLITS, DatasetContent
from infini_llama.tasks.report import page
from infini_llama.tasks.report.charts import Chart, Curve, figures
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.storage.dataset_files import read_token_bytes, read_tokenizer, verify_dataset

MOST_TOKENS = 50_000_000  # of a split whose frequencies are counted; more would only take time
BINS, COMMON = 40, 24


def dataset_page(path: Path, verified: VerifyReport | None = None) -> str:
    """The page of the dataset in folder `path`, which is read as far as MOST_TOKENS.

    Args:
        verified: what `infini-llama verify` found, to stand on the page.

    Raises:
        DataError: the folder is no complete dataset, or a file is damaged.
    """
    verify_dataset(path)
    summary, content = describe(path), read_dataset(path).content
    splits = {split: summary.splits[split] for split in SPLITS}
    headline = {
        "documents": f"{sum(split.documents for split in splits.values()):,}",
        "tokens": f"{sum(split.tokens for split in splits.values()):,}",
        "of text": in_bytes(sum(split.bytes for split in splits.values())),
        "bytes per token": f"{summary.splits.train.bytes_per_token:.2f}",
        "vocabulary": f"{summary.vocab_size:,}",
        "training rows": ", ".join(f"{table.rows.train:,}" for table in summary.chunks.values()) or "none",
    }
    counts = token_counts(path, content)
    token_bytes = read_token_bytes(path)
    drawn = [
        Chart(
            "Tokens per document, share of documents",
            _histograms({split: document_lengths(path, content[split].shards) for split in splits}),
            "tokens",
            log_x=True,
        ),
        Chart("Bytes per token, share of all tokens", [_widths(counts, token_bytes)], "bytes"),
        Chart("How often the n-th most frequent token occurs", [_ranks(counts)], "n", log=True, log_x=True),
        *(_fill(path, name) for name in summary.chunks),
    ]
    return page.page(
        f"Dataset {path.name}",
        f"<h1>Dataset {page.text(path.name)}</h1>",
        f'<p class="note">{page.text(summary.source)}, built {page.text(summary.created)}; written {page.now()}</p>',
        page.tiles(headline),
        page.section("Checks", *(_checks(verified) if verified else ())),
        page.section("Distributions", figures(drawn)),
        page.section("Splits", page.table(side_by_side({name: _numbers(split) for name, split in splits.items()}))),
        page.section(
            "Sources",
            page.table([{"source": name} | one.model_dump(by_alias=True) for name, one in summary.sources.items()]),
        ),
        page.section("Rows", *(_rows(name, table) for name, table in summary.chunks.items())),
        page.section("Skipped documents and duplicates", page.facts(in_words(dict(summary.left_out)))),
        page.section("Tokens", *_tokens(path, counts)),
        page.section("Sequences as text", *(page.preformatted(text) for text in summary.samples)),
        page.section("Source", page.facts(_source(summary))),
    )


def token_counts(path: Path, content: DatasetContent) -> np.ndarray:
    """How often each token occurs in the first MOST_TOKENS training tokens, int64 [vocab_size]."""
    counts, left = np.zeros(content.vocab_size, dtype=np.int64), MOST_TOKENS
    for shard in content.train.shards:
        values = map_list(path / shard.file)[1][:left]
        counts += np.bincount(values, minlength=len(counts))
        left -= len(values)
    return counts


def _histograms(of: dict[str, np.ndarray]) -> list[Curve]:
    """Share of each one's values in the same bins, of equal ratios."""
    everything = np.concatenate(list(of.values()))
    edges = np.unique(np.round(np.geomspace(max(1, everything.min()), everything.max() + 1, BINS + 1)))
    shares = {name: np.histogram(values, edges)[0] / max(1, len(values)) for name, values in of.items()}
    return [Curve(name, edges.tolist(), share.tolist(), "bars") for name, share in shares.items()]


def _widths(counts: np.ndarray, token_bytes: np.ndarray) -> Curve:
    """Share of the text's tokens that stand for so many bytes; the last bar also has the longest thousandth of them."""
    widths = np.bincount(token_bytes, weights=counts) / max(1, counts.sum())
    last = int(np.searchsorted(np.cumsum(widths), 0.999))
    widths = np.append(widths[:last], widths[last:].sum())
    return Curve("share of tokens", (np.arange(len(widths) + 1) - 0.5).tolist(), widths.tolist(), "bars")


def _ranks(counts: np.ndarray) -> Curve:
    sizes = np.sort(counts[counts > 0])[::-1]
    chosen = np.unique(np.geomspace(1, len(sizes), 200).astype(np.int64)) - 1 if len(sizes) else []
    return Curve("occurrences", [float(n + 1) for n in chosen], [float(sizes[n]) for n in chosen])


def _fill(path: Path, chunks: str) -> Chart:
    """Fraction of a sequence that is targets, where documents are packed into rows."""
    reader, curves = TokenReader(path, chunks, "train"), []
    if reader.pieces is not None and len(reader):
        targets = np.add.reduceat(reader.pieces[:, 1] - 1, reader.starts[:-1])
        edges = np.linspace(0, 1, 21)
        counts = np.histogram(targets / reader.sequence_length, edges)[0] / len(reader)
        curves.append(Curve("rows", edges.tolist(), counts.tolist(), "bars"))
    return Chart(f"Fraction of a sequence that is targets ({chunks})", curves, "fraction of positions")


def _numbers(split: SplitSummary) -> Cells:
    lengths = {f"tokens per document, {what}": value for what, value in split.document_tokens}
    return in_words(split.model_dump(exclude={"document_tokens"})) | lengths


def _rows(name: str, table: RowTableSummary) -> str:
    facts = {"row table": name} | table.model_dump(exclude={"rows", "packing"})
    costs = {split: packed(table.packing[split]) if table.packing else {} for split in SPLITS}
    rows = {split: {"rows": table.rows[split], **costs[split]} for split in SPLITS}
    return page.facts(in_words(facts)) + page.table(side_by_side(rows))


def _tokens(path: Path, counts: np.ndarray) -> list[str]:
    tokenizer = read_tokenizer(path)
    counted = int(counts.sum())
    common = np.argsort(-counts, kind="stable")[:COMMON]
    never = int((counts == 0).sum())
    words = f"Of {counted:,} training tokens; {never:,} of {len(counts):,} in the vocabulary never occur among them."
    rows = [
        {
            "id": str(token),
            "text": repr(tokenizer.decode([token], skip_special_tokens=False)),
            "share": f"{counts[token] / max(1, counted):.2%}",
        }
        for token in common.tolist()
        if counts[token]
    ]
    return [f'<p class="note">{words}</p>', page.details(f"The {len(rows)} most frequent ones", page.table(rows))]


def _checks(verified: VerifyReport) -> list[str]:
    words = f"{verified.level}: {in_bytes(verified.checked_bytes)} read in {verified.seconds:.1f} s, all checks passed"
    found = [{"name": check.name, "detail": check.detail} for check in verified.checks]
    return [f'<p class="note">{page.text(words)}</p>', page.table(found)]


def _source(summary: DatasetSummary) -> Cells:
    names = {"path", "source", "license", "created", "dtype", "digest"}
    return summary.model_dump(include=names) | {"on disk": in_bytes(summary.bytes_on_disk)}
