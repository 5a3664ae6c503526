"""The tokenizer of a corpus: given, or learned once from its training documents and kept."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from xxhash import xxh3_128_digest

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.corpus import Corpus, OfSource
from infini_llama.tasks.preprocess.fast_learning import learn
from infini_llama.tasks.preprocess.sources.held_out import is_held_out
from infini_llama.tasks.preprocess.tokens.parts import Documents, Part
from infini_llama.tasks.progress import megabytes
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.artifacts import Damaged, key_of
from infini_llama.tasks.storage.files import mark_used
from infini_llama.tasks.storage.record_files import read_record, write_record
from infini_llama.tasks.tokenizers.tokenizer import (
    description_of,
    identity,
    is_given,
    load,
    tokenizer_of,
)

log = logging.getLogger("infini_llama.preprocess")


class LearnedTokenizer(Record):
    """A tokenizer that was learned: its tokenizer.json."""

    description: str


def learned_key(data: DataConfig, sources: Sequence[OfSource[str]]) -> str:
    """64 hex digits for a tokenizer that is learned from these sources."""
    names = [[list(source.training), list(source.validation)] for source in sources]
    return key_of({"tokenizer": identity(data.tokenizer), "sources": names})


def load_or_learn(corpus: Corpus) -> Tokenizer:
    """The given tokenizer, or the one that is learned from the training text.

    That is learned once: it is kept for the next build.

    Raises:
        ConfigError: there is no such tokenizer.
        DataError: there is no text, or it is damaged.
    """
    settings = corpus.data.tokenizer
    if is_given(settings):
        return load(settings)
    if corpus.recall():
        kept = _kept(corpus)
        if kept is not None:
            return kept
    folder = _folder(corpus)
    read = list[str]()
    learned = learn(training_texts(corpus, read), settings, folder, corpus.size)
    kept = _kept(corpus)
    # The same text had been learned from, which was not recognized before it was read.
    if kept is not None:
        return kept
    used = corpus.units_by_part()
    # Units of a large file were read before damage was found in it.
    if len(read) > sum(map(len, used.values())):
        learned = learn(
            training_texts(corpus, read, used), settings, folder, corpus.size
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_record(_file(corpus), LearnedTokenizer(description=description_of(learned)))
    return learned


def _folder(corpus: Corpus) -> Path:
    return corpus.home / "units" / "tokenizers"


def _file(corpus: Corpus) -> Path:
    key = learned_key(corpus.data, corpus.units_by_source())
    return _folder(corpus) / f"{key[:32]}.json"


def _kept(corpus: Corpus) -> Tokenizer | None:
    """The tokenizer that was learned from the same text before; None: it is to be learned."""
    file = _file(corpus)
    try:
        if not file.exists():
            return None
        tokenizer = tokenizer_of(read_record(LearnedTokenizer, file).description)
        mark_used(file)
        return tokenizer
    except Damaged as fault:
        log.warning("%s The tokenizer is learned again.", fault)
        return None


def training_texts(
    corpus: Corpus, read: list[str], used: dict[Part, list[str]] | None = None
) -> Iterator[bytes]:
    """The documents that are not held out, in UTF-8, and no copies of those that are.

    Other copies count as often as they occur. Sources with a held-out share are read first: the
    others, which have validation files, may contain copies of held-out text.

    Args:
        read: the names of the units that were read are appended to it.
        used: names of the units to take of each part; None: all.
    """
    held_out: set[bytes] = set()
    for source in corpus.sources:
        for part in source.validation:
            for documents in _units(corpus, part, read, used):
                held_out.update(map(xxh3_128_digest, documents.texts))
    done = 0
    total = corpus.size
    training = list(chain.from_iterable(source.training for source in corpus.sources))
    training.sort(key=lambda part: not part.held_out_share)
    has_copies = bool(training) and not training[-1].held_out_share
    for part in training:
        for documents in _units(corpus, part, read, used):
            hashes = list(map(xxh3_128_digest, documents.texts))
            table = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 16)
            is_validation = is_held_out(table, part.held_out_share).tolist()
            for text, digest, is_out in zip(
                documents.texts, hashes, is_validation, strict=True
            ):
                if is_out and has_copies:
                    held_out.add(digest)
                elif not is_out and digest not in held_out:
                    yield text
        done += part.size
        log.info(
            "reading text for the tokenizer", extra={"progress": megabytes(done, total)}
        )
    log.info("training the tokenizer")


def _units(
    corpus: Corpus,
    part: Part,
    read: list[str],
    used: dict[Part, list[str]] | None,
) -> Iterator[Documents]:
    """The units of a part that are used; see `training_texts`."""
    left = None if used is None else Counter(used[part])
    for documents in corpus.units(part):
        read.append(documents.name)
        if left is None or left[documents.name] > 0:
            yield documents
        if left is not None:
            left[documents.name] -= 1
