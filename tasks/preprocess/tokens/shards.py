"""Arrow shards of documents: written, and mapped into memory.

Their values buffers joined are one contiguous stream of tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError

import numpy as np
import pyarrow as pa

from infini_llama.configs.errors import DataError
from infini_llama.tasks.records.manifest import Shard
from infini_llama.tasks.storage.dataset_files import repairable
from infini_llama.tasks.storage.filesystem import mapping

# Column of the tokens of each document's prompt, where there are prompts (loss_on: answer).
PROMPTS = "prompt_tokens"
# Tokens counted together: bincount makes int64 of them, which stay in the processor's cache.
COUNTED = 250_000
LONG = 300  # tokens: documents of so many on average are faster copied one by one


def dtype_for(vocab_size: int) -> np.dtype:
    """The smaller of the two types of tokens that fits a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


class Stream:
    """Documents joined in memory, which grows as it is filled and is used again."""

    def __init__(self, dtype: np.dtype) -> None:
        self.values = np.empty(0, dtype=dtype)
        self.clear()

    def clear(self) -> None:
        self.filled = 0
        self._lengths: list[np.ndarray] = []
        self._prompts: list[np.ndarray] = []

    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.concatenate(self._lengths)

    def prompts(self) -> np.ndarray | None:
        """Tokens of each one's prompt, int64 [documents]; None where they have none."""
        return np.concatenate(self._prompts) if self._prompts else None

    def add(
        self,
        ids: np.ndarray,
        offsets: np.ndarray,
        eos: int,
        prompts: np.ndarray | None = None,
    ) -> None:
        """Add several documents, each with its end.

        Args:
            ids: of the documents, joined.
            offsets: where in the IDs each document begins, and their end, [documents + 1].
            eos: the token that ends a document.
            prompts: tokens of each one's prompt [documents], where the dataset has them.
        """
        if prompts is not None:
            self._prompts.append(prompts)
        lengths = np.diff(offsets) + 1
        end = self.filled + len(ids) + len(lengths)
        if end > len(self.values):
            grown = np.empty(max(end, 2 * len(self.values)), dtype=self.values.dtype)
            grown[: self.filled] = self.values[: self.filled]
            self.values = grown
        target = self.values[self.filled : end]
        ends = lengths.cumsum()
        target[ends - 1] = eos
        if len(ids) > LONG * len(lengths):
            begins = ends - lengths
            for first, last, begin in zip(offsets[:-1], offsets[1:], begins, strict=True):
                target[begin : begin + last - first] = ids[first:last]
        else:
            within = np.ones(len(target), dtype=bool)
            within[ends - 1] = False
            target[within] = ids
        self._lengths.append(lengths)
        self.filled = end


def write_shard(
    path: Path,
    values: np.ndarray,
    lengths: np.ndarray | list[int],
    prompts: np.ndarray | None = None,
) -> None:
    """Write one Arrow stream of one record batch.

    `datasets` reads streams, and one batch can be memory-mapped as one array.

    Args:
        values: tokens of all documents.
        lengths: tokens of each document.
        prompts: tokens of each document's prompt, a second column.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Not by pa.array, which imports pandas: half a second in every process.
    tokens = pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype),
        len(values),
        [None, pa.py_buffer(values)],
    )
    column = pa.LargeListArray.from_buffers(
        pa.large_list(tokens.type),
        len(lengths),
        [None, pa.py_buffer(offsets)],
        children=[tokens],
    )
    columns: list[pa.Array] = [column]
    names = ["input_ids"]
    if prompts is not None:
        prompts = np.ascontiguousarray(prompts, dtype=np.int64)
        prompt_column = pa.Array.from_buffers(
            pa.int64(),
            len(prompts),
            [None, pa.py_buffer(prompts)],
        )
        columns.append(prompt_column)
        names.append(PROMPTS)
    batch = pa.record_batch(columns, names=names)
    # Not a file of Python's, for which pyarrow copies all of the tokens.
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)


def map_shard(shard: Path) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of documents [documents + 1] and tokens of one shard, as views of the file.

    Raises:
        ConfigError: it cannot be mapped here.
        DataError: the file is no shard.
    """
    column = _batch_of(shard).column("input_ids")
    # Not by to_numpy, which imports pandas: half a second in every process.
    _, offsets, _, values = column.buffers()
    dtype = column.type.value_type.to_pandas_dtype()  # numpy's
    return (
        np.frombuffer(offsets, np.int64, len(column) + 1),
        np.frombuffer(values, dtype, len(column.values)),
    )


def map_prompts(shard: Path) -> np.ndarray:
    """Tokens of the prompt of each document of a shard, int64 [documents], as a view of the file.

    Raises:
        ConfigError: it cannot be mapped here.
        DataError: the file is no shard, or does not have them.
    """
    batch = _batch_of(shard)
    if PROMPTS not in batch.schema.names:
        raise DataError(f"{shard} has no column {PROMPTS}.")
    _, values = batch.column(PROMPTS).buffers()
    return np.frombuffer(values, np.int64, batch.num_rows)


def _batch_of(shard: Path) -> pa.RecordBatch:
    try:
        with mapping(shard):
            return pa.ipc.open_stream(pa.memory_map(str(shard))).read_next_batch()
    except (pa.ArrowInvalid, StopIteration, OSError) as error:
        raise DataError(f"{shard} is not a readable token shard ({error}).") from None


def map_array(file: Path) -> np.ndarray:
    """The array that `save_array` wrote, as a view of the file.

    Raises:
        ConfigError: it cannot be mapped here.
        DataError: the file is no array.
    """
    try:
        with mapping(file):
            return np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, TokenError) as error:  # numpy reads the header as Python
        raise DataError(f"{file} is not a readable array ({error}).") from None


def document_lengths(dataset: Path, shards: Sequence[Shard]) -> np.ndarray:
    """Tokens of each document of a split, int64 [documents], in order."""
    lengths = list[np.ndarray]()
    with repairable():
        for shard in shards:
            offsets, _ = map_shard(dataset / shard.file)
            lengths.append(np.diff(offsets))
        return np.concatenate(lengths)


def token_counts(values: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each token occurs, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(values), COUNTED):
        counts += np.bincount(values[start : start + COUNTED], minlength=vocab_size)
    return counts


def entropy_bits(counts: np.ndarray) -> float:
    """-sum p log2 p of the distribution with these counts.

    It is the loss of the best model that knows frequencies alone, in bits.
    """
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def save_array(path: Path, array: np.ndarray) -> None:
    """Write `array` as .npy.

    On a full disk the error says so, which that of `np.save` does not (it carries no errno).
    """
    array = np.ascontiguousarray(array)
    header = np.lib.format.header_data_from_array_1_0(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.data)
