"""Texts in pieces: `tokenizers` gives the ids of the whole."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.tokenizers import fragments
from infini_llama.tasks.tokenizers.encoder import encoder_of, reference
from infini_llama.tasks.tokenizers.fragments import PATTERNS, cut_of
from infini_llama.tasks.tokenizers.tiktoken_encodings import ENCODINGS
from infini_llama.tasks.tokenizers.tokenizer import train

LEARNED = [
    "(\n{\n./\n'\n (\n",
    "it's 3 o'clock\n\n  and 1234\r\nthey'll go\t\n\nx = [1,\n 2]\n",
    "größer\n日本語1\n🙂\n",
    "the words of the lines of a text and the\n",
] * 20
# what the patterns tell apart, and much of what stands around a seam
TEXTS = st.lists(
    st.sampled_from(
        [
            *"aZ9 \n\t\r'./({é½\u0301日🙂\u00a0\u2028\u0085",
            "'s",
            "'LL",
            "\n\n",
            " \n",
            "a\n",
            "9\n",
            "a ",
            " B",
            " 's",
            "the",
            " the",
            "of ",
            "\U00016ed1",
        ]
    ),
    max_size=60,
).map("".join)


@pytest.fixture(scope="module")
def kinds():
    made = {}
    for kind in ("bpe", "wordpiece", "unigram"):
        made[kind] = encoder_of(
            train(LEARNED, TokenizerConfig(kind=kind, vocab_size=400)), True
        )
    for number, pattern in enumerate(
        sorted({*PATTERNS, ENCODINGS["r50k_base"].pattern})
    ):
        made[f"pattern {number}"] = _trained_with(pattern)
    return made


def _trained_with(pattern):
    """BPE whose merges reach as far as the pattern lets them: over line ends after punctuation, for one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LEARNED, trainer)
    return tokenizer


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_the_ids_of_the_pieces_are_those_of_the_whole(kinds, text):
    with pytest.MonkeyPatch.context() as short:
        short.setattr(fragments, "SHORT", 1)
        for kind, encoder in kinds.items():
            pieces = cut_of(encoder)(text)
            assert "".join(pieces) == text
            found = [
                number
                for piece in pieces
                for number in encoder.encode(piece, add_special_tokens=False).ids
            ]
            assert found == encoder.encode(text, add_special_tokens=False).ids, kind


def test_every_kind_that_is_trained_here_and_every_known_pattern_is_cut(kinds):
    for text in (
        "a line of words\n" * 200,
        "words that go on without a line end " * 100,
    ):
        assert {
            kind: len(cut_of(encoder)(text)) > 2 for kind, encoder in kinds.items()
        } == dict.fromkeys(kinds, True)


def test_an_unknown_tokenizer_gets_the_text_unsplit(kinds):
    text = "a line of words\n" * 200

    def changed(**parts):
        return Tokenizer.from_str(json.dumps(json.loads(kinds["bpe"].to_str()) | parts))

    over_lines = changed()
    over_lines.add_tokens([AddedToken("words\na", special=False)])
    prefixed = changed()
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    normalized = changed()
    normalized.normalizer = normalizers.Replace("\n", "x")
    other = changed()
    other.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]{1,7}"), "isolated")
    first_word = changed()  # a mark before the first word of the text alone
    first_word.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Metaspace(prepend_scheme="first"),
        ]
    )
    nothing = changed(pre_tokenizer=None)
    for encoder in (over_lines, prefixed, normalized, other, first_word, nothing):
        assert cut_of(encoder)(text) == [text]


def test_the_reference_gives_each_texts_own_ids(kinds, monkeypatch):
    monkeypatch.setattr("infini_llama.tasks.tokenizers.encoder.TOGETHER", 3000)
    texts = [
        "",
        "a line of words\n" * 500,
        "short",
        "",
        "no seam " * 300,
        "9\n" * 1500,
        "",
    ]
    ids, offsets = reference(kinds["bpe"])([text.encode() for text in texts])
    right = [kinds["bpe"].encode(text, add_special_tokens=False).ids for text in texts]
    assert [part.tolist() for part in np.split(ids, offsets[1:-1])] == right
