"""Units: the tokens of some documents, in the folder of a recipe.

The name of a unit is a hash of its text.

    units/<recipe>/tokenizer.json
    units/<recipe>/<unit>/
        train.arrow, validation.arrow, documents.npy, counts.npy, manifest.json
        lost.npy if the tokenizer can lose text

A unit is written beside its name and renamed when it is whole. Resume after a kill, reuse after a
file was added, repair, and several workers are one question: is there such a unit, and does it
verify?
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from xxhash import xxh3_128_digest

from infini_llama.configs.errors import DataError, TokenizerFails
from infini_llama.tasks.batches import batches
from infini_llama.tasks.preprocess.sources.held_out import is_held_out
from infini_llama.tasks.preprocess.sources.source import TextInput
from infini_llama.tasks.preprocess.tokens.parts import (
    DOCUMENT,
    Abandoned,
    Documents,
    never,
)
from infini_llama.tasks.preprocess.tokens.shards import (
    Stream,
    dtype_for,
    map_array,
    save_array,
    token_counts,
    write_shard,
)
from infini_llama.tasks.preprocess.tokens.targets import ByteSpan, encode_spans
from infini_llama.tasks.records.manifest import (
    SPLITS,
    EngineChoice,
    UnitManifest,
    UnitSplit,
)
from infini_llama.tasks.storage.artifacts import (
    FORMAT_VERSIONS,
    Damaged,
    check,
    commit,
    key_of,
    read_unit,
    remove,
    staged,
)
from infini_llama.tasks.storage.dataset_files import TOKENIZER
from infini_llama.tasks.storage.files import write_atomic
from infini_llama.tasks.tokenizers.encoder import Encode, encoder_of, special_ids
from infini_llama.tasks.tokenizers.engines import open_engine
from infini_llama.tasks.tokenizers.expressed import (
    Loss,
    Losses,
    has_all_bytes,
    keeps_text,
)
from infini_llama.tasks.tokenizers.tokenizer import description_of, tokenizer_of

log = logging.getLogger("infini_llama.preprocess")
DOCUMENTS = "documents.npy"
COUNTS = "counts.npy"
LOST = "lost.npy"
# How often a token counts in each split.
TOKEN_COUNT = np.dtype([("token", "<u4"), *((split, "<u4") for split in SPLITS)])
# Bytes of text after which an engine is opened anew: it keeps every word it has seen, about 100
# bytes per word.
WORDS_BYTES = 2**28
OPENING = threading.Lock()  # an engine for all threads


@dataclass(frozen=True)
class Recipe:
    """Settings that turn documents into tokens.

    They are plain values, which go to other processes. The recipe's tokenizer is in its folder.

    Attributes:
        folder: units/<key of all that decides the tokens>, with its units by their names.
        eos: the token that ends a document.
        engine: name of what encodes. Each engine has its own recipe, although the ids are the same:
            one may turn out to be wrong.
        split_special_tokens: see `encoder_of`.
    """

    folder: Path
    eos: int
    engine: str
    split_special_tokens: bool


def recipe_for(
    home: Path,
    tokenizer: Tokenizer,
    eos: int,
    engine: EngineChoice,
    split_special_tokens: bool,
) -> Recipe:
    """The recipe, with its tokenizer in its folder."""
    description = description_of(tokenizer)
    deciding = [FORMAT_VERSIONS["unit"], description, eos, engine.name, engine.version]
    if not split_special_tokens:
        deciding.append("text yields special tokens")
    if not keeps_text(tokenizer, split_special_tokens):
        # Earlier units with answers may have a space that the text has not.
        deciding.append("answers begin within a token")
    folder = home / "units" / key_of(deciding)[:32]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / TOKENIZER
    if not file.is_file() or file.read_bytes() != description.encode():
        write_atomic(file, description)
    return Recipe(folder, eos, engine.name, split_special_tokens)


def verify_or_remove(recipe: Recipe, name: str, checksums: bool = False) -> bool:
    """Whether the unit is there as its manifest states. A damaged one is deleted.

    Args:
        checksums: compare those of the files of tokens, too. Otherwise their sizes are compared
            here, and their checksums when they are read.
    """
    folder = recipe.folder / name
    if not folder.exists():
        return False
    try:
        check(folder, "unit", checksums or (DOCUMENTS, COUNTS, LOST), key=name)
    except Damaged as fault:
        log.warning("%s It is built again.", fault)
        # Another preparation with this recipe may just have removed it.
        with suppress(FileNotFoundError):
            remove(folder)
        return False
    return True


def write_unit(
    recipe: Recipe,
    documents: Documents,
    should_stop: Callable[[], bool] = never,
) -> None:
    """Encode the documents and write their unit, unless it is there. Several threads may do so.

    Args:
        should_stop: called between batches of text, and between documents whose losses are counted.

    Raises:
        Abandoned: `should_stop`.
        DataError: a text becomes a special token.
        EngineDiffers: a fast engine gave other ids than the reference.
    """
    name = documents.name
    if verify_or_remove(recipe, name):
        return
    with OPENING:
        writer = _writer_of(recipe)
    table = _table_of(documents)
    is_validation = is_held_out(table["hash"], documents.held_out_share)
    order = np.argsort(is_validation, kind="stable")  # training documents first
    stream = writer.encode(documents, order, table["bytes"], should_stop)
    table = table[order]
    splits = _split(stream, training_documents=len(order) - int(is_validation.sum()))
    targets = stream.targets()
    counts = dict[str, np.ndarray]()
    for split, places in splits.items():
        tokens = stream.values[places.tokens]
        counted = tokens if targets is None else tokens[targets[places.tokens]]
        counts[split] = token_counts(counted, writer.vocab_size)
    all_counts = sum(counts.values(), np.zeros(1, np.int64))
    if targets is not None:
        all_counts = token_counts(stream.values[: stream.filled], writer.vocab_size)
    writer.refuse_special_tokens(documents, order, stream, all_counts)
    with staged(recipe.folder / name) as folder:
        content = dict[str, object]()
        for split, places in splits.items():
            facts = _write_split(folder / f"{split}.arrow", stream, table, places)
            content[split] = facts.to_json()
        save_array(folder / DOCUMENTS, table)
        save_array(folder / COUNTS, _occurring(counts))
        if writer.losses is not None:
            lost = list[Loss]()
            for text in documents.texts:
                if should_stop():
                    raise Abandoned
                lost.append(writer.losses.of(text.decode()))
            save_array(folder / LOST, np.array(lost, dtype=np.int64))
        commit(folder, recipe.folder / name, "unit", {"key": name}, content)


def _table_of(documents: Documents) -> np.ndarray:
    """Hash and bytes of each document, DOCUMENT [documents], in their order."""
    hashes = b"".join(map(xxh3_128_digest, documents.texts))
    table = np.empty(len(documents.texts), DOCUMENT)
    table["hash"] = np.frombuffer(hashes, np.uint8).reshape(-1, 16)
    table["bytes"] = list(map(len, documents.texts))
    return table


@dataclass(frozen=True)
class _SplitPlaces:
    """Places of a split's documents among those of a unit, and of their tokens in its stream."""

    documents: slice
    tokens: slice


def _split(stream: Stream, training_documents: int) -> dict[str, _SplitPlaces]:
    """The places of each split in a stream whose training documents are first."""
    count = training_documents
    tokens = int(stream.lengths()[:count].sum())
    return {
        "train": _SplitPlaces(slice(0, count), slice(0, tokens)),
        "validation": _SplitPlaces(slice(count, None), slice(tokens, stream.filled)),
    }


def _write_split(
    path: Path,
    stream: Stream,
    table: np.ndarray,
    places: _SplitPlaces,
) -> UnitSplit:
    """Write the shard of a split, if it has documents, and describe it.

    Args:
        table: of the documents in the order of the stream, DOCUMENT [documents].
    """
    values = stream.values[places.tokens]
    lengths = stream.lengths()[places.documents]
    targets = stream.targets()
    if len(lengths):
        of_split = None if targets is None else targets[places.tokens]
        write_shard(path, values, lengths, of_split)
    return UnitSplit(
        documents=len(lengths),
        tokens=len(values),
        bytes=int(table["bytes"][places.documents].sum()),
        shortest_document=int(lengths.min(initial=len(values))),
        longest_document=int(lengths.max(initial=0)),
    )


def _occurring(counts: Mapping[str, np.ndarray]) -> np.ndarray:
    """The tokens that count somewhere, TOKEN_COUNT [tokens], of int64 [vocab] by split."""
    tokens = np.flatnonzero(sum(counts.values(), np.zeros(1, np.int64)))
    occurring = np.empty(len(tokens), TOKEN_COUNT)
    occurring["token"] = tokens
    for split in SPLITS:
        occurring[split] = counts[split][tokens]
    return occurring


@dataclass(frozen=True)
class Unit:
    """A unit that is there; its table has the training documents first."""

    folder: Path
    manifest: UnitManifest

    def shard_path(self, split: str) -> Path:
        """The Arrow stream of a split, which is there if it has documents."""
        return self.folder / f"{split}.arrow"

    def documents(self, split: str) -> np.ndarray:
        """Hash and bytes of the documents of a split, DOCUMENT [n], mapped."""
        table = map_array(self.folder / DOCUMENTS)
        count = self.manifest.content.train.documents
        return table[:count] if split == SPLITS[0] else table[count:]

    def counts(self) -> np.ndarray:
        """How often tokens count, TOKEN_COUNT [tokens], in the order of their IDs.

        Those that count nowhere are left out.
        """
        return np.load(self.folder / COUNTS, allow_pickle=False)

    def lost(self) -> np.ndarray | None:
        """Losses of each document, int64 [n, 3], as `Losses.of` gives them.

        They are in the order in which documents were read, not that of `documents.npy`. None: the
        tokenizer loses no text.
        """
        file = self.folder / LOST
        return np.load(file, allow_pickle=False) if file.exists() else None


def open_unit(recipe: Recipe, name: str) -> Unit:
    """The unit of this name.

    Raises:
        Damaged: there is none, or its manifest is damaged.
    """
    folder = recipe.folder / name
    return Unit(folder, read_unit(folder, name))


class _Writer:
    """An encoder of the documents of a recipe.

    The threads of this process share its engine and the engine's words.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer_of(
            (recipe.folder / TOKENIZER).read_text(encoding="utf-8")
        )
        self.engine: Encode = self._open_engine()
        self.encoded = 0  # bytes, since the engine was opened
        self.special = special_ids(self.tokenizer)
        self.losses: Losses | None = None
        if not has_all_bytes(self.tokenizer):
            self.losses = Losses(
                encoder_of(self.tokenizer, recipe.split_special_tokens)
            )
        self.vocab_size = self.tokenizer.get_vocab_size()

    def _open_engine(self) -> Encode:
        recipe = self.recipe
        return open_engine(recipe.engine, self.tokenizer, recipe.split_special_tokens)

    def encode(
        self,
        documents: Documents,
        order: np.ndarray,
        sizes: np.ndarray,
        should_stop: Callable[[], bool],
    ) -> Stream:
        """The documents in this order, each with its end.

        Args:
            order: numbers of the documents.
            sizes: bytes of each document, by its number.
        """
        stream = Stream(dtype_for(self.vocab_size))
        engine = self._engine(int(sizes.sum()))
        for numbers in batches(order.tolist(), sizes.tolist().__getitem__):
            if should_stop():
                raise Abandoned
            batch = [documents.texts[number] for number in numbers]
            spans = None
            if documents.spans is not None:
                spans = [documents.spans[number] for number in numbers]
            try:
                self._add(stream, batch, spans, engine)
            except TokenizerFails as fault:
                raise self._failing(documents, numbers) or fault from None
        return stream

    def _add(
        self,
        stream: Stream,
        texts: list[bytes],
        spans: list[Sequence[ByteSpan]] | None,
        engine: Encode,
    ) -> None:
        """Encode some texts into the stream.

        Args:
            spans: of each text, what counts; None: all.
        """
        if spans is None:
            ids, offsets = engine(texts)
            stream.add(ids, offsets, self.recipe.eos)
            return
        encoder = encoder_of(self.tokenizer, self.recipe.split_special_tokens)
        encoded = encode_spans(engine, texts, spans, encoder)
        stream.add(encoded.ids, encoded.offsets, self.recipe.eos, encoded.targets)

    def refuse_special_tokens(
        self,
        documents: Documents,
        order: np.ndarray,
        stream: Stream,
        counts: np.ndarray,
    ) -> None:
        """Raise DataError where a document has a special token that is not its end.

        Where text yields special tokens, it may have them.

        Args:
            counts: how often each token occurs in the stream of these documents in this order,
                int64 [vocab].
        """
        if not self.recipe.split_special_tokens:
            return
        beside_ends = counts.copy()
        beside_ends[self.recipe.eos] -= len(order)
        if not beside_ends[self.special].any():
            return
        ends = stream.lengths().cumsum()
        is_special = self.special.take(stream.values[: stream.filled])
        is_special[ends - 1] = False
        place = int(is_special.argmax())
        number = int(order[np.searchsorted(ends, place, side="right")])
        raise self._special(documents.file_of(number), int(stream.values[place]))

    def _engine(self, size: int) -> Encode:
        """The engine for so many bytes more."""
        with OPENING:
            if self.encoded > WORDS_BYTES:
                self.engine = self._open_engine()
                self.encoded = 0
            self.encoded += size
            return self.engine

    def _failing(self, documents: Documents, numbers: list[int]) -> DataError | None:
        """The error for the first of these documents at which the tokenizer fails by itself.

        None: it fails at none of them.
        """
        for number in numbers:
            try:
                self.engine([documents.texts[number]])
            except TokenizerFails as fault:
                file = documents.file_of(number)
                return DataError(
                    f"{file} has a text at which {str(fault).partition(';')[0]}; "
                    "use a tokenizer that has a token for every text, such as one over bytes "
                    "(without data.tokenizer.path it is trained on the text), "
                    f"or leave the file out of {file.key}."
                )
        return None

    def _special(self, file: TextInput, token: int) -> DataError:
        return DataError(
            f"{file} has a text that contains '{self.tokenizer.id_to_token(token)}', "
            "which becomes that special token with this tokenizer; "
            "set data.tokenizer.split_special_tokens=false to train on it as that token, "
            "choose other data.tokenizer.special_tokens, "
            "name a tokenizer in which it is an added token alone, "
            f"remove it from the text, or leave the file out of {file.key}."
        )


_writer_of = lru_cache(maxsize=1)(_Writer)  # an engine has a hundred megabytes of words
