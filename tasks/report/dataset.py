"""A dataset's document with what its tokens show: lengths of documents and tokens, frequencies, and how full its rows are."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from infini_llama.tasks.document import Chart, Curve, Detail, Document, Part, section, table
from infini_llama.tasks.preprocess.summary import dataset_document, describe
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import document_lengths, map_shard
from infini_llama.tasks.records.dataset import VerifyReport
from infini_llama.tasks.records.manifest import SPLITS, DatasetContent
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.storage.dataset_files import read_token_bytes, read_tokenizer, verify_dataset

MOST_TOKENS = 50_000_000  # of a split whose frequencies are counted; more would only take time
BINS, COMMON = 40, 24


def measured_dataset(path: Path, verified: VerifyReport | None = None) -> Document:
    """The document of the dataset in folder `path`, with what its tokens show; they are read as far as MOST_TOKENS.

    Args:
        verified: what `infini-llama verify` found.

    Raises:
        DataError: the folder is no complete dataset, or a file is damaged.
    """
    verify_dataset(path)
    summary, content = describe(path), read_dataset(path).content
    counts = token_counts(path, content)
    lengths = {split: document_lengths(path, content[split].shards) for split in SPLITS}
    drawn = (
        Chart("Tokens per document, share of documents", _histograms(lengths), "tokens", log_x=True),
        Chart("Bytes per token, share of all tokens", [_widths(counts, read_token_bytes(path))], "bytes"),
        Chart("How often the n-th most frequent token occurs", [_ranks(counts)], "n", log=True, log_x=True),
        *(_fill(path, name) for name in summary.chunks),
    )
    measured = (*section("Distributions", *drawn), *section("Tokens", *_tokens(path, counts)))
    return dataset_document(summary, verified, measured=measured)


def token_counts(path: Path, content: DatasetContent) -> np.ndarray:
    """How often each token occurs in the first MOST_TOKENS training tokens, int64 [vocab_size]."""
    counts, left = np.zeros(content.vocab_size, dtype=np.int64), MOST_TOKENS
    for shard in content.train.shards:
        values = map_shard(path / shard.file)[1][:left]
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


def _tokens(path: Path, counts: np.ndarray) -> Iterator[Part]:
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
    yield words
    yield Detail(f"The {len(rows)} most frequent ones", table(rows))
