"""Rows of tokens, gathered from the memory-mapped stream of a dataset, without torch."""

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.tasks.preprocess.tokens.shards import (
    COUNTED,
    map_array,
    map_shard,
    map_targets,
    unpack_targets,
)
from infini_llama.tasks.preprocess.tokens.stream import TokenStream
from infini_llama.tasks.records.manifest import RowTableManifest, SourceRows
from infini_llama.tasks.storage.artifacts import (
    ROW_TABLES,
    read_dataset,
    read_row_table,
    verify_checksum,
)

# Tokens of a text that is held out, of which the first words are a prompt.
BEGINNING = 32
BROKEN = "\ufffd"  # what decoders write for a part of a character
PROMPT_LETTERS = 60  # of those words at most
COUNTED_ROWS = 4096  # of a split, in which rows without targets are looked for
ROWS_AT_ONCE = 64  # of these
LONGEST_PROMPT = 256  # tokens of a prompt that a document has itself


class _Rows(ABC):
    """Rows of `size` tokens: pieces of the stream, and then padding.

    The methods are those of `TokenReader`.
    """

    stream: TokenStream
    size: int

    @abstractmethod
    def pieces_of(self, row: int) -> np.ndarray:
        """First token in the stream and tokens of each piece of a row, int64 [pieces, 2]."""

    def target_mask(self, indices: np.ndarray) -> np.ndarray:
        """Mask of the labels that count, bool [n, size - 1], also where all do."""
        mask = np.zeros((len(indices), self.size), dtype=bool)
        for target, row in zip(mask, indices, strict=True):
            begin = 0
            for start, size in self.pieces_of(row).tolist():
                target[begin : begin + size] = self.stream.targets(start, size)
                target[begin] = False
                begin += size
        return mask[:, 1:]

    def text_bytes(self, indices: np.ndarray) -> np.ndarray:
        sizes = np.zeros((len(indices), self.size), dtype=np.int64)
        for target, row in zip(sizes, indices, strict=True):
            filled = 0
            for start, size in self.pieces_of(row).tolist():
                target[filled : filled + size] = self.stream.text_bytes(start, size)
                filled += size
        return sizes[:, 1:]

    def count_targets(self, indices: np.ndarray) -> int:
        if self.stream.has_loss_mask:
            return int(self.target_mask(indices).sum())
        targets = 0
        for row in indices:
            pieces = self.pieces_of(row)
            targets += int(pieces[:, 1].sum()) - len(pieces)
        return targets


class WindowRows(_Rows):
    """Rows that are windows of the stream (concat and window): each is one piece.

    Args:
        starts: first token of each row, int64 [rows].
    """

    def __init__(self, stream: TokenStream, starts: np.ndarray, size: int) -> None:
        self.stream = stream
        self.starts = starts
        self.size = size

    def __len__(self) -> int:
        return len(self.starts)

    def gather(self, indices: np.ndarray) -> np.ndarray:
        return self.stream.windows(self.starts[indices].tolist(), self.size)

    def pieces_of(self, row: int) -> np.ndarray:
        return np.array([[self.starts[row], self.size]])

    def targets(self, indices: np.ndarray) -> np.ndarray | None:
        return self.target_mask(indices) if self.stream.has_loss_mask else None

    def count_targets(self, indices: np.ndarray) -> int:
        if self.stream.has_loss_mask:
            return super().count_targets(indices)
        return len(indices) * (self.size - 1)

    def documents(self, indices: np.ndarray) -> np.ndarray:
        numbers = np.zeros((len(indices), self.size), dtype=np.int32)
        for target, start in zip(numbers, self.starts[indices].tolist(), strict=True):
            target[self.stream.beginnings(start, self.size)] = 1
            np.cumsum(target, out=target)
        return numbers[:, :-1]

    def most_documents(self) -> int:
        begins = np.unique(self.stream.document_offsets()[:-1])
        starts = np.asarray(self.starts)
        first = np.searchsorted(begins, starts, side="right")
        last = np.searchsorted(begins, starts + self.size - 1)
        counts = last - first
        return int(counts.max(initial=0)) + 1  # and the one that the row begins in


class PackedRows(_Rows):
    """Rows of pieces of documents, and then padding.

    Args:
        bounds: int64 [rows + 1]: row i holds the pieces bounds[i] … bounds[i + 1] - 1.
        pieces: int64 [pieces, 2]: first token in the stream, tokens.
        padding: the token.
    """

    def __init__(
        self,
        stream: TokenStream,
        bounds: np.ndarray,
        pieces: np.ndarray,
        size: int,
        padding: int,
    ) -> None:
        self.stream = stream
        self.bounds = bounds
        self.pieces = pieces
        self.size = size
        self.padding = padding

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
        return self.target_mask(indices)

    def documents(self, indices: np.ndarray) -> np.ndarray:
        numbers = np.full((len(indices), self.size), -1, dtype=np.int32)
        for target, row in zip(numbers, indices.tolist(), strict=True):
            sizes = self.pieces_of(row)[:, 1]
            target[: int(sizes.sum())] = np.repeat(np.arange(len(sizes)), sizes)
        return numbers[:, :-1]

    def most_documents(self) -> int:
        return int(np.diff(self.bounds).max(initial=1))

    def pieces_of(self, row: int) -> np.ndarray:
        return self.pieces[self.bounds[row] : self.bounds[row + 1]]

    def fill(self) -> np.ndarray:
        """Inputs of each row that are no padding, int64 [rows]."""
        if len(self) == 0:
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(self.pieces[:, 1] - 1, self.bounds[:-1])


Rows = WindowRows | PackedRows


def rows_of(
    stream: TokenStream,
    entries: np.ndarray,
    pieces: np.ndarray | None,
    size: int,
    padding: int,
) -> Rows:
    """The rows of a row table.

    Args:
        entries: first token of each row, int64 [rows]; of packed rows their bounds among `pieces`.
        pieces: see `PackedRows`; None: the rows are windows.
        size: tokens of a row.
        padding: the token.
    """
    if pieces is None:
        return WindowRows(stream, starts=entries, size=size)
    return PackedRows(stream, bounds=entries, pieces=pieces, size=size, padding=padding)


def target_counts(rows: Rows, vocab_size: int) -> np.ndarray:
    """How often each token is a target in these rows, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    together = max(1, COUNTED // rows.size)
    for start in range(0, len(rows), together):
        indices = np.arange(start, min(start + together, len(rows)))
        labels = rows.gather(indices)[:, 1:]
        mask = rows.targets(indices)
        targets = labels.ravel() if mask is None else labels[mask]
        counts += np.bincount(targets, minlength=vocab_size)
    return counts


class TokenReader:
    """Rows of one split: `len()` of them, each of `sequence_length` + 1 tokens.

    A row may cross shards.

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
        self,
        dataset: Path,
        row_table: str,
        split: str,
        verify_on_read: bool = False,
    ) -> None:
        manifest = read_dataset(dataset)
        folder = dataset / ROW_TABLES / row_table
        table = read_row_table(folder)
        self.verify_on_read = verify_on_read
        self.sequence_length = table.content.sequence_length
        self.padding = manifest.content.eos_id
        sources = table.content.sources
        self.sources: tuple[SourceRows, ...] = sources[split] if sources else ()
        self.stream = TokenStream(dataset, manifest, split, verify_on_read)
        self.rows = self._open_rows(folder, table, split)

    def __len__(self) -> int:
        return len(self.rows)

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of rows; padding is the end-of-text token.

        Args:
            indices: numbers of the rows, int64 [n].

        Returns:
            int64 [n, sequence_length + 1].

        Raises:
            DataError: a shard does not have the bytes its manifest says.
        """
        return self.rows.gather(indices)

    def targets(self, indices: np.ndarray) -> np.ndarray | None:
        """Mask of the labels that count, bool [n, sequence_length]; None where all do.

        Padding does not count, nor does the first token of a piece, since its context is not in the
        row. Of a dataset with a loss mask (loss_on: answer), only what the mask has counts.
        """
        return self.rows.targets(indices)

    def text_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Bytes of text that each label stands for, int64 [n, sequence_length]; see `TokenStream`.

        Bits per byte divide by those of the labels that count. Padding has none.
        """
        return self.rows.text_bytes(indices)

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """The number within its row of each input's document, from 0; padding is -1.

        The pieces of a packed row are its documents: what went before a cut document's second piece
        is in another row.

        Returns:
            int32 [n, sequence_length].
        """
        return self.rows.documents(indices)

    def most_documents(self) -> int:
        """The most documents that the inputs of any row are of, as `documents` counts them."""
        return self.rows.most_documents()

    def count_targets(self, indices: np.ndarray) -> int:
        """Number of labels of the given rows that count."""
        return self.rows.count_targets(indices)

    def share_without_targets(self) -> float:
        """Share of the rows in which no label counts.

        Of many rows, some are looked at that are evenly spread.
        """
        spread = np.linspace(0, len(self) - 1, COUNTED_ROWS)
        chosen = np.unique(spread.astype(np.int64))
        without_targets = 0
        for batch in np.array_split(chosen, -(-len(chosen) // ROWS_AT_ONCE)):
            mask = self.targets(batch)
            if mask is not None:
                without_targets += int((~mask.any(axis=1)).sum())
        return without_targets / len(chosen)

    def _open_rows(self, folder: Path, table: RowTableManifest, split: str) -> Rows:
        """The rows of a split by the row table in `folder`."""
        entries = self._table(folder, table, f"{split}.rows.npy")
        pieces_file = f"{split}.pieces.npy"
        is_packed = pieces_file in table.files
        pieces = self._table(folder, table, pieces_file) if is_packed else None
        return rows_of(
            self.stream, entries, pieces, self.sequence_length + 1, self.padding
        )

    def _table(
        self,
        folder: Path,
        table: RowTableManifest,
        name: str,
    ) -> np.ndarray:
        if self.verify_on_read:
            verify_checksum(folder / name, table.files[name].checksum)
        return map_array(folder / name)


def held_out_prompt(dataset: Path, tokenizer: Tokenizer) -> list[int]:
    """IDs of the beginning of a held-out text, for a model to continue.

    It is the text's prompt where it has one (loss_on: answer), or its first words. The text is the
    first one of at least BEGINNING tokens, or the longest of the first shard, of which at most half
    is taken.

    Args:
        tokenizer: of the dataset; words are those that it decodes.
    """
    content = read_dataset(dataset).content
    shards = [dataset / shard.file for shard in content.validation.shards]
    prompt = _short_prompt(shards) if content.has_loss_mask else None
    if prompt is not None:
        return prompt
    offsets, tokens = map_shard(shards[0])
    lengths = np.diff(offsets)
    is_long = lengths >= BEGINNING
    number = int(is_long.argmax() if is_long.any() else lengths.argmax())
    count = min(BEGINNING, int(lengths[number]) // 2)
    return _whole_words(tokenizer, tokens[offsets[number] :][:count].tolist())


def _short_prompt(shards: list[Path]) -> list[int] | None:
    """The tokens before the first one that counts, of a document that has such.

    It is the first document with at most LONGEST_PROMPT of them, or the one with the fewest, in the
    first shard that has any. None: no shard has.
    """
    for shard in shards:
        offsets, tokens = map_shard(shard)
        prompts = _tokens_before_targets(shard)
        with_prompt = np.flatnonzero(prompts)
        if len(with_prompt) == 0:  # documents of other sources have none
            continue
        is_short = prompts[with_prompt] <= LONGEST_PROMPT
        place = is_short.argmax() if is_short.any() else prompts[with_prompt].argmin()
        number = int(with_prompt[place])
        begin = int(offsets[number])
        return tokens[begin : begin + int(prompts[number])].tolist()
    return None


def _tokens_before_targets(shard: Path) -> np.ndarray:
    """Tokens of each document of a shard before the first one that counts, int64 [documents].

    They are 0 where none counts.
    """
    offsets, tokens = map_shard(shard)
    places = np.flatnonzero(unpack_targets(map_targets(shard), 0, len(tokens)))
    begins = offsets[:-1]
    firsts = np.append(places, len(tokens))[np.searchsorted(places, begins)]
    return np.where(firsts < offsets[1:], firsts - begins, 0)


def _whole_words(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The most of these tokens that have at most PROMPT_LETTERS and end where a word does.

    Where no word ends, they end with a whole character.
    """
    texts = [
        tokenizer.decode(ids[:count], skip_special_tokens=False)
        for count in range(len(ids) + 1)
    ]
    short = [
        count for count in range(1, len(ids)) if len(texts[count]) <= PROMPT_LETTERS
    ]
    for count in reversed(short):
        following = texts[count + 1].removeprefix(texts[count])
        if following[:1].isspace() and not texts[count][-1:].isspace():
            return ids[:count]
    whole = [count for count in short if not texts[count].endswith(BROKEN)]
    return ids[: max(whole, default=len(ids))]
