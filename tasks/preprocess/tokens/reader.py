"""Rows of tokens, gathered from the memory-mapped stream of a dataset, without torch."""

import re
from bisect import bisect_right
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.tokens.shards import map_prompts, map_shard
from infini_llama.tasks.records.manifest import RowTableManifest, SourceRows
from infini_llama.tasks.storage.artifacts import file_checksum, read_dataset, read_row_table

BEGINNING = 32  # tokens of a text that is held out, of which the first words are a prompt
PROMPT_LETTERS = 60  # of those words at most
COUNTED_ROWS, ROWS_AT_ONCE = 4096, 64  # of a split, in which rows without targets are looked for
LONGEST_PROMPT = 256  # tokens of a prompt that a document has itself


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
        manifest, folder = read_dataset(dataset), dataset / "chunks" / chunks
        table = read_row_table(folder)
        self.verify_on_read = verify_on_read
        self.sequence_length = table.content.sequence_length
        self.starts = self._table(folder, table, f"{split}.rows.npy")
        packed = f"{split}.pieces.npy"
        self.pieces = self._table(folder, table, packed) if packed in table.files else None
        self.padding = manifest.content.eos_id
        self.loss_on_answers = manifest.content.loss_on == "answer"
        shards = manifest.content[split].shards
        self.paths = [dataset / shard.file for shard in shards]
        self.checksums = [manifest.files[shard.file].checksum for shard in shards]
        self.tokens = [shard.tokens for shard in shards]
        sources = table.content.sources
        self.sources: tuple[SourceRows, ...] = sources[split] if sources else ()
        self.ends: list[int] = np.cumsum(self.tokens).tolist()
        self.dtype = np.dtype(manifest.content.dtype)
        self.mapped: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.prompts: dict[int, np.ndarray] = {}
        self.views: dict[
            int, tuple[int, memoryview]
        ] = {}  # of a shard: its first token's place in the stream, its tokens

    def __len__(self) -> int:
        return len(self.starts) - (self.pieces is not None)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Tokens int64 [len(rows), sequence_length + 1] of the given rows, int64 [len(rows)]; padding is the end-of-text token.

        Raises:
            DataError: a shard does not have the bytes its manifest says.
        """
        if self.pieces is None:
            return self._windows(self.starts[rows].tolist())
        tokens = np.full((len(rows), self.sequence_length + 1), self.padding, dtype=np.int64)
        for target, row in zip(tokens, rows, strict=True):
            filled = 0
            for start, size in self._pieces_of(row).tolist():
                self._copy(start, target[filled : filled + size])
                filled += size
        return tokens

    def targets(self, rows: np.ndarray) -> np.ndarray | None:
        """bool [len(rows), sequence_length]: which labels count; None where all do.

        Padding is none, nor is the first token of a piece, which nothing before it in the row leads to. Where documents have prompts
        (loss_on: answer), their tokens are none, either.
        """
        if self.pieces is None and not self.loss_on_answers:
            return None
        mask = np.zeros((len(rows), self.sequence_length + 1), dtype=bool)
        for target, row in zip(mask, rows, strict=True):
            if self.pieces is None:
                self._mark_answers(int(self.starts[row]), target)
                continue
            pieces = self._pieces_of(row)
            sizes = pieces[:, 1]
            begins = sizes.cumsum() - sizes
            target[: sizes.sum()] = not self.loss_on_answers
            if self.loss_on_answers:
                for begin, (start, size) in zip(begins.tolist(), pieces.tolist(), strict=True):
                    self._mark_answers(start, target[begin : begin + size])
            target[begins] = False
        return mask[:, 1:]

    def documents(self, rows: np.ndarray) -> np.ndarray:
        """int32 [len(rows), sequence_length]: the number within its row of each input's document, from 0; padding is -1.

        The pieces of a packed row are its documents: what went before a cut document's second piece is in another row.
        """
        numbers = np.zeros((len(rows), self.sequence_length + 1), dtype=np.int32)
        for target, row in zip(numbers, rows.tolist(), strict=True):
            if self.pieces is None:
                target[self._beginnings(int(self.starts[row]))] = 1
                np.cumsum(target, out=target)
            else:
                sizes = self._pieces_of(row)[:, 1]
                filled = int(sizes.sum())
                target[:filled] = np.repeat(np.arange(len(sizes)), sizes)
                target[filled:] = -1
        return numbers[:, :-1]

    def document_offsets(self) -> np.ndarray:
        """First token of each document in the stream of the split, int64 [documents + 1], and the end of the last.

        Raises:
            DataError: a shard does not have the bytes its manifest says; with `verify_on_read` each is read for that.
        """
        shards = zip((self._shard(number)[0] for number in range(len(self.paths))), [0, *self.ends], strict=False)
        return np.concatenate([*(offsets[:-1] + base for offsets, base in shards), self.ends[-1:]])

    def most_documents(self) -> int:
        """The most documents that the inputs of any row are of, as `documents` counts them."""
        if self.pieces is not None:
            return int(np.diff(self.starts).max(initial=1))
        begins = np.unique(self.document_offsets()[:-1])
        starts = np.asarray(self.starts)
        counts = np.searchsorted(begins, starts + self.sequence_length) - np.searchsorted(begins, starts, side="right")
        return int(counts.max(initial=0)) + 1  # and the one that the row begins in

    def count_targets(self, rows: np.ndarray) -> int:
        """How many labels of the given rows count."""
        if self.loss_on_answers:
            mask = self.targets(rows)
            return 0 if mask is None else int(mask.sum())
        if self.pieces is None:
            return len(rows) * self.sequence_length
        return sum(int(pieces[:, 1].sum()) - len(pieces) for pieces in map(self._pieces_of, rows))

    def share_without_targets(self) -> float:
        """Share of the rows in which no label counts; of many rows, of some that are evenly spread."""
        if self.pieces is None and not self.loss_on_answers:
            return 0.0
        chosen = np.unique(np.linspace(0, len(self) - 1, COUNTED_ROWS).astype(np.int64))
        parts = np.array_split(chosen, -(-len(chosen) // ROWS_AT_ONCE))
        masks = (self.targets(part) for part in parts)
        return sum(int((~mask.any(axis=1)).sum()) for mask in masks if mask is not None) / len(chosen)

    def _pieces_of(self, row: int) -> np.ndarray:
        assert self.pieces is not None
        return self.pieces[self.starts[row] : self.starts[row + 1]]

    def _table(self, folder: Path, table: RowTableManifest, name: str) -> np.ndarray:
        self._verify(folder / name, table.files[name].checksum)
        try:
            return np.load(folder / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / name} is not a readable row table ({error}).") from None

    def _windows(self, starts: list[int]) -> np.ndarray:
        """Tokens int64 [len(starts), sequence_length + 1] from each start on, copied as they are stored and then widened."""
        size = self.sequence_length + 1
        tokens = np.empty((len(starts), size), dtype=self.dtype)
        target = tokens.reshape(-1).data  # slices of views cost half of what numpy's do
        for number, start in enumerate(starts):
            shard = bisect_right(self.ends, start)
            if shard not in self.views:
                self.views[shard] = self.ends[shard] - self.tokens[shard], self._shard(shard)[1].data
            base, values = self.views[shard]
            if start + size <= self.ends[shard]:
                target[number * size : number * size + size] = values[start - base : start - base + size]
            else:
                self._copy(start, tokens[number])
        return tokens.astype(np.int64)

    def _copy(self, start: int, target: np.ndarray) -> None:
        shard, filled = bisect_right(self.ends, start), 0
        while filled < len(target):
            values = self._shard(shard)[1]
            at = start + filled - (self.ends[shard] - len(values))
            piece = values[at : at + len(target) - filled]
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1

    def _mark_answers(self, start: int, target: np.ndarray) -> None:
        """Marks what is of answers in `target`, bool, one element for each token of the stream from `start` on."""
        shard = bisect_right(self.ends, start)
        while shard < len(self.ends) and (base := self.ends[shard] - self.tokens[shard]) < start + len(target):
            offsets = self._shard(shard)[0]
            mark_answers(target, start - base, offsets, self.prompts[shard])
            shard += 1

    def _beginnings(self, start: int) -> np.ndarray:
        """Places, after the first, in the row that begins at token `start` at which documents begin, int64, ascending."""
        end, places = start + self.sequence_length + 1, []
        shard = bisect_right(self.ends, start)
        while shard < len(self.ends) and (base := self.ends[shard] - self.tokens[shard]) < end:
            offsets = self._shard(shard)[0][:-1]
            first, last = np.searchsorted(offsets, (start + 1 - base, end - base))
            places.append(offsets[first:last] + (base - start))
            shard += 1
        return np.concatenate(places)

    def _shard(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Offsets of documents and tokens of one shard, checked before its first use."""
        if shard not in self.mapped:
            path = self.paths[shard]
            self._verify(path, self.checksums[shard])
            offsets, values = map_shard(path)
            if len(values) != self.tokens[shard]:
                raise DataError(f"{path} has {len(values)} tokens; the manifest says {self.tokens[shard]}.")
            if values.dtype != self.dtype:
                raise DataError(f"{path} has tokens of {values.dtype}; the manifest says {self.dtype}.")
            if self.loss_on_answers:
                self.prompts[shard] = map_prompts(path)
            self.mapped[shard] = offsets, values
        return self.mapped[shard]

    def _verify(self, path: Path, checksum: str) -> None:
        if self.verify_on_read and (not path.is_file() or file_checksum(path) != checksum):
            raise DataError(f"{path} does not have the bytes its manifest says; training stops before using it.")


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
    text = tokenizer.decode(tokens[offsets[number] :][: min(BEGINNING, int(lengths[number]) // 2)].tolist())
    text = text[:PROMPT_LETTERS].rstrip("\ufffd")  # of half a character
    words = re.match(r"[\s\S]*\S(?=\s)", text)
    return words[0] if words else text


def mark_answers(target: np.ndarray, place: int, offsets: np.ndarray, prompts: np.ndarray) -> None:
    """Sets `target`, bool [tokens of a row], to True at the tokens of answers and at the ends of their documents.

    Args:
        place: of the row's first token in the shard; below 0 where the row begins in an earlier shard.
        offsets: of the shard's documents [documents + 1].
        prompts: tokens of each one's prompt [documents].
    """
    first = max(0, int(np.searchsorted(offsets, place, side="right")) - 1)
    last = int(np.searchsorted(offsets[:-1], place + len(target)))
    begins, ends = offsets[first:last] + prompts[first:last] - place, offsets[first + 1 : last + 1] - place
    for begin, end in zip(begins.clip(0).tolist(), ends.tolist(), strict=True):
        target[begin:end] = True
