"""The token level: Arrow shards of documents, whose values buffers joined are one contiguous stream of tokens."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
from blake3 import blake3

from infini_llama.tasks.preprocess.tokens.answers import COLUMN
from infini_llama.tasks.preprocess.tokens.reader import map_list
from infini_llama.tasks.records.manifest import Shard, SourceStats, SplitContent
from infini_llama.tasks.storage.artifacts import sync

LONG = 300  # tokens: documents of so many on average are faster copied one by one
COUNTED = 2_000_000  # tokens counted together: bincount works on int64


def dtype_for(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


@dataclass(frozen=True)
class WrittenShard:
    """A shard that is on the disk; `size`: bytes of its text."""

    file: str
    documents: int
    tokens: int
    size: int
    source: str = ""


class Stream:
    """Documents of one shard, joined in memory that is taken as it is filled."""

    def __init__(self, dtype: np.dtype, capacity: int) -> None:
        self.values = np.empty(capacity, dtype=dtype)
        self.lengths: list[np.ndarray] = []
        self.prompts: list[np.ndarray] = []
        self.filled = 0

    def add(self, ids: np.ndarray, offsets: np.ndarray, eos: int, prompts: np.ndarray | None = None) -> None:
        """Several documents, each with its end: their ids, joined, and where in them each begins, [documents + 1].

        Args:
            prompts: tokens of each one's prompt [documents], where the dataset has them.
        """
        if prompts is not None:
            self.prompts.append(prompts)
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


def write_shard(
    path: Path, values: np.ndarray, lengths: np.ndarray | list[int], prompts: np.ndarray | None = None
) -> None:
    """One Arrow stream of one record batch; `datasets` reads streams, and one batch can be memory-mapped as one array.

    Under its name it is whole and on the disk. `prompts`: tokens of each document's prompt, a second column.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Not by pa.array, which imports pandas: half a second in every process.
    tokens = pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
    lists, buffers = pa.large_list(tokens.type), [None, pa.py_buffer(offsets)]
    column = pa.LargeListArray.from_buffers(lists, len(lengths), buffers, children=[tokens])
    columns: list[pa.Array] = [column]
    if prompts is not None:
        prompts = np.ascontiguousarray(prompts, dtype=np.int64)
        columns.append(pa.Array.from_buffers(pa.int64(), len(prompts), [None, pa.py_buffer(prompts)]))
    batch = pa.record_batch(columns, names=["input_ids", COLUMN][: len(columns)])
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    # Not a file of Python's, for which pyarrow copies all of the tokens.
    with pa.OSFile(str(part), "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)
    sync(part)
    part.rename(path)


def describe_split(
    folder: Path, vocab_size: int, size: int, written: Sequence[WrittenShard], has_prompts: bool = False
) -> SplitContent:
    """Reads the shards of a split once more, adds the files by which `datasets.load_from_disk` opens the folder.

    Args:
        size: bytes of the split's text.
        written: its shards in order.
        has_prompts: whether they have a column with the tokens of each document's prompt.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    shortest, longest, documents, tokens, stream, shards = 2**62, 0, 0, 0, blake3(), []
    for shard in written:
        offsets, values = map_list(folder.parent / shard.file)
        lengths = np.diff(offsets)
        for start in range(0, len(values), COUNTED):
            counts += np.bincount(values[start : start + COUNTED], minlength=vocab_size)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        stream.update(values.data.cast("B"))
        shards.append(
            Shard(
                file=shard.file,
                documents=shard.documents,
                tokens=shard.tokens,
                source=shard.source,
                first_document=documents,
                first_token=tokens,
            )
        )
        documents, tokens = documents + len(lengths), tokens + len(values)
    feature = {"feature": {"dtype": dtype_for(vocab_size).name, "_type": "Value"}, "_type": "LargeList"}
    files = [Path(shard.file).name for shard in written]
    features: dict[str, object] = {"input_ids": feature}
    if has_prompts:
        features[COLUMN] = {"dtype": "int64", "_type": "Value"}
    _describe_for_datasets(folder, files, features, stream.hexdigest()[:16])
    return SplitContent(
        documents=documents,
        tokens=tokens,
        bytes=size,
        shards=tuple(shards),
        shortest_document=shortest,
        longest_document=longest,
        unigram_entropy_bits=entropy_bits(counts),
        sources=_by_source(written),
    )


def _by_source(written: Sequence[WrittenShard]) -> tuple[SourceStats, ...]:
    """What each of several sources gives of a split, in the order of its documents; empty where there is one source."""
    several = groupby((shard for shard in written if shard.source), key=lambda shard: shard.source)
    return tuple(
        SourceStats(
            name=name,
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            bytes=sum(shard.size for shard in shards),
        )
        for name, shards in ((name, list(group)) for name, group in several)
    )


def entropy_bits(counts: np.ndarray) -> float:
    """-sum p log2 p of the distribution with these counts: the loss of the best model that knows frequencies alone."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def _describe_for_datasets(folder: Path, files: list[str], features: Mapping[str, object], fingerprint: str) -> None:
    """Writes state.json and dataset_info.json, by which `datasets.load_from_disk` opens the split that `folder` is called after.

    Args:
        files: names of its Arrow streams, in order.
        features: of each column, as `datasets.Features.to_dict` gives them.
        fingerprint: by which `datasets` knows its content.
    """
    state = {
        "_data_files": [{"filename": file} for file in files],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes `array` as .npy. On a full disk the error says so, which that of `np.save` does not (it carries no errno)."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)
