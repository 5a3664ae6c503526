"""The token level: Arrow shards of documents, whose values buffers joined are one contiguous stream of tokens."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from infini_llama.tasks.preprocess.tokens.load_from_disk import describe_for_datasets
from infini_llama.tasks.preprocess.tokens.reader import map_list
from infini_llama.tasks.storage.artifacts import sync

LONG = 300  # tokens: documents of so many on average are faster copied one by one
BATCH_BYTES = 2_000_000  # of text that is tokenized at once


def dtype_for(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


def batches(texts: Iterable[tuple[str, int]], most: int | None = None) -> Iterator[tuple[list[str], int]]:
    """Texts of about `most` (BATCH_BYTES) in all, and their sizes' sum; none is cut."""
    most = most or BATCH_BYTES
    batch, size = [], 0
    for text, text_size in texts:
        batch.append(text)
        size += text_size
        if size >= most:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size


class Stream:
    """Documents of one shard, joined in memory that is taken as it is filled."""

    def __init__(self, dtype: np.dtype, capacity: int) -> None:
        self.values = np.empty(capacity, dtype=dtype)
        self.lengths: list[np.ndarray] = []
        self.filled = 0

    def add(self, ids: np.ndarray, offsets: np.ndarray, eos: int) -> None:
        """Several documents, each with its end: their ids, joined, and where in them each begins, [documents + 1]."""
        lengths = np.diff(offsets) + 1
        end = self.filled + len(ids) + len(lengths)
        if end > len(self.values):  # a tokenizer that makes more tokens than there are bytes
            self.values = np.concatenate((self.values, np.empty(end, dtype=self.values.dtype)))
        target, ends = self.values[self.filled : end], lengths.cumsum()
        target[ends - 1] = eos
        if len(ids) > LONG * len(lengths):
            for first, last, begin in zip(offsets[:-1], offsets[1:], ends - lengths, strict=True):
                target[begin : begin + last - first] = ids[first:last]
        else:
            within = np.ones(len(target), dtype=bool)
            within[ends - 1] = False
            target[within] = ids
        self.lengths.append(lengths)
        self.filled = end


def write_shard(path: Path, values: np.ndarray, lengths: np.ndarray | list[int]) -> None:
    """One Arrow stream of one record batch; `datasets` reads streams, and one batch can be memory-mapped as one array.

    Under its name it is whole and on the disk.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Not by pa.array, which imports pandas: half a second in every process.
    tokens = pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
    lists, buffers = pa.large_list(tokens.type), [None, pa.py_buffer(offsets)]
    column = pa.LargeListArray.from_buffers(lists, len(lengths), buffers, children=[tokens])
    batch = pa.record_batch([column], names=["input_ids"])
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    # Not a file of Python's, for which pyarrow copies all of the tokens.
    with pa.OSFile(str(part), "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)
    sync(part)
    part.rename(path)


def describe_split(folder: Path, vocab_size: int, size: int, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Reads the shards of a split once more, adds the files by which `datasets.load_from_disk` opens the folder.

    Args:
        size: bytes of the split's text.
        shards: {"file", "documents", "tokens"} of each, in order.

    Returns:
        the facts of the split: documents, tokens, bytes of text, shards, extremes of document length, unigram entropy in bits.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    shortest, longest, documents, tokens, stream, table = 2**62, 0, 0, 0, blake3(), []
    for shard in shards:
        offsets, values = map_list(folder.parent / shard["file"])
        lengths = np.diff(offsets)
        for start in range(0, len(values), BATCH_BYTES):  # bincount works on int64
            counts += np.bincount(values[start : start + BATCH_BYTES], minlength=vocab_size)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        stream.update(values.data.cast("B"))
        table.append(shard | {"first_document": documents, "first_token": tokens})
        documents, tokens = documents + len(lengths), tokens + len(values)
    feature = {"feature": {"dtype": dtype_for(vocab_size).name, "_type": "Value"}, "_type": "LargeList"}
    files = [Path(shard["file"]).name for shard in shards]
    describe_for_datasets(folder, files, {"input_ids": feature}, stream.hexdigest()[:16])
    return {
        "documents": documents,
        "tokens": tokens,
        "bytes": size,
        "shards": table,
        "shortest_document": shortest,
        "longest_document": longest,
        "unigram_entropy_bits": entropy_bits(counts),
    }


def entropy_bits(counts: np.ndarray) -> float:
    """-sum p log2 p of the distribution with these counts: the loss of the best model that knows frequencies alone."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())
