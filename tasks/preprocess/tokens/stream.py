"""The stream of tokens of one split: its shards joined.

They are mapped into memory, and each is checked before its first use.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.tokens.shards import (
    map_array,
    map_shard,
    map_targets,
    unpack_targets,
)
from infini_llama.tasks.records.manifest import DatasetManifest
from infini_llama.tasks.storage.artifacts import verify_checksum
from infini_llama.tasks.storage.dataset_files import (
    document_bytes_file,
    read_token_bytes,
)


class TokenStream:
    """Tokens of a split by their place in the stream.

    Args:
        manifest: of the token level in the folder `dataset`.
        split: "train" or "validation".
        verify_on_read: compare each shard's checksum before its first use.

    Attributes:
        has_loss_mask: not all tokens count.
        ends: after the last token of each shard.
        first_documents: number within the split of each shard's first document.
        views: of a shard that `windows` has read: its first token's place in the stream, and its
            tokens.
        mapped: offsets of documents and tokens of each shard that was read; see `shard`.
        target_bits: which tokens count, of each shard that was read; see `map_targets`.
    """

    def __init__(
        self,
        dataset: Path,
        manifest: DatasetManifest,
        split: str,
        verify_on_read: bool,
    ) -> None:
        shards = manifest.content[split].shards
        self.dataset = dataset
        self.manifest = manifest
        self.split = split
        self.verify_on_read = verify_on_read
        self.has_loss_mask = manifest.content.has_loss_mask
        self.dtype = np.dtype(manifest.content.dtype)
        self.paths = [dataset / shard.file for shard in shards]
        self.checksums = [manifest.files[shard.file].checksum for shard in shards]
        self.tokens = [shard.tokens for shard in shards]
        self.ends: list[int] = np.cumsum(self.tokens).tolist()
        documents = [shard.documents for shard in shards]
        self.first_documents: list[int] = np.cumsum([0, *documents]).tolist()
        self.mapped: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.target_bits: dict[int, np.ndarray] = {}
        self.views: dict[int, tuple[int, memoryview]] = {}

    def windows(self, starts: list[int], size: int) -> np.ndarray:
        """Tokens int64 [len(starts), size] from each start on.

        They are copied as they are stored, and then widened.
        """
        tokens = np.empty((len(starts), size), dtype=self.dtype)
        target = tokens.reshape(-1).data  # slices of views cost half of what numpy's do
        for number, start in enumerate(starts):
            shard = bisect_right(self.ends, start)
            if shard not in self.views:
                _, values = self.shard(shard)
                self.views[shard] = self._first_token(shard), values.data
            base, view = self.views[shard]
            if start + size <= self.ends[shard]:
                place = number * size
                target[place : place + size] = view[start - base : start - base + size]
            else:
                self.copy(start, tokens[number])
        return tokens.astype(np.int64)

    def copy(self, start: int, target: np.ndarray) -> None:
        """Fill `target` with the tokens from `start` on."""
        for shard, begin, end, place in self._parts(start, len(target)):
            _, values = self.shard(shard)
            target[place] = values[begin:end]

    def targets(self, start: int, size: int) -> np.ndarray:
        """Which of the `size` tokens from `start` on count, bool [size]."""
        if not self.has_loss_mask:
            return np.ones(size, dtype=bool)
        mask = np.empty(size, dtype=bool)
        for shard, begin, end, place in self._parts(start, size):
            self.shard(shard)
            mask[place] = unpack_targets(self.target_bits[shard], begin, end)
        return mask

    def text_bytes(self, start: int, size: int) -> np.ndarray:
        """Bytes of text that each of the `size` tokens from `start` on stands for, int64 [size].

        Those of all tokens of a document are the bytes of its text. With a lossless tokenizer each
        token has its own; otherwise the tokens of a document share its bytes.

        Raises:
            DataError: a file does not have the bytes its manifest says.
        """
        sizes = np.empty(size, dtype=np.int64)
        for shard, begin, end, place in self._parts(start, size):
            sizes[place] = self._bytes_in(shard, begin, end)
        return sizes

    def _bytes_in(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Bytes of text of the tokens from `begin` to before `end` of a shard, int64."""
        offsets, values = self.shard(shard)
        if not self.manifest.content.has_document_bytes:
            return self._token_bytes[values[begin:end]]
        first = int(np.searchsorted(offsets, begin, side="right")) - 1
        last = int(np.searchsorted(offsets, end))
        widths = self._token_bytes[values[offsets[first] : offsets[last]]]
        # Ends stand for no text.
        widths[offsets[first + 1 : last + 1] - offsets[first] - 1] = 0
        number = self.first_documents[shard]
        sizes = self._document_bytes[number + first : number + last]
        shares = share_bytes(widths, offsets[first : last + 1] - offsets[first], sizes)
        return shares[begin - offsets[first] : end - offsets[first]]

    @cached_property
    def _token_bytes(self) -> np.ndarray:
        """See `read_token_bytes`, int64 [vocab_size]."""
        return read_token_bytes(self.dataset).astype(np.int64)

    @cached_property
    def _document_bytes(self) -> np.ndarray:
        """Bytes of each document of the split, int32 [documents]."""
        name = document_bytes_file(self.split)
        if name not in self.manifest.files:
            raise DataError(f"{self.dataset} has no {name}, which its tokenizer needs.")
        if self.verify_on_read:
            verify_checksum(self.dataset / name, self.manifest.files[name].checksum)
        return map_array(self.dataset / name)

    def beginnings(self, start: int, size: int) -> np.ndarray:
        """Places among the `size` tokens from `start` on at which documents begin.

        Returns:
            int64, ascending; that of the first token is left out.
        """
        places = list[np.ndarray]()
        for shard, begin, end, place in self._parts(start + 1, size - 1):
            offsets, _ = self.shard(shard)
            first, last = np.searchsorted(offsets[:-1], (begin, end))
            behind_start = offsets[first:last] - begin + place.start
            places.append(behind_start + 1)
        return np.concatenate(places)

    def document_offsets(self) -> np.ndarray:
        """First token of each document, and the end of the last, int64 [documents + 1].

        With `verify_on_read` every shard is read.
        """
        begins = list[np.ndarray]()
        for shard in range(len(self.paths)):
            offsets, _ = self.shard(shard)
            begins.append(offsets[:-1] + self._first_token(shard))
        return np.concatenate([*begins, self.ends[-1:]])

    def _first_token(self, shard: int) -> int:
        """Place in the stream of a shard's first token."""
        return self.ends[shard] - self.tokens[shard]

    def _parts(self, start: int, size: int) -> Iterator[tuple[int, int, int, slice]]:
        """The parts of the `size` tokens from `start` on that are each in one shard.

        Yields:
            the shard's number, from which to before which of its tokens the part is, and its place
            among the `size` tokens.
        """
        shard = bisect_right(self.ends, start)
        first = start
        while first < start + size:
            base = self._first_token(shard)
            end = min(start + size, self.ends[shard])
            yield shard, first - base, end - base, slice(first - start, end - start)
            first = end
            shard += 1

    def shard(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Offsets of documents and tokens of one shard.

        Raises:
            DataError: it does not have the bytes its manifest says.
        """
        if number not in self.mapped:
            path = self.paths[number]
            if self.verify_on_read:
                verify_checksum(path, self.checksums[number])
            offsets, values = map_shard(path)
            if len(values) != self.tokens[number]:
                raise DataError(
                    f"{path} has {len(values)} tokens; the manifest says {self.tokens[number]}."
                )
            if values.dtype != self.dtype:
                raise DataError(
                    f"{path} has tokens of {values.dtype}; the manifest says {self.dtype}."
                )
            if self.has_loss_mask:
                self.target_bits[number] = map_targets(path)
            self.mapped[number] = offsets, values
        return self.mapped[number]


def share_bytes(
    widths: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Bytes of text of each token, int64 [tokens]: whole bytes, which a document's tokens share.

    Args:
        widths: by which they share, int64 [tokens]. A document with none shares evenly.
        offsets: of the documents among the tokens, int64 [documents + 1].
        sizes: bytes of each document [documents].
    """
    shares = np.empty(len(widths), dtype=np.int64)
    for (begin, end), size in zip(
        pairwise(offsets.tolist()), sizes.tolist(), strict=True
    ):
        reached = widths[begin:end].cumsum()
        if not reached[-1]:
            reached = np.arange(1, end - begin + 1)
        shares[begin:end] = np.diff(size * reached // reached[-1], prepend=0)
    return shares
