"""Made-up text on disk, and the documents of a dataset."""

import gzip
import io
import json
import lzma
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from infini_llama.tasks.preprocess.tokens.shards import map_shard


def write_files(folder: Path, texts: Iterable[str]) -> str:
    """Write 0.txt and so on, one per text; returns their pattern, as `data.files` has it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return f"{folder}/*.txt"


def write_lines(path: Path, texts: Iterable[str], field: str = "text") -> str:
    """Write JSON Lines, one record per text; returns the path, as `data.files` has it."""
    path.write_text(
        "".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8"
    )
    return str(path)


def documents_of(dataset: Path, split: str) -> list[list[int]]:
    """The token ids of each document of a split, with the end of text."""
    shards = [
        map_shard(path) for path in sorted((dataset / split).glob("data-*.arrow"))
    ]
    return [
        values[start:end].tolist()
        for offsets, values in shards
        for start, end in pairwise(offsets)
    ]


def encoded(form: str, texts: list[str]) -> bytes:
    """A file of records in this format, each with a number and a text."""
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    sink = io.BytesIO()
    match form:
        case "jsonl" | "ndjson":
            return "".join(
                json.dumps(row, ensure_ascii=row["id"] % 2 == 0) + "\n\n"
                for row in rows
            ).encode()
        case "json":
            return json.dumps(rows, indent=2, ensure_ascii=False).encode()
        case "csv" | "tsv":
            between = "," if form == "csv" else "\t"
            quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
            lines = [
                f"id{between}text",
                *(f"{k}{between}{text}" for k, text in enumerate(quoted)),
            ]
            return "".join(f"{line}\r\n" for line in lines).encode()
        case "parquet":
            pyarrow.parquet.write_table(table, sink, row_group_size=2)
        case "arrow":
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table, max_chunksize=2)
    return sink.getvalue()


def compressed(content: bytes, folder: Path, name: str) -> Path:
    """Write a file, compressed as its name says."""
    path = folder / name
    match path.suffix.lower():
        case ".gz":
            path.write_bytes(gzip.compress(content))
        case ".xz":
            path.write_bytes(lzma.compress(content))
        case ".zst":
            with pa.CompressedOutputStream(str(path), "zstd") as stream:
                stream.write(content)
        case _:
            path.write_bytes(content)
    return path
