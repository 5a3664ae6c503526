"""The documents of one source that are kept: what is known of them, and their texts, read again."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from blake3 import blake3

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.tables import Rows
from infini_llama.tasks.preprocess.sources.texts import Fault, Records, Unreadable


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one source that are kept, in order: a table on disk, and one bit in memory per row of it."""

    source: Source
    rows: Rows
    can_seek: bool  # whether a record is found by its place; else the source is read from its beginning
    kept: np.ndarray  # uint8 [rows / 8]
    count: int
    size: int  # UTF-8 bytes

    def __len__(self) -> int:
        return self.count

    def blocks(self, first: int = 0) -> Iterator[np.ndarray]:
        """What is known of the documents from number `first` on, ROW [several] at a time."""
        at = 0
        for block in self.rows.blocks():
            bits = np.unpackbits(self.kept[at // 8 : (at + len(block) + 7) // 8], count=len(block))
            at += len(block)
            found = block if bits.all() else block[bits.view(bool)]
            if first < len(found):
                yield found[first:]
            first = max(0, first - len(found))

    def keep(self, mask: np.ndarray) -> "Documents":
        """Those of the documents for which `mask`, bool [documents], holds."""
        if mask.all():
            return self
        rows = np.unpackbits(self.kept, count=self.rows.count).view(bool)
        rows[rows] = mask
        kept = replace(self, kept=np.packbits(rows), count=int(mask.sum()))
        return replace(kept, size=sum(int(block["size"].sum()) for block in kept.blocks()))

    def identity(self) -> list[Any]:
        """[name, bytes, hash], which stand for the text in the key."""
        joined = blake3()
        if self.count == 1:
            [block] = self.blocks()
            return [self.source.name, self.size, block["hash"].tobytes().hex()]
        for block in self.blocks():
            joined.update(block["hash"].tobytes())
        return [self.source.name, self.size, joined.hexdigest()]

    def texts(self, first: int = 0) -> Iterator[tuple[str, int]]:
        """The text and the size of each document from the `first` on, read again.

        Raises:
            DataError: the source is not what it was when it was hashed.
        """
        expected = (
            row for block in self.blocks(first) for row in zip(block["hash"], block["size"].tolist(), strict=True)
        )
        found = first
        try:
            for record, (digest, size) in zip(self._records(first), expected, strict=False):
                if isinstance(record, Fault) or blake3(record.encode()).digest() != digest.tobytes():
                    break
                yield record, size
                found += 1
        except (Unreadable, FileNotFoundError):
            pass
        if found < self.count:
            raise DataError(
                f"{self.source} changed or was removed while it was being prepared; run the same command again."
            )

    def _records(self, first: int) -> Records:
        if self.can_seek:
            yield from self.source.records_at(self._column("place", first))
            return
        wanted = self._column("number", first)
        following = next(wanted, None)
        for number, record in enumerate(self.source.records(self._column("number", first))):
            if following is None:
                return
            if number == following:
                yield record
                following = next(wanted, None)

    def _column(self, name: str, first: int) -> Iterator[int]:
        return (value for block in self.blocks(first) for value in block[name].tolist())
