"""How much a model with a memory can learn to remember from rows: the share of inputs that follow enough of their own document."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infini_llama.tasks.preprocess.tokens.reader import TokenReader, document_lengths
from infini_llama.tasks.records.manifest import Shard

PARTS = (8, 4, 2)  # of a row: the segment lengths that Infini-attention is usually trained with


def history(dataset: Path, chunks: str, split: str, shards: Sequence[Shard]) -> dict[int, float]:
    """{n: share of all inputs that have at least n earlier tokens of their own document in their row}, n a part of a row.

    With segments of n tokens these are about the inputs for which the memory holds anything of use.
    """
    reader = TokenReader(dataset, chunks, split)
    if reader.pieces is not None:
        runs = reader.pieces[:, 1] - 1  # the last token of a piece is a label alone
    else:
        lengths = document_lengths(dataset, shards)
        runs = run_lengths(reader.starts, reader.sequence_length, lengths.cumsum() - lengths)
    total = max(1, int(runs.sum()))
    distances = [max(1, reader.sequence_length // part) for part in PARTS]
    return {n: float(np.maximum(runs - n, 0).sum() / total) for n in distances}


def run_lengths(starts: np.ndarray, length: int, documents: np.ndarray) -> np.ndarray:
    """int64 [runs]: how many tokens of one document after another stand in the rows of `length` inputs from `starts` on.

    Args:
        documents: int64 [documents], ascending: the first token of each.
    """
    first = np.searchsorted(documents, starts, side="right")
    counts = np.searchsorted(documents, starts + length, side="left") - first + 1
    ends = counts.cumsum()
    place = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    within = np.minimum(np.repeat(first, counts) + place - 1, len(documents) - 1)
    begins = np.where(place == 0, np.repeat(starts, counts), documents[within])
    stops = np.append(begins[1:], 0)
    stops[ends - 1] = starts + length
    return stops - begins
