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

# Column of which tokens count in the loss, beside input_ids; absent where all do.
LOSS_MASK = "loss_mask"
# Tokens counted together: bincount makes int64 of them, which stay in the processor's cache.
COUNTED = 250_000
LONG = 300  # tokens: documents of so many on average are faster copied one by one


def dtype_for(vocab_size: int) -> np.dtype:
    """The smaller of the two types of tokens that fits a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


class Stream:
    """Documents joined in memory, which grows as it is filled."""

    def __init__(self, dtype: np.dtype) -> None:
        self.values = np.empty(0, dtype=dtype)
        self.filled = 0
        self._lengths: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []

    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.concatenate(self._lengths)

    def targets(self) -> np.ndarray | None:
        """Which tokens count, bool [filled]; None where all do."""
        return np.concatenate(self._targets) if self._targets else None

    def add(
        self,
        ids: np.ndarray,
        offsets: np.ndarray,
        eos: int,
        targets: np.ndarray | None = None,
    ) -> None:
        """Add several documents, each with its end.

        Args:
            ids: of the documents, joined.
            offsets: where in the IDs each document begins, and their end, [documents + 1].
            eos: the token that ends a document.
            targets: which tokens count, with each document's end behind it,
                bool [tokens + documents]; None: all.
        """
        if targets is not None:
            self._targets.append(targets)
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
            for first, last, begin in zip(
                offsets[:-1], offsets[1:], begins, strict=True
            ):
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
    targets: np.ndarray | None = None,
) -> None:
    """Write one Arrow stream of one record batch.

    `datasets` reads streams, and one batch can be memory-mapped as one array.

    Args:
        values: tokens of all documents.
        lengths: tokens of each document.
        targets: which tokens count, bool, one for each: a second column of one bit per token;
            None: all do, and there is no such column.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Not by pa.array, which imports pandas: half a second in every process.
    tokens = pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype),
        len(values),
        [None, pa.py_buffer(values)],
    )
    columns = {"input_ids": _lists(offsets, tokens)}
    if targets is not None:
        bits = pa.py_buffer(np.packbits(targets, bitorder="little"))
        mask = pa.Array.from_buffers(pa.bool_(), len(targets), [None, bits])
        columns[LOSS_MASK] = _lists(offsets, mask)
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    # Not a file of Python's, for which pyarrow copies all of the tokens.
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, batch.schema) as stream,
    ):
        stream.write_batch(batch)


def _lists(offsets: np.ndarray, values: pa.Array) -> pa.Array:
    """One list per document of values that are joined."""
    return pa.LargeListArray.from_buffers(
        pa.large_list(values.type),
        len(offsets) - 1,
        [None, pa.py_buffer(offsets)],
        children=[values],
    )


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


def map_targets(shard: Path) -> np.ndarray:
    """Bits that say which tokens of a shard count, as a view of the file; see `unpack_targets`.

    Raises:
        ConfigError: it cannot be mapped here.
        DataError: the file is no shard, or does not have them for each token.
    """
    batch = _batch_of(shard)
    if LOSS_MASK not in batch.schema.names:
        raise DataError(f"{shard} has no column {LOSS_MASK}.")
    tokens = batch.column("input_ids")
    mask = batch.column(LOSS_MASK)
    _, token_offsets, _, _ = tokens.buffers()
    _, offsets, _, bits = mask.buffers()
    if mask.type != pa.large_list(pa.bool_()) or not offsets.equals(token_offsets):
        raise DataError(f"{shard} has a column {LOSS_MASK} that is not of its tokens.")
    return np.frombuffer(bits, np.uint8)


def unpack_targets(bits: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Which tokens from `begin` to before `end` of a shard count, bool [end - begin].

    Args:
        bits: uint8, eight tokens each, the first in the lowest bit.
    """
    first_byte = begin // 8
    unpacked = np.unpackbits(bits[first_byte : -(-end // 8)], bitorder="little").view(
        bool
    )
    place = begin - 8 * first_byte
    return unpacked[place : place + end - begin]


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
    except (OSError, ValueError, EOFError, TokenError) as error:
        # numpy reads the header as Python.
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
