"""The characters that gigatoken treats otherwise than `tokenizers`, measured for the versions that are installed."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from infini_llama.tasks.tokenizers.differing_characters import (
    BEYOND,
    COMPOSED,
    CUT,
    has_any,
    table_of,
)
from infini_llama.tasks.tokenizers.encoder import reference
from infini_llama.tasks.tokenizers.engines import gigatoken_of
from infini_llama.tasks.tokenizers.tiktoken_encodings import ENCODINGS, byte_letters

BATCH = 4096
NEIGHBOURS = "aA1! \n'"
# Marks that other characters are composed with, some of them new in Unicode 16.
MARKS = "\u0301\u0316\u0307\U000113c9\U000113c2\U000113bb\U0001611f\U00016d67"
BY_WORD = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def pairs() -> Iterator[tuple[int, int]]:
    """Pairs of bytes where two characters meet, so that the tokens show at which of them a word ends."""
    for neighbour in NEIGHBOURS.encode():
        for byte in range(0x80, 0x100):
            yield neighbour, byte
            yield byte, neighbour
    for last in range(0x80, 0xC0):
        for first in range(0xC2, 0xF5):
            yield last, first


def tokenizer_of(words: pre_tokenizers.PreTokenizer) -> Tokenizer:
    letters = byte_letters()
    merges = [(letters[left], letters[right]) for left, right in pairs()]
    tokens = dict.fromkeys([*letters, *(left + right for left, right in merges)])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = words
    return tokenizer


def beside_every_class(c: str) -> str:
    return f"a{c}a{c}{c}A{c}A1{c}1!{c}! {c} {c}\n{c}'{c}a's{c}"


def with_marks(c: str) -> str:
    """Also with marks, which the normalizer NFC orders and composes."""
    return (
        beside_every_class(c)
        + "".join(f"e{c}{mark}" for mark in MARKS)
        + f" e\u0301{c}\u0316"
    )


def differing(tokenizer: Tokenizer, text_with: Callable[[str], str]) -> set[int]:
    """The characters in whose text the two engines find other tokens."""
    fast, slow = gigatoken_of(tokenizer.to_str()), reference(tokenizer)
    characters = [
        number for number in range(0x80, BEYOND) if not 0xD800 <= number < 0xE000
    ]
    found = set[int]()
    for start in range(0, len(characters), BATCH):
        batch = characters[start : start + BATCH]
        texts = [text_with(chr(number)).encode() for number in batch]
        (ids, ends), (right, right_ends) = fast(texts), slow(texts)
        if np.array_equal(ids, right):
            continue
        for position, number in enumerate(batch):
            first, last = ends[position : position + 2]
            expected = right[right_ends[position] : right_ends[position + 1]]
            if not np.array_equal(ids[first:last], expected):
                found.add(number)
    return found


def listed(ranges: str) -> set[int]:
    return set(np.flatnonzero(table_of(ranges)).tolist())


def test_the_tables_are_those_that_the_installed_versions_differ_in():
    """With the pattern of o200k_base, which looks at more classes of characters than the others, GPT-2's among them."""
    pytest.importorskip("gigatoken")
    pattern = Regex(ENCODINGS["o200k_base"].pattern)
    words = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), BY_WORD]
    )
    tokenizer = tokenizer_of(words)
    assert differing(tokenizer, beside_every_class) == listed(CUT)
    tokenizer.normalizer = normalizers.NFC()
    assert differing(tokenizer, with_marks) == listed(CUT) | listed(COMPOSED)


def test_gpt2s_words_differ_at_no_other_character():
    pytest.importorskip("gigatoken")
    tokenizer = tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False))
    found = differing(tokenizer, beside_every_class)
    assert len(found) > 4000 and found <= listed(CUT)


def test_the_tables_have_rare_characters_and_no_known_emoji():
    texts = [
        "\u088f",
        "größer \U00016ed1",
        "\U0003298d",
        "größer 日本語 \U0001fae8",
        "a",
        "",
    ]
    assert [has_any(text.encode(), CUT) for text in texts] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert has_any("\u07fd".encode(), COMPOSED) and not has_any("\u07fd".encode(), CUT)
    assert not has_any("\U0010ffff".encode(), CUT + COMPOSED)
