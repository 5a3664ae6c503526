"""`tokenizers` as the encoder of documents, in whose text no special token is found: the reference for every other engine."""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer, models

from infini_llama.tasks.preprocess.sources.texts import batches
from infini_llama.tasks.preprocess.tokenizers.fragments import cut_of
from infini_llama.tasks.preprocess.tokenizers.tokenizer import EOS, description_of, unknown_id

HIDDEN = "\U0010ffff"  # a noncharacter
TOGETHER = 250_000  # characters that are encoded at once: an encoding takes a hundred bytes of memory per token

Ids = tuple[
    np.ndarray, np.ndarray
]  # of several texts, joined, and where in them each begins: [texts + 1], from 0
Encode = Callable[[list[bytes]], Ids]  # of texts in UTF-8


@lru_cache(maxsize=1)  # an engine is compared, and then opened
def encoder_of(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer for documents: no text, whatever it contains, yields the ID of a special token."""
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    if isinstance(tokenizer.model, models.BPE) and all(token.special for token in added_tokens):
        return _without_added_tokens(tokenizer)
    description = orjson.loads(description_of(tokenizer))
    added = {token["content"]: token for token in description["added_tokens"]}
    special = {content for content, token in added.items() if token["special"]}
    hidden = _hide_special_pieces(description["model"], special)
    has_text = len(special) < len(added)  # added tokens that are text stay, with their IDs
    kept = [token for content, token in added.items() if has_text and content not in hidden]
    encoder = Tokenizer.from_str(orjson.dumps(description | {"added_tokens": kept}).decode())
    encoder.encode_special_tokens = has_text
    return encoder


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same steps around the same model, which is not read again from its description: that takes long."""
    encoder = Tokenizer(tokenizer.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, step)) is not None:
            setattr(encoder, step, value)
    return encoder


def _hide_special_pieces(model: dict[str, Any], special: set[str]) -> set[str]:
    """Renames special tokens in a model's own vocabulary, where it would find them in text, to what no text has; IDs stay.

    Returns:
        The tokens that were renamed.
    """
    kind, vocabulary, hidden = model["type"], model["vocab"], set[str]()
    if kind == "Unigram":
        hidden = special & {piece for piece, _ in vocabulary}
        model |= {
            "vocab": [
                [HIDDEN + piece if piece in hidden else piece, score] for piece, score in vocabulary
            ]
        }
    elif kind in ("WordPiece", "WordLevel"):
        hidden = special & vocabulary.keys() - {model["unk_token"]}
        model |= {
            "vocab": {
                HIDDEN + piece if piece in hidden else piece: id for piece, id in vocabulary.items()
            }
        }
    return hidden


def special_ids(tokenizer: Tokenizer) -> np.ndarray:
    """bool [vocab]: the IDs that stand for no text, except that of unknown text."""
    table = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
    unknown = unknown_id(tokenizer)
    for number, token in tokenizer.get_added_tokens_decoder().items():
        table[number] = token.special and (number != unknown or token.content == EOS)
    return table


def reference(encoder: Tokenizer) -> Encode:
    """`tokenizers` over fragments of long texts."""
    cut = cut_of(encoder)

    def encode(texts: list[bytes]) -> Ids:
        fragments = [cut(text.decode()) for text in texts]
        ids = [
            np.array(encoding.ids, dtype=np.uint32)
            for batch in batches(chain.from_iterable(fragments), len, TOGETHER)
            for encoding in encoder.encode_batch_fast(batch, add_special_tokens=False)
        ]
        ends = np.cumsum([0, *map(len, ids)])
        return np.concatenate(ids), ends[np.cumsum([0, *map(len, fragments)])]

    return encode


def encode_each(encode: Encode, texts: list[bytes]) -> list[np.ndarray]:
    """IDs of each text."""
    if not texts:
        return []
    ids, offsets = encode(texts)
    return [ids[first:last] for first, last in pairwise(offsets.tolist())]
