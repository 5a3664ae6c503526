"""Rows written out, for readers other than ours: a folder that `datasets.load_from_disk` opens as train and validation."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from infini_llama.tasks.preprocess.tokens.load_from_disk import describe_for_datasets
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.storage.artifacts import commit, is_complete, move_aside, read_manifest, staging

ROWS_VERSION = 1
SPLITS = ("train", "validation")
NOT_A_TARGET = -100  # PyTorch's and Hugging Face's ignore_index
AT_ONCE = 1 << 20  # tokens gathered and written at a time
log = logging.getLogger("infini_llama.preprocess")


def materialize(dataset: Path, chunks: str, folder: Path, shard_size: int) -> bool:
    """Writes every row of the table `chunks` to `folder`; False where that has been done. The same rows give the same bytes.

    Columns, each list as long as a row and its last label: `input_ids` in the dataset's own integer type; for packed rows also
    `labels`, int32, -100 where nothing is to be learned (not shifted: Hugging Face's models do that), and `documents`, int32,
    the number of each token's document within the row, -1 for padding.

    Args:
        shard_size: bytes, upper bound of one file of more than one row.
    """
    made_from = {
        "dataset": read_manifest(dataset, "dataset")["digest"],
        "chunks": read_manifest(dataset / "chunks" / chunks, "chunks")["digest"],
    }
    if is_complete(folder, "rows") and read_manifest(folder, "rows")["content"]["made_from"] == made_from:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left)
    if folder.exists():
        log.warning("%s does not hold these rows; it was moved to %s", folder, move_aside(folder))
    staged = staging(folder)
    try:
        rows = {split: _write(TokenReader(dataset, chunks, split), staged / split, shard_size) for split in SPLITS}
        (staged / "dataset_dict.json").write_text(json.dumps({"splits": [*SPLITS]}), encoding="utf-8")
        commit(staged, folder, "rows", ROWS_VERSION, {}, {"made_from": made_from, "rows": rows})
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return True


def _write(reader: TokenReader, folder: Path, shard_size: int) -> int:
    """Arrow streams of consecutive rows, and what `datasets` wants to know of them; returns the number of rows."""
    folder.mkdir()
    schema = _schema(reader)
    row_bytes = sum(field.type.list_size * field.type.value_type.bit_width // 8 for field in schema)
    rows_a_file = max(1, shard_size // row_bytes)
    files = []
    for first in range(0, len(reader), rows_a_file):
        files.append(f"data-{len(files):05d}.arrow")
        last = min(first + rows_a_file, len(reader))
        with (folder / files[-1]).open("wb") as file:
            with pa.ipc.new_stream(file, schema) as stream:
                for batch in _batches(reader, schema, first, last):
                    stream.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        log.info("writing rows", extra={"progress": {"done": last, "total": len(reader), "unit": "rows"}})
    describe_for_datasets(folder, files, _features(schema), folder.name)
    return len(reader)


def _schema(reader: TokenReader) -> pa.Schema:
    size = reader.sequence_length + 1
    columns: dict[str, Any] = {"input_ids": pa.from_numpy_dtype(reader.dtype)}
    if reader.pieces is not None:
        columns |= {"labels": pa.int32(), "documents": pa.int32()}
    return pa.schema({name: pa.list_(kind, size) for name, kind in columns.items()})


def _batches(reader: TokenReader, schema: pa.Schema, first: int, last: int) -> Iterator[pa.RecordBatch]:
    size = reader.sequence_length + 1
    step = max(1, AT_ONCE // size)
    for start in range(first, last, step):
        rows = np.arange(start, min(start + step, last))
        tokens, targets = reader.gather(rows), reader.targets(rows)
        columns = {"input_ids": tokens}
        if targets is not None:
            labels = np.full(tokens.shape, NOT_A_TARGET, dtype=np.int64)
            labels[:, 1:][targets] = tokens[:, 1:][targets]
            columns |= {"labels": labels, "documents": reader.documents(rows, labels=True)}
        arrays = [
            pa.FixedSizeListArray.from_arrays(
                pa.array(columns[field.name].reshape(-1).astype(field.type.value_type.to_pandas_dtype())), size
            )
            for field in schema
        ]
        yield pa.record_batch(arrays, schema=schema)


def _features(schema: pa.Schema) -> dict[str, Any]:
    return {
        field.name: {
            "feature": {"dtype": str(field.type.value_type), "_type": "Value"},
            "length": field.type.list_size,
            "_type": "List",
        }
        for field in schema
    }
