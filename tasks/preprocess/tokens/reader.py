"""Rows of tokens, gathered from the memory-mapped stream of a dataset, without torch."""

import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.tasks.preprocess.tokens.shards import map_array, map_prompts, map_shard
from infini_llama.tasks.preprocess.tokens.stream import TokenStream
from infini_llama.tasks.records.manifest import RowTableManifest, SourceRows
from infini_llama.tasks.storage.artifacts import (
    ROW_TABLES,
    read_dataset,
    read_row_table,
    verify_checksum,
)

BEGINNING = 32  # tokens of a text that is held out, of which the first words are a prompt
PROMPT_LETTERS = 60  # of those words at most
COUNTED_ROWS, ROWS_AT_ONCE = 4096, 64  # of a split, in which rows without targets are looked for
LONGEST_PROMPT = 256  # tokens of a prompt that a document has itself


class WindowRows:
    """Rows that are windows of the stream (concat and window), each of `size` tokens; the methods are those of `TokenReader`.

    Args:
        starts: first token of each row, int64 [rows].
    """

    def __init__(self, stream: TokenStream, starts: np.ndarray, size: int) -> None:
        self.stream, self.starts, self.size = stream, starts, size

    def __len__(self) -> int:
        return len(self.starts)

    def gather(self, indices: np.ndarray) -> np.ndarray:
        return self.stream.windows(self.starts[indices].tolist(), self.size)

    def targets(self, indices: np.ndarray) -> np.ndarray | None:
        if not self.stream.has_prompts:
            return None
        mask = np.zeros((len(indices), self.size), dtype=bool)
        for target, start in zip(mask, self.starts[indices].tolist(), strict=True):
            self.stream.mark_answers(start, target)
        return mask[:, 1:]

    def documents(self, indices: np.ndarray) -> np.ndarray:
        numbers = np.zeros((len(indices), self.size), dtype=np.int32)
        for target, start in zip(numbers, self.starts[indices].tolist(), strict=True):
            target[self.stream.beginnings(start, self.size)] = 1
            np.cumsum(target, out=target)
        return numbers[:, :-1]

    def most_documents(self) -> int:
        begins = np.unique(self.stream.document_offsets()[:-1])
        starts = np.asarray(self.starts)
        counts = np.searchsorted(begins, starts + self.size - 1) - np.searchsorted(
            begins, starts, side="right"
        )
        return int(counts.max(initial=0)) + 1  # and the one that the row begins in

    def count_targets(self, indices: np.ndarray) -> int:
        mask = self.targets(indices)
        return len(indices) * (self.size - 1) if mask is None else int(mask.sum())


class PackedRows:
    """Rows of pieces of documents, and then padding, with the methods of `WindowRows`.

    Args:
        bounds: int64 [rows + 1]: row i holds the pieces bounds[i] … bounds[i + 1] - 1.
        pieces: int64 [pieces, 2]: first token in the stream, tokens.
        padding: the token.
    """

    def __init__(
        self, stream: TokenStream, bounds: np.ndarray, pieces: np.ndarray, size: int, padding: int
    ) -> None:
        self.stream, self.bounds, self.pieces, self.size, self.padding = (
            stream,
            bounds,
            pieces,
            size,
            padding,
        )

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def gather(self, indices: np.ndarray) -> np.ndarray:
        tokens = np.full((len(indices), self.size), self.padding, dtype=np.int64)
        for target, row in zip(tokens, indices, strict=True):
            filled = 0
            for start, size in self.pieces_of(row).tolist():
                self.stream.copy(start, target[filled : filled + size])
                filled += size
        return tokens

    def targets(self, indices: np.ndarray) -> np.ndarray:
        mask = np.zeros((len(indices), self.size), dtype=bool)
        for target, row in zip(mask, indices, strict=True):
            pieces = self.pieces_of(row)
            sizes = pieces[:, 1]
            begins = sizes.cumsum() - sizes
            if self.stream.has_prompts:
                for begin, (start, size) in zip(begins.tolist(), pieces.tolist(), strict=True):
                    self.stream.mark_answers(start, target[begin : begin + size])
            else:
                target[: sizes.sum()] = True
            target[begins] = False
        return mask[:, 1:]

    def documents(self, indices: np.ndarray) -> np.ndarray:
        numbers = np.full((len(indices), self.size), -1, dtype=np.int32)
        for target, row in zip(numbers, indices.tolist(), strict=True):
            sizes = self.pieces_of(row)[:, 1]
            target[: int(sizes.sum())] = np.repeat(np.arange(len(sizes)), sizes)
        return numbers[:, :-1]

    def most_documents(self) -> int:
        return int(np.diff(self.bounds).max(initial=1))

    def count_targets(self, indices: np.ndarray) -> int:
        if self.stream.has_prompts:
            return int(self.targets(indices).sum())
        return sum(int(pieces[:, 1].sum()) - len(pieces) for pieces in map(self.pieces_of, indices))

    def pieces_of(self, row: int) -> np.ndarray:
        """First token in the stream and tokens of each piece of a row, int64 [pieces, 2]."""
        return self.pieces[self.bounds[row] : self.bounds[row + 1]]

    def fill(self) -> np.ndarray:
        """Targets of each row, int64 [rows]; without regard to prompts."""
        return (
            np.add.reduceat(self.pieces[:, 1] - 1, self.bounds[:-1])
            if len(self)
            else np.zeros(0, dtype=np.int64)
        )


class TokenReader:
    """Rows of one split: `len()` of them, each of `sequence_length` + 1 tokens; a row may cross shards.

    Args:
        dataset: folder of the token level.
        row_table: name of the folder below `chunks/`.
        split: "train" or "validation".
        verify_on_read: check the row table's checksum now and each shard's before its first use.

    Attributes:
        rows: windows of the stream, or packed.

    Raises:
        DataError: a file is not what its manifest says.
    """

    def __init__(
        self, dataset: Path, row_table: str, split: str, verify_on_read: bool = False
    ) -> None:
        manifest, folder = read_dataset(dataset), dataset / ROW_TABLES / row_table
        table = read_row_table(folder)
        self.verify_on_read = verify_on_read
        self.sequence_length = table.content.sequence_length
        self.padding = manifest.content.eos_id
        sources = table.content.sources
        self.sources: tuple[SourceRows, ...] = sources[split] if sources else ()
        self.stream, size = (
            TokenStream(dataset, manifest, split, verify_on_read),
            self.sequence_length + 1,
        )
        entries = self._table(folder, table, f"{split}.rows.npy")
        if (packed := f"{split}.pieces.npy") in table.files:
            pieces = self._table(folder, table, packed)
            self.rows: WindowRows | PackedRows = PackedRows(
                self.stream, bounds=entries, pieces=pieces, size=size, padding=self.padding
            )
        else:
            self.rows = WindowRows(self.stream, starts=entries, size=size)

    def __len__(self) -> int:
        return len(self.rows)

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """Tokens int64 [n, sequence_length + 1] of the rows with these numbers, int64 [n]; padding is the end-of-text token.

        Raises:
            DataError: a shard does not have the bytes its manifest says.
        """
        return self.rows.gather(indices)

    def targets(self, indices: np.ndarray) -> np.ndarray | None:
        """bool [n, sequence_length]: which labels count; None where all do.

        Padding does not count, nor does the first token of a piece, since its context is not in the row. Where documents have prompts
        (loss_on: answer), their tokens do not count, either.
        """
        return self.rows.targets(indices)

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """int32 [n, sequence_length]: the number within its row of each input's document, from 0; padding is -1.

        The pieces of a packed row are its documents: what went before a cut document's second piece is in another row.
        """
        return self.rows.documents(indices)

    def most_documents(self) -> int:
        """The most documents that the inputs of any row are of, as `documents` counts them."""
        return self.rows.most_documents()

    def count_targets(self, indices: np.ndarray) -> int:
        """How many labels of the given rows count."""
        return self.rows.count_targets(indices)

    def share_without_targets(self) -> float:
        """Share of the rows in which no label counts; of many rows, of some that are evenly spread."""
        chosen = np.unique(np.linspace(0, len(self) - 1, COUNTED_ROWS).astype(np.int64))
        batches = np.array_split(chosen, -(-len(chosen) // ROWS_AT_ONCE))
        masks = (self.targets(batch) for batch in batches)
        return sum(int((~mask.any(axis=1)).sum()) for mask in masks if mask is not None) / len(
            chosen
        )

    def _table(self, folder: Path, table: RowTableManifest, name: str) -> np.ndarray:
        if self.verify_on_read:
            verify_checksum(folder / name, table.files[name].checksum)
        return map_array(folder / name)


def held_out_prompt(dataset: Path, tokenizer: Tokenizer) -> str:
    """How a held-out text begins, for a model to continue: its prompt where it has one (loss_on: answer), or its first words.

    It is the first one of at least BEGINNING tokens, or the longest of the first shard, of which at most half is taken.
    """
    content = read_dataset(dataset).content
    shards = [dataset / shard.file for shard in content.validation.shards]
    for shard in shards if content.loss_on == "answer" else ():
        prompts = map_prompts(shard)
        if len(with_prompt := np.flatnonzero(prompts)):  # documents of other sources have none
            is_short = prompts[with_prompt] <= LONGEST_PROMPT
            place = is_short.argmax() if is_short.any() else prompts[with_prompt].argmin()
            number = int(with_prompt[place])
            offsets, tokens = map_shard(shard)
            return tokenizer.decode(tokens[offsets[number] :][: prompts[number]].tolist())
    offsets, tokens = map_shard(shards[0])
    lengths = np.diff(offsets)
    is_long = lengths >= BEGINNING
    number = int(is_long.argmax() if is_long.any() else lengths.argmax())
    text = tokenizer.decode(
        tokens[offsets[number] :][: min(BEGINNING, int(lengths[number]) // 2)].tolist()
    )
    text = text[:PROMPT_LETTERS].rstrip("\ufffd")  # of half a character
    words = re.match(r"[\s\S]*\S(?=\s)", text)
    return words[0] if words else text
