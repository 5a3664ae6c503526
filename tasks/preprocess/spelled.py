"""Special tokens that documents spell, and that are encoded as text nevertheless."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.records.manifest import Shard

SAMPLED = 256  # documents
BEGINNING = 512  # tokens of each that are decoded


def spelled_special_tokens(
    folder: Path,
    shards: Sequence[Shard],
    tokenizer: Tokenizer,
) -> tuple[str, ...]:
    """The special tokens that sampled documents spell, in the order of their IDs.

    Upper case and whitespace are not compared, since a tokenizer may have changed them.

    Args:
        folder: of the dataset, to which the names of the shards' files are relative.
    """
    sampled = [tokenizer.decode(ids) for ids in _beginnings(folder, shards)]
    text = "\n".join(map(_compared, sampled))
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return tuple(
        token.content
        for _, token in added
        if token.special and _compared(token.content) in text
    )


def _compared(text: str) -> str:
    return "".join(text.casefold().split())


def _beginnings(folder: Path, shards: Sequence[Shard]) -> Iterator[list[int]]:
    """The first tokens of documents that are evenly spread, without their ends."""
    documents = sum(shard.documents for shard in shards)
    places = np.unique(np.linspace(0, documents - 1, SAMPLED).astype(np.int64))
    for shard in shards:
        offsets, values = map_shard(folder / shard.file)
        numbers = places - shard.first_document
        here = numbers[(numbers >= 0) & (numbers < shard.documents)]
        for number in here.tolist():
            begin = offsets[number]
            end = min(offsets[number + 1] - 1, begin + BEGINNING)
            yield values[begin:end].tolist()
