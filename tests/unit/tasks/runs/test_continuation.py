"""What is printed piece by piece is the decoding of prompt and continuation together, whatever the tokenizer."""

import random

import pytest
from tokenizers import Tokenizer

from infini_llama.tasks.runs.generation import Continuation
from support.tokenizer_kinds import BYTES, KINDS, of_kind

PROMPTS = ["The river", "it was the best ", "日本", "a", "naïve\n", ""]
TEXTS = [
    "The river runs past",
    "größer, 日本語 🙂!",
    "  two  spaces \n",
    "a     b",
    "e\u0301 \ufffd ok",
]


def expected(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The decoding of all minus that of the prompt; where the prompt's last byte tokens became invalid, minus one U+FFFD for each."""
    whole, alone = tokenizer.decode(prompt + tokens), tokenizer.decode(prompt)
    if whole.startswith(alone):
        return whole[len(alone) :]
    names = [tokenizer.id_to_token(token) for token in prompt]
    trailing = next(
        (n for n, name in enumerate(reversed(names)) if name not in BYTES), len(names)
    )
    assert trailing
    return whole[len(tokenizer.decode(prompt[:-trailing])) + trailing :]


def continuation(tokenizer: Tokenizer, choose: random.Random) -> list[int]:
    """Any tokens: of text, cut anywhere; byte tokens; special ones, and IDs that are of no token."""
    size, tokens = tokenizer.get_vocab_size(), list[int]()
    special = [
        id
        for id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    ]
    some_bytes = [
        id for byte in BYTES if (id := tokenizer.token_to_id(byte)) is not None
    ]
    while len(tokens) < choose.randrange(1, 24):
        ids = tokenizer.encode(choose.choice(TEXTS), add_special_tokens=False).ids
        first = choose.randrange(len(ids) + 1)
        tokens += choose.choice(
            [
                ids[first : first + choose.randrange(6)],
                choose.choices(range(size), k=choose.randrange(4)),
                choose.choices(some_bytes or [0], k=choose.randrange(4)),
                special[-1:] or [size + 5],
                [size + 5],
            ]
        )
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_decoding_of_prompt_and_continuation(kind):
    tokenizer, choose = of_kind(kind), random.Random(kind)
    for _ in range(150):
        prompt = tokenizer.encode(
            choose.choice(PROMPTS), add_special_tokens=False
        ).ids or [0]
        tokens, written, finals = (
            continuation(tokenizer, choose),
            Continuation(tokenizer, prompt),
            [""],
        )
        for number, token in enumerate(tokens, start=1):
            written.add(token)
            finals.append(written.final)
            assert written.final + written.open == expected(
                tokenizer, prompt, tokens[:number]
            ), (
                prompt,
                tokens,
            )
        whole = written.final + written.open
        assert all(map(whole.startswith, finals)), (prompt, tokens, finals)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "speech"])
def test_whole_characters_are_written_at_once(kind):
    tokenizer = of_kind(kind)
    written = Continuation(
        tokenizer, tokenizer.encode("The river", add_special_tokens=False).ids
    )
    for token in tokenizer.encode(
        "runs past the old mill", add_special_tokens=False
    ).ids:
        written.add(token)
        assert not written.open
    assert written.final.split() == ["runs", "past", "the", "old", "mill"]
