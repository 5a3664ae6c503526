"""`tokenizers` as the encoder of documents and prompts: the reference for every other engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer, models

from infini_llama.configs.errors import tokenizer_faults
from infini_llama.tasks.batches import batches
from infini_llama.tasks.storage.dataset_files import read_tokenizer, verified_manifest
from infini_llama.tasks.tokenizers.fragments import cut_of
from infini_llama.tasks.tokenizers.tokenizer import EOS, description_of, unknown_id

HIDDEN = "\U0010ffff"  # a noncharacter
# Characters that are encoded at once: an encoding takes a hundred bytes of memory per token.
TOGETHER = 250_000

# IDs of several texts, joined, and where in them each text begins: [texts + 1], from 0.
Ids = tuple[np.ndarray, np.ndarray]
Encode = Callable[[list[bytes]], Ids]  # of texts in UTF-8


@lru_cache(maxsize=1)  # an engine is compared, and then opened
def encoder_of(tokenizer: Tokenizer, split_special_tokens: bool) -> Tokenizer:
    """Tokenizer for documents and prompts.

    Args:
        split_special_tokens: no text, whatever it contains, yields the ID of a special token.
            False: text that spells a special token yields its ID.
    """
    if not split_special_tokens:
        return tokenizer
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    if isinstance(tokenizer.model, models.BPE) and all(
        token.special for token in added_tokens
    ):
        return _without_added_tokens(tokenizer)
    description = orjson.loads(description_of(tokenizer))
    added = {token["content"]: token for token in description["added_tokens"]}
    special = {content for content, token in added.items() if token["special"]}
    hidden = _hide_special_pieces(description["model"], special)
    # Added tokens that are text stay, with their IDs.
    has_text = len(special) < len(added)
    kept = [
        token for content, token in added.items() if has_text and content not in hidden
    ]
    encoder = Tokenizer.from_str(
        orjson.dumps(description | {"added_tokens": kept}).decode()
    )
    encoder.encode_special_tokens = has_text
    return encoder


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same steps around the same model.

    The model is not read again from its description, which takes long.
    """
    encoder = Tokenizer(tokenizer.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        value = getattr(tokenizer, step)
        if value is not None:
            setattr(encoder, step, value)
    return encoder


def _hide_special_pieces(model: dict[str, Any], special: set[str]) -> set[str]:
    """Rename special tokens in a model's own vocabulary to what no text has; IDs stay.

    Otherwise the model would find them in text.

    Returns:
        The tokens that were renamed.
    """
    kind = model["type"]
    vocabulary = model["vocab"]
    hidden = set[str]()

    def renamed(piece: str) -> str:
        return HIDDEN + piece if piece in hidden else piece

    if kind == "Unigram":
        hidden = special & {piece for piece, _ in vocabulary}
        model["vocab"] = [[renamed(piece), score] for piece, score in vocabulary]
    elif kind in ("WordPiece", "WordLevel"):
        hidden = special & vocabulary.keys() - {model["unk_token"]}
        model["vocab"] = {
            renamed(piece): number for piece, number in vocabulary.items()
        }
    return hidden


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A tokenizer, and whether the special tokens that text spells are text.

    Documents and prompts have the same IDs by it.

    Attributes:
        tokenizer: decodes; text is encoded by `encode` alone.
        split_special_tokens: see `encoder_of`.
    """

    tokenizer: Tokenizer
    split_special_tokens: bool

    def encode(self, text: str) -> list[int]:
        """IDs of a text, without those that a tokenizer puts around it.

        Raises:
            DataError: the tokenizer fails.
        """
        encoder = encoder_of(self.tokenizer, self.split_special_tokens)
        with tokenizer_faults():
            return encoder.encode(text, add_special_tokens=False).ids


def encoder_of_dataset(dataset: Path) -> TextEncoder:
    """The encoder of a dataset's documents.

    Raises:
        DataError: its tokenizer or manifest is missing or damaged.
    """
    content = verified_manifest(dataset).content
    return TextEncoder(read_tokenizer(dataset), not content.text_yields_special_tokens)


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
        ids = list[np.ndarray]()
        for batch in batches(chain.from_iterable(fragments), len, TOGETHER):
            for encoding in encoder.encode_batch_fast(batch, add_special_tokens=False):
                ids.append(np.array(encoding.ids, dtype=np.uint32))
        ends = np.cumsum([0, *map(len, ids)])
        first_fragments = np.cumsum([0, *map(len, fragments)])
        return np.concatenate(ids), ends[first_fragments]

    return encode


def encode_each(encode: Encode, texts: list[bytes]) -> list[np.ndarray]:
    """IDs of each text."""
    if not texts:
        return []
    ids, offsets = encode(texts)
    return [ids[first:last] for first, last in pairwise(offsets.tolist())]


def first_difference(
    first: Tokenizer,
    second: Tokenizer,
    texts: Sequence[bytes],
) -> str | None:
    """The first text to which two encoders give different IDs; None: there is none.

    Args:
        texts: in UTF-8.
    """
    with tokenizer_faults():
        for text in map(bytes.decode, texts):
            ids = first.encode(text, add_special_tokens=False).ids
            if second.encode(text, add_special_tokens=False).ids != ids:
                return text
    return None
