"""Text that a tokenizer cannot express: what its model has no token for is dropped or becomes an unknown token.

What the normalizer and the pre-tokenizer do is the tokenizer's meaning, such as lower case, NFKC or spaces that only separate words.
What is left for the model, and has no token there, is lost.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from infini_llama.configs.errors import tokenizer_faults
from infini_llama.tasks.preprocess.tokenizers.encoder import encoder_of
from infini_llama.tasks.preprocess.tokenizers.tokenizer import (
    LONGEST_WORD,
    WORDS,
    description_of,
    unknown_id,
)

LARGEST_LOSS = 0.01  # share of a text, in bytes, that may have no token
FEW_BYTES = 64  # that any file may lose, however short it is: an emoji or two in a note
SHORT_WORD = 100  # characters of a word that is likely to come again
MOST_WORDS = 500_000  # whose losses are remembered

Loss = tuple[
    int, int, int
]  # unknown tokens, bytes that have no token, and bytes of the text as the model is given it


class Losses:
    """Counts what a tokenizer loses of each text; a tokenizer that cannot lose any needs none, see `losses_of`.

    Args:
        encoder: of documents.
    """

    def __init__(self, encoder: Tokenizer) -> None:
        self.encoder, self.model, self.unknown = encoder, encoder.model, unknown_id(encoder)
        added = sorted(
            (token.content for token in encoder.get_added_tokens_decoder().values()),
            key=len,
            reverse=True,
        )
        self.added = re.compile("|".join(map(re.escape, added))) if added else None
        self._of_short_word = lru_cache(MOST_WORDS)(self._of_word)

    def of(self, text: str) -> Loss:
        """The loss of one text.

        Raises:
            DataError: the tokenizer fails.
        """
        with tokenizer_faults():
            words = (word for piece in self._pieces(text) for word in self._words(piece))
            losses = [
                self._of_short_word(word) if len(word) <= SHORT_WORD else self._of_word(word)
                for word in words
            ]
        unknown, lost, size = (
            (sum(part) for part in zip(*losses, strict=True)) if losses else (0, 0, 0)
        )
        return unknown, lost, size

    def _pieces(self, text: str) -> list[str]:
        """The text without added tokens, which have their IDs whatever the model knows."""
        return self.added.split(text) if self.added else [text]

    def _words(self, text: str) -> Iterator[str]:
        if self.encoder.normalizer:
            text = self.encoder.normalizer.normalize_str(text)
        if not self.encoder.pre_tokenizer:
            yield text
            return
        for word, _ in self.encoder.pre_tokenizer.pre_tokenize_str(text):
            yield word

    def _of_word(self, word: str) -> Loss:
        tokens, size = self.model.tokenize(word) if word else [], len(word.encode())
        unknown = sum(token.id == self.unknown for token in tokens)
        # A model that drops a character moves the tokens after it, and keeps their lengths.
        kept = sum(
            token.offsets[1] - token.offsets[0] for token in tokens if token.id != self.unknown
        )
        return unknown, max(0, size - kept), size


def losses_of(tokenizer: Tokenizer) -> Losses | None:
    """Counts what the tokenizer loses of documents; None: it has a token for every byte, and loses nothing."""
    return None if has_all_bytes(tokenizer) else Losses(encoder_of(tokenizer))


def is_too_much(lost: int, size: int) -> bool:
    """Whether these bytes that have no token are too many of a text of `size` bytes."""
    return lost > LARGEST_LOSS * size


def has_all_bytes(tokenizer: Tokenizer) -> bool:
    """Whether the model has a token for every byte of text that it can be given: over bytes, or with byte fallback."""
    model, kind = tokenizer.model, type(tokenizer.model).__name__
    if kind in ("BPE", "Unigram") and _falls_back(tokenizer, kind):
        return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    steps = list(_steps(tokenizer.normalizer)) + list(_steps(tokenizer.pre_tokenizer))
    if not any(step["type"] == "ByteLevel" for step in steps):
        return False
    if any(model.token_to_id(letter) is None for letter in pre_tokenizers.ByteLevel.alphabet()):
        return False
    # Of WordPiece one that this program trained: elsewhere a longer word or a mark of continuation has tokens of its own.
    if kind == "WordPiece":
        is_cut = any(
            step["type"] == "Split" and step["pattern"] == {"Regex": WORDS} for step in steps
        )
        return (
            is_cut
            and not model.continuing_subword_prefix
            and model.max_input_chars_per_word >= LONGEST_WORD
        )
    marks = getattr(model, "continuing_subword_prefix", None) or getattr(
        model, "end_of_word_suffix", None
    )
    return kind in ("BPE", "Unigram") and not marks


def _falls_back(tokenizer: Tokenizer, kind: str) -> bool:
    if kind == "BPE":
        return tokenizer.model.byte_fallback
    return bool(
        json.loads(description_of(tokenizer))["model"].get("byte_fallback")
    )  # nothing else states it


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The single steps of a normalizer or pre-tokenizer."""
    waiting = [json.loads(part.__getstate__())] if part else []
    while waiting:
        step = waiting.pop()
        waiting += step.get("pretokenizers", step.get("normalizers", []))
        yield step


def keeps_text(tokenizer: Tokenizer) -> bool:
    """Whether every text comes back from its tokens as it was: a tokenizer over bytes that changes and leaves out no character."""
    decoder = json.loads(tokenizer.decoder.__getstate__())["type"] if tokenizer.decoder else None
    swallows = any(
        not token.special and (token.lstrip or token.rstrip)
        for token in tokenizer.get_added_tokens_decoder().values()
    )
    steps = [step for step in _steps(tokenizer.pre_tokenizer) if step["type"] != "Sequence"]
    is_whole = (
        tokenizer.normalizer is None
        and decoder == "ByteLevel"
        and not swallows
        and all(map(_keeps, steps))
    )
    return is_whole and has_all_bytes(tokenizer)


def _keeps(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return behavior != "Removed"
    return False
