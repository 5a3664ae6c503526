"""The token level: Arrow shards of documents, whose values buffers joined are one contiguous stream of tokens."""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3
from tokenizers import Tokenizer

from tasks.preprocess.sources import Document
from tasks.preprocess.tokenizers import EOS_ID

BATCH_BYTES = 2_000_000  # of text that is tokenized at once
log = logging.getLogger("infini_llama.preprocess")


def dtype_for(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


def batches(documents: Iterable[Document]) -> Iterator[tuple[list[str], int]]:
    """Texts of about BATCH_BYTES in all, and their bytes; documents are never cut."""
    texts, size = [], 0
    for document in documents:
        texts.append(document.text())
        size += document.size
        if size >= BATCH_BYTES:
            yield texts, size
            texts, size = [], 0
    if texts:
        yield texts, size


class ShardWriter:
    """Collects documents and writes a shard whenever the next one would make it more than so many `tokens`.

    A document is never cut: one that is larger is a shard of its own.
    """

    def __init__(self, folder: Path, dtype: np.dtype, tokens: int) -> None:
        self.folder = folder
        self.values = np.empty(tokens, dtype=dtype)  # memory is taken as it is filled
        self.lengths: list[int] = []
        self.shards: list[dict[str, Any]] = []
        self.documents = self.tokens = self.filled = 0
        self.stream_hash = blake3()
        folder.mkdir()

    def add(self, document: np.ndarray) -> None:
        if self.filled + len(document) > len(self.values):
            self.flush()
        if len(document) > len(self.values):
            self._write(document, [len(document)])
            return
        self.values[self.filled : self.filled + len(document)] = document
        self.filled += len(document)
        self.lengths.append(len(document))

    def flush(self) -> None:
        if self.lengths:
            self._write(self.values[: self.filled], self.lengths)
            self.filled, self.lengths = 0, []

    def _write(self, values: np.ndarray, documents: list[int]) -> None:
        """One Arrow stream of one record batch; `datasets` reads streams, and one batch can be memory-mapped as one array."""
        lengths = np.array(documents, dtype=np.int64)
        offsets = np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum()))
        column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
        batch = pa.record_batch({"input_ids": column})
        name = f"data-{len(self.shards):05d}.arrow"
        with (self.folder / name).open("wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
            stream.write_batch(batch)
        self.shards.append(
            {
                "file": f"{self.folder.name}/{name}",
                "documents": len(lengths),
                "tokens": len(values),
                "first_document": self.documents,
                "first_token": self.tokens,
            }
        )
        self.stream_hash.update(values.data.cast("B"))
        self.documents += len(lengths)
        self.tokens += len(values)


def write_split(
    folder: Path, documents: list[Document], encoder: Tokenizer, shard_size: int, label: str
) -> dict[str, Any]:
    """Tokenizes the documents of one split, each ended by the end-of-text token, into `folder`.

    Returns:
        the facts of the split: documents, tokens, bytes of text, shards, extremes of document length, unigram entropy in bits.
    """
    vocab_size = encoder.get_vocab_size()
    dtype = dtype_for(vocab_size)
    total = sum(document.size for document in documents)
    most = total + len(documents)  # a token stands for at least one byte; and one ends each document
    writer = ShardWriter(folder, dtype, min(shard_size // dtype.itemsize, most))
    counts = np.zeros(vocab_size, dtype=np.int64)
    shortest, longest, done = 2**62, 0, 0
    for texts, size in batches(documents):
        encoded: list[np.ndarray] = []
        for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False):
            encoded.append(np.array([*encoding.ids, EOS_ID], dtype=dtype))
            writer.add(encoded[-1])
        counts += np.bincount(np.concatenate(encoded), minlength=vocab_size)
        shortest = min(shortest, *map(len, encoded))
        longest = max(longest, *map(len, encoded))
        done += size
        progress = {"done": round(done / 1e6, 1), "total": round(total / 1e6, 1), "unit": "MB"}
        log.info("tokenizing %s", label, extra={"progress": progress})
    writer.flush()
    _describe_for_datasets(folder, writer, dtype)
    return {
        "documents": writer.documents,
        "tokens": writer.tokens,
        "bytes": total,
        "shards": writer.shards,
        "shortest_document": shortest,
        "longest_document": longest,
        "unigram_entropy_bits": entropy_bits(counts),
    }


def entropy_bits(counts: np.ndarray) -> float:
    """-sum p log2 p of the distribution with these counts: the loss of the best model that knows frequencies alone."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def _describe_for_datasets(folder: Path, writer: ShardWriter, dtype: np.dtype) -> None:
    """The two files by which `datasets.load_from_disk` opens the folder."""
    feature = {"feature": {"dtype": dtype.name, "_type": "Value"}, "_type": "LargeList"}
    state = {
        "_data_files": [{"filename": Path(shard["file"]).name} for shard in writer.shards],
        "_fingerprint": writer.stream_hash.hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    info = {"citation": "", "description": "", "features": {"input_ids": feature}, "homepage": "", "license": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
