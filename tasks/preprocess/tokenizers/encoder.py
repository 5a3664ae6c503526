"""`tokenizers` as the encoder of documents, in whose text no special token is found: the reference for every other engine.

A long text is encoded in fragments, which is a third faster and takes less memory, where it is known that this changes no token.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer, models

from infini_llama.tasks.preprocess.sources.texts import batches
from infini_llama.tasks.preprocess.tokenizers.tiktoken_encodings import ENCODINGS
from infini_llama.tasks.preprocess.tokenizers.tokenizer import EOS, description_of, unknown_id

HIDDEN = "\U0010ffff"  # a noncharacter
TOGETHER = 250_000  # characters that are encoded at once: an encoding takes a hundred bytes of memory per token
SHORT = 1000  # characters: a fragment ends at the first seam after so many
LINE_ENDS = re.compile(r"(?<=[!-~])(?=\n)|(?<=[A-Za-z])(?= [A-Za-z])")
WORDS_AT_LINE_ENDS = re.compile(r"(?<=[A-Za-z0-9])(?=\n)|(?<=[A-Za-z])(?= [A-Za-z])")
PATTERNS = {  # that take a line's end to punctuation before it
    ENCODINGS["cl100k_base"].pattern,
    ENCODINGS["o200k_base"].pattern,
    # Llama 3's, and Qwen 2's, as their tokenizer.json has them
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Later steps that look at one word at a time, wherever it stands.
WORD_BY_WORD = {"ByteLevel", "Split", "Digits", "Punctuation"}

Cut = Callable[[str], list[str]]
Ids = tuple[np.ndarray, np.ndarray]  # of several texts, joined, and where in them each begins: [texts + 1], from 0
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
        model |= {"vocab": [[HIDDEN + piece if piece in hidden else piece, score] for piece, score in vocabulary]}
    elif kind in ("WordPiece", "WordLevel"):
        hidden = special & vocabulary.keys() - {model["unk_token"]}
        model |= {"vocab": {HIDDEN + piece if piece in hidden else piece: id for piece, id in vocabulary.items()}}
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


def cut_of(encoder: Tokenizer) -> Cut:
    """Function that cuts a text into fragments whose tokens in sequence are those of the text; one fragment where that is not known.

    A seam lies between an ASCII character and a line's end: any that is no whitespace under GPT-2's pattern, a letter or digit under the
    others known here. Another lies between a letter and one space before a letter, both ASCII: under all of them the space belongs to
    the next word. Those patterns have no alternative that reaches over a seam, and none that looks beyond it (only spaces look at
    what follows them); words are then encoded each by itself. So it holds where such a pattern cuts the text as it is, and no added
    token is looked for before.
    """
    if encoder.normalizer or encoder.get_added_tokens_decoder() or not encoder.pre_tokenizer:
        return lambda text: [text]
    seam = _seam_of(json.loads(encoder.pre_tokenizer.__getstate__()))
    return (lambda text: list(_fragments(text, seam))) if seam else lambda text: [text]


def _seam_of(step: dict) -> re.Pattern | None:
    """A pattern of places at which the words of this step of a pre-tokenizer, as tokenizer.json describes it, are certain to end."""
    match step:
        case {"type": "Sequence", "pretokenizers": [first, *rest]}:
            return _seam_of(first) if all(step["type"] in WORD_BY_WORD for step in rest) else None
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return LINE_ENDS
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            gpt2 = pattern == ENCODINGS["r50k_base"].pattern
            return LINE_ENDS if gpt2 else WORDS_AT_LINE_ENDS if pattern in PATTERNS else None
    return None


def _fragments(text: str, seam: re.Pattern) -> Iterator[str]:
    first = 0
    while len(text) - first > SHORT and (place := seam.search(text, first + SHORT)):
        yield text[first : place.start()]
        first = place.start()
    yield text[first:]
