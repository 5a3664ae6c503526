"""Text that a tokenizer cannot express: its model drops it or makes it an unknown token.

What the normalizer and the pre-tokenizer do is the tokenizer's meaning, such as lower case, NFKC or
spaces that only separate words. What is left for the model, and has no token there, is lost.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from infini_llama.configs.errors import tokenizer_faults
from infini_llama.tasks.tokenizers.tokenizer import (
    LONGEST_WORD,
    WORDS,
    description_of,
    unknown_id,
)

LARGEST_LOSS = 0.01  # share of a text, in bytes, that may have no token
FEW_BYTES = 64  # that any file may lose, however short it is: an emoji or two in a note
SHORT_WORD = 100  # characters of a word that is likely to come again
MOST_WORDS = 500_000  # whose losses are remembered

# Unknown tokens, bytes that have no token, and bytes of the text as the model is given it.
Loss = tuple[int, int, int]


class Losses:
    """Counts what a tokenizer loses of each text.

    A tokenizer that `has_all_bytes` needs none.

    Args:
        encoder: of documents.
    """

    def __init__(self, encoder: Tokenizer) -> None:
        self.encoder = encoder
        self.model = encoder.model
        self.unknown = unknown_id(encoder)
        added = [token.content for token in encoder.get_added_tokens_decoder().values()]
        added.sort(key=len, reverse=True)
        self.added = re.compile("|".join(map(re.escape, added))) if added else None
        self._of_short_word = lru_cache(MOST_WORDS)(self._of_word)

    def of(self, text: str) -> Loss:
        """The loss of one text.

        Raises:
            DataError: the tokenizer fails.
        """
        with tokenizer_faults():
            losses: list[Loss] = [(0, 0, 0)]
            # Added tokens have their IDs, whatever the model knows.
            for piece in self.added.split(text) if self.added else [text]:
                for word in self._words(piece):
                    is_short = len(word) <= SHORT_WORD
                    losses.append(
                        self._of_short_word(word) if is_short else self._of_word(word)
                    )
        unknown, lost, size = (sum(part) for part in zip(*losses, strict=True))
        return unknown, lost, size

    def _words(self, text: str) -> list[str]:
        if self.encoder.normalizer:
            text = self.encoder.normalizer.normalize_str(text)
        if not self.encoder.pre_tokenizer:
            return [text]
        return [word for word, _ in self.encoder.pre_tokenizer.pre_tokenize_str(text)]

    def _of_word(self, word: str) -> Loss:
        tokens = self.model.tokenize(word) if word else []
        size = len(word.encode())
        offsets = [token.offsets for token in tokens if token.id != self.unknown]
        # A model that drops a character moves the tokens after it, and keeps their lengths.
        kept = sum(last - first for first, last in offsets)
        return len(tokens) - len(offsets), max(0, size - kept), size


def has_all_bytes(tokenizer: Tokenizer) -> bool:
    """Whether the model has a token for every byte of text that it can be given.

    It has if it is over bytes, or has byte fallback.
    """
    model = tokenizer.model
    kind = type(model).__name__
    if kind in ("BPE", "Unigram") and _falls_back(tokenizer, kind):
        return all(
            model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
        )
    steps = list(_steps(tokenizer.normalizer)) + list(_steps(tokenizer.pre_tokenizer))
    if not any(step["type"] == "ByteLevel" for step in steps):
        return False
    if any(
        model.token_to_id(letter) is None
        for letter in pre_tokenizers.ByteLevel.alphabet()
    ):
        return False
    # Of WordPiece one that this program trained: elsewhere a longer word or a mark of continuation
    # has tokens of its own.
    if kind == "WordPiece":
        is_cut = any(
            step["type"] == "Split" and step["pattern"] == {"Regex": WORDS}
            for step in steps
        )
        return (
            is_cut
            and not model.continuing_subword_prefix
            and model.max_input_chars_per_word >= LONGEST_WORD
        )
    prefix = getattr(model, "continuing_subword_prefix", None)
    suffix = getattr(model, "end_of_word_suffix", None)
    return kind in ("BPE", "Unigram") and not prefix and not suffix


def _falls_back(tokenizer: Tokenizer, kind: str) -> bool:
    if kind == "BPE":
        return tokenizer.model.byte_fallback
    # Nothing else states it.
    return bool(json.loads(description_of(tokenizer))["model"].get("byte_fallback"))


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The single steps of a normalizer or pre-tokenizer."""
    waiting = [json.loads(part.__getstate__())] if part else []
    while waiting:
        step = waiting.pop()
        waiting += step.get("pretokenizers", step.get("normalizers", []))
        yield step


def keeps_text(tokenizer: Tokenizer, split_special_tokens: bool) -> bool:
    """Whether every text comes back from its tokens as it was.

    This holds for a tokenizer over bytes that changes no character and leaves none out.

    Args:
        split_special_tokens: see `encoder_of`.
    """
    decoder = (
        json.loads(tokenizer.decoder.__getstate__())["type"]
        if tokenizer.decoder
        else None
    )
    added = [
        token
        for token in tokenizer.get_added_tokens_decoder().values()
        if not (token.special and split_special_tokens)
    ]
    swallows = any(token.lstrip or token.rstrip for token in added)
    steps = [
        step for step in _steps(tokenizer.pre_tokenizer) if step["type"] != "Sequence"
    ]
    return (
        tokenizer.normalizer is None
        and decoder == "ByteLevel"
        and not swallows
        # The decoder takes the letters of an added token for bytes, too.
        and all(
            tokenizer.decoder.decode([token.content]) == token.content
            for token in added
        )
        and all(map(_keeps, steps))
        and has_all_bytes(tokenizer)
    )


def _keeps(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return behavior != "Removed"
    return False
