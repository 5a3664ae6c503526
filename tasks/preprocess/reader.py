"""Reading a dataset: rows of tokens gathered from the memory-mapped stream. numpy and pyarrow only."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from configs.errors import DataError
from tasks.artifacts import file_checksum, read_manifest


def map_values(shard: Path) -> np.ndarray:
    """The tokens of one shard, as a read-only view of the file."""
    return map_list(shard)[1]


def map_list(shard: Path) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of documents [documents + 1] and tokens of one shard, as views of the file."""
    try:
        batch = pa.ipc.open_stream(pa.memory_map(str(shard))).read_next_batch()
    except (pa.ArrowInvalid, StopIteration, OSError) as error:
        raise DataError(f"{shard} is no readable token shard: {error}") from None
    column = batch.column("input_ids")
    return column.offsets.to_numpy(), column.values.to_numpy()


class TokenReader:
    """Rows of one split: `len()` of them, each of `sequence_length` + 1 tokens.

    Args:
        dataset: folder of the token level.
        chunks: name of a row table below `chunks/`.
        split: "train" or "validation".
        verify_on_read: check each shard's checksum before its first use.
    """

    def __init__(self, dataset: Path, chunks: str, split: str, verify_on_read: bool = False) -> None:
        manifest = read_manifest(dataset, "dataset")
        content = manifest["content"]
        self.sequence_length: int = read_manifest(dataset / "chunks" / chunks, "chunks")["content"]["sequence_length"]
        self.starts = np.load(dataset / "chunks" / chunks / f"{split}.rows.npy", mmap_mode="r", allow_pickle=False)
        shards = content[split]["shards"]
        self.paths = [dataset / shard["file"] for shard in shards]
        self.checksums = [manifest["files"][shard["file"]]["checksum"] for shard in shards]
        self.ends = np.cumsum([shard["tokens"] for shard in shards])
        self.verified = [not verify_on_read] * len(shards)
        self.values = [map_values(path) for path in self.paths]

    def __len__(self) -> int:
        return len(self.starts)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Tokens int64 [len(rows), sequence_length + 1] of the given rows; a row may cross shards.

        Raises:
            DataError: a shard does not have the bytes its manifest says.
        """
        tokens = np.empty((len(rows), self.sequence_length + 1), dtype=np.int64)
        for target, start in zip(tokens, self.starts[rows], strict=True):
            self._copy(int(start), target)
        return tokens

    def _copy(self, start: int, target: np.ndarray) -> None:
        shard, filled = int(np.searchsorted(self.ends, start, side="right")), 0
        while filled < len(target):
            self._verify(shard)
            values = self.values[shard]
            at = start + filled - (int(self.ends[shard]) - len(values))
            piece = values[at : at + len(target) - filled]
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1

    def _verify(self, shard: int) -> None:
        if not self.verified[shard]:
            if file_checksum(self.paths[shard]) != self.checksums[shard]:
                raise DataError(
                    f"{self.paths[shard]} does not have the bytes its manifest says; training stops before using it."
                )
            self.verified[shard] = True
