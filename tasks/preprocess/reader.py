"""Reading a dataset: rows of tokens gathered from the memory-mapped stream. numpy and pyarrow only."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from configs.errors import DataError
from tasks.artifacts import file_checksum, read_manifest


def map_list(shard: Path) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of documents [documents + 1] and tokens of one shard, as views of the file."""
    try:
        batch = pa.ipc.open_stream(pa.memory_map(str(shard))).read_next_batch()
    except (pa.ArrowInvalid, StopIteration, OSError) as error:
        raise DataError(f"{shard} is no readable token shard ({error}).") from None
    column = batch.column("input_ids")
    return column.offsets.to_numpy(), column.values.to_numpy()


def document_lengths(dataset: Path, shards: list[dict]) -> np.ndarray:
    """Tokens of each document of a split, int64 [documents], in order."""
    return np.concatenate([np.diff(map_list(dataset / shard["file"])[0]) for shard in shards])


class TokenReader:
    """Rows of one split: `len()` of them, each of `sequence_length` + 1 tokens; a row may cross shards.

    The rows of a packed strategy hold pieces of the stream and then padding; `targets` says which labels count.

    Args:
        dataset: folder of the token level.
        chunks: name of a row table below `chunks/`.
        split: "train" or "validation".
        verify_on_read: check the row table's checksum now and each shard's before its first use.

    Raises:
        DataError: a file is not what its manifest says.
    """

    def __init__(self, dataset: Path, chunks: str, split: str, verify_on_read: bool = False) -> None:
        manifest, folder = read_manifest(dataset, "dataset"), dataset / "chunks" / chunks
        table = read_manifest(folder, "chunks")
        self.verify_on_read = verify_on_read
        self.sequence_length: int = table["content"]["sequence_length"]
        self.starts = self._table(folder, table, f"{split}.rows.npy")
        packed = f"{split}.pieces.npy"
        self.pieces = self._table(folder, table, packed) if packed in table["files"] else None
        self.padding: int = manifest["content"].get("eos_id", 0)
        shards = manifest["content"][split]["shards"]
        self.paths = [dataset / shard["file"] for shard in shards]
        self.checksums = [manifest["files"][shard["file"]]["checksum"] for shard in shards]
        self.tokens = [shard["tokens"] for shard in shards]
        self.ends = np.cumsum(self.tokens)
        self.mapped: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.starts) - (self.pieces is not None)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Tokens int64 [len(rows), sequence_length + 1] of the given rows, int64 [len(rows)]; padding is the end-of-text token.

        Raises:
            DataError: a shard does not have the bytes its manifest says.
        """
        if self.pieces is None:
            tokens = np.empty((len(rows), self.sequence_length + 1), dtype=np.int64)
            for target, start in zip(tokens, self.starts[rows], strict=True):
                self._copy(int(start), target)
            return tokens
        tokens = np.full((len(rows), self.sequence_length + 1), self.padding, dtype=np.int64)
        for target, row in zip(tokens, rows, strict=True):
            filled = 0
            for start, size in self._pieces_of(row).tolist():
                self._copy(start, target[filled : filled + size])
                filled += size
        return tokens

    def targets(self, rows: np.ndarray) -> np.ndarray | None:
        """bool [len(rows), sequence_length]: which labels count; None where all do.

        Padding is none, nor is the first token of a piece, which nothing before it in the row leads to.
        """
        if self.pieces is None:
            return None
        mask = np.zeros((len(rows), self.sequence_length + 1), dtype=bool)
        for target, row in zip(mask, rows, strict=True):
            sizes = self._pieces_of(row)[:, 1]
            target[: sizes.sum()] = True
            target[sizes.cumsum() - sizes] = False
        return mask[:, 1:]

    def count_targets(self, rows: np.ndarray) -> int:
        """How many labels of the given rows count."""
        if self.pieces is None:
            return len(rows) * self.sequence_length
        return sum(int(pieces[:, 1].sum()) - len(pieces) for pieces in map(self._pieces_of, rows))

    def _pieces_of(self, row: int) -> np.ndarray:
        assert self.pieces is not None
        return self.pieces[self.starts[row] : self.starts[row + 1]]

    def _table(self, folder: Path, manifest: dict, name: str) -> np.ndarray:
        self._verify(folder / name, manifest["files"][name]["checksum"])
        try:
            return np.load(folder / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / name} is no readable row table ({error}).") from None

    def _copy(self, start: int, target: np.ndarray) -> None:
        shard, filled = int(np.searchsorted(self.ends, start, side="right")), 0
        while filled < len(target):
            values = self._values(shard)
            at = start + filled - (int(self.ends[shard]) - len(values))
            piece = values[at : at + len(target) - filled]
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1

    def _values(self, shard: int) -> np.ndarray:
        if shard not in self.mapped:
            path = self.paths[shard]
            self._verify(path, self.checksums[shard])
            values = map_list(path)[1]
            if len(values) != self.tokens[shard]:
                raise DataError(f"{path} has {len(values)} tokens; the manifest says {self.tokens[shard]}.")
            self.mapped[shard] = values
        return self.mapped[shard]

    def _verify(self, path: Path, checksum: str) -> None:
        if self.verify_on_read and (not path.is_file() or file_checksum(path) != checksum):
            raise DataError(f"{path} does not have the bytes its manifest says; training stops before using it.")
