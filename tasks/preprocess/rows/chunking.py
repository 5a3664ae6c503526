"""The chunk level: where the rows of a split are in its stream of tokens, computed with numpy."""

from collections.abc import Callable

import numpy as np

from infini_llama.tasks.preprocess.rows.packing import PACKED, RowArrays, pack

# Rows of documents of these lengths, int64 [documents], by strategy, sequence length and stride.
ComputeRows = Callable[[np.ndarray, str, int, int | None], RowArrays]


def row_count(tokens: int, sequence_length: int, stride: int | None = None) -> int:
    """How many rows there are that begin every `stride` tokens (of 'concat', every sequence_length) and are whole.

    A row reads one token more than sequence_length, the label of its last input; what is left at the end is shorter than a row.
    Hence row i covers tokens [i stride, i stride + sequence_length + 1).
    """
    return max(0, (tokens - 1 - sequence_length) // (stride or sequence_length) + 1)


def row_starts(count: int, step: int) -> np.ndarray:
    """First tokens, int64 [count], of rows that begin every `step` tokens."""
    return np.arange(count, dtype=np.int64) * step


def compute_rows(lengths: np.ndarray, strategy: str, sequence_length: int, stride: int | None = None) -> RowArrays:
    """The rows of documents of these `lengths`, int64 [documents], of `sequence_length` inputs each."""
    if strategy in PACKED:
        return pack(lengths, sequence_length, strategy)
    count = row_count(int(lengths.sum()), sequence_length, stride)
    return RowArrays(row_starts(count, stride or sequence_length))
