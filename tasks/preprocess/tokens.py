"""The token level: Arrow shards of documents, whose values buffers joined are one contiguous stream of tokens."""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
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
    """Collects documents and writes a shard whenever the next one would pass `shard_size` bytes of tokens."""

    def __init__(self, folder: Path, dtype: np.dtype, shard_size: int) -> None:
        self.folder, self.dtype, self.shard_size = folder, dtype, shard_size
        self.pending: list[np.ndarray] = []
        self.pending_bytes = 0
        self.shards: list[dict[str, Any]] = []
        self.documents = self.tokens = 0
        folder.mkdir()

    def add(self, document: np.ndarray) -> None:
        if self.pending and self.pending_bytes + document.nbytes > self.shard_size:
            self.flush()
        self.pending.append(document)
        self.pending_bytes += document.nbytes

    def flush(self) -> None:
        """One Arrow stream of one record batch; `datasets` reads streams, and one batch can be memory-mapped as one array."""
        if not self.pending:
            return
        lengths = np.array([len(document) for document in self.pending], dtype=np.int64)
        offsets = np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum()))
        column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(self.pending)))
        batch = pa.record_batch({"input_ids": column})
        name = f"data-{len(self.shards):05d}.arrow"
        with (self.folder / name).open("wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
            stream.write_batch(batch)
        self.shards.append(
            {
                "file": f"{self.folder.name}/{name}",
                "documents": len(lengths),
                "tokens": int(lengths.sum()),
                "first_document": self.documents,
                "first_token": self.tokens,
            }
        )
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())
        self.pending, self.pending_bytes = [], 0


def write_split(
    folder: Path, documents: list[Document], encoder: Tokenizer, shard_size: int, label: str
) -> dict[str, Any]:
    """Tokenizes the documents of one split, each ended by the end-of-text token, into `folder`.

    Returns:
        the facts of the split: documents, tokens, bytes of text, shards, extremes of document length, unigram entropy in bits.
    """
    vocab_size = encoder.get_vocab_size()
    dtype = dtype_for(vocab_size)
    writer = ShardWriter(folder, dtype, shard_size)
    counts = np.zeros(vocab_size, dtype=np.int64)
    shortest, longest, done = 2**62, 0, 0
    total = sum(document.size for document in documents)
    for texts, size in batches(documents):
        for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False):
            ids = np.array([*encoding.ids, EOS_ID], dtype=dtype)
            counts += np.bincount(ids, minlength=vocab_size)
            shortest, longest = min(shortest, len(ids)), max(longest, len(ids))
            writer.add(ids)
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
        "_fingerprint": "0" * 16,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    info = {"citation": "", "description": "", "features": {"input_ids": feature}, "homepage": "", "license": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
