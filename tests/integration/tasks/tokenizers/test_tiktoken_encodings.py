"""Encodings of tiktoken by name: ids, end of text and vocabulary as there, from a file, a cache or a server."""

import base64
import hashlib
import os
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.preprocess.stage import Preparation, preprocess
from infini_llama.tasks.tokenizers import tiktoken_encodings
from infini_llama.tasks.tokenizers.encoder import encoder_of
from infini_llama.tasks.tokenizers.tiktoken_encodings import (
    ENCODINGS,
    from_rank_file,
    rank_file,
)
from infini_llama.tasks.tokenizers.tokenizer import end_of_text, load
from infini_llama.tasks.verify_data.checks import verify
from support.remote import WebServer

NAME = "cl100k_base"


def section(**given) -> TokenizerConfig:
    return TokenizerConfig.model_validate({"encoding": NAME} | given)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """cl100k_base with 264 ranks instead of 100,256, its file on a server, and requests to it; tiktoken's cache is an empty folder."""
    learned = ["th", "the", " t", " the", "in", "er", "12", "  "]
    tokens = [
        *(bytes([byte]) for byte in range(256)),
        *(text.encode() for text in learned),
    ]
    content = "".join(
        f"{base64.b64encode(token).decode()} {rank}\n"
        for rank, token in enumerate(tokens)
    ).encode()
    served = tmp_path / "served" / "small.tiktoken"
    served.parent.mkdir()
    served.write_bytes(content)
    count = len(tokens)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    with WebServer(served.parent) as server:
        encoding = replace(
            ENCODINGS[NAME],
            url=f"{server.url}/small.tiktoken",
            sha256=hashlib.sha256(content).hexdigest(),
            ranks=count,
            special={"<|endoftext|>": count + 1, "<|endofprompt|>": count + 5},
        )
        monkeypatch.setitem(ENCODINGS, NAME, encoding)
        yield encoding, served, server.requests


def test_the_file_is_fetched_once_and_its_checksum_is_verified(small, tmp_path):
    encoding, served, requests = small
    file = rank_file(NAME, None)
    assert (
        file == tmp_path / "tiktoken" / hashlib.sha1(encoding.url.encode()).hexdigest()
    )
    assert (
        file.read_bytes() == served.read_bytes()
        and rank_file(NAME, None) == file
        and requests.total() == 1
    )
    file.write_bytes(b"YQ== 0\n")
    assert (
        rank_file(NAME, None).read_bytes() == served.read_bytes()
        and requests.total() == 2
    )
    file.unlink()
    served.write_bytes(served.read_bytes() + b"YQ== 999\n")
    with pytest.raises(PipelineError, match=r"encoding=cl100k_base.*http\S+ .*sha256"):
        rank_file(NAME, None)
    served.unlink()
    with pytest.raises(PipelineError, match=r"data\.tokenizer\.path"):
        rank_file(NAME, None)
    assert not list((tmp_path / "tiktoken").iterdir())


def test_a_local_file_must_be_the_published_one(small, tmp_path):
    _, served, requests = small
    assert rank_file(NAME, str(served)) == served and not requests
    other = tmp_path / "other.tiktoken"
    other.write_text("YQ== 0\n")
    with pytest.raises(
        ConfigError, match=r"other\.tiktoken .*data\.tokenizer\.encoding=cl100k_base"
    ):
        load(section(path=str(other)))
    with pytest.raises(ConfigError, match="No such file"):
        load(section(path=str(tmp_path / "none")))


def test_ids_and_special_tokens_are_tiktokens(small):
    tiktoken, ranks_of = (
        pytest.importorskip("tiktoken"),
        pytest.importorskip("tiktoken.load").load_tiktoken_bpe,
    )
    encoding, served, _ = small
    tokenizer = load(section())
    ranks = ranks_of(str(served))
    reference = tiktoken.Encoding(
        NAME, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=encoding.special
    )
    assert (
        tokenizer.get_vocab_size() == reference.n_vocab
        and end_of_text(tokenizer, section()) == reference.eot_token
    )
    assert (
        tokenizer.token_to_id("<|endofprompt|>") == encoding.special["<|endofprompt|>"]
    )
    encoder = encoder_of(tokenizer, True)
    for text in [*TEXTS, Path(__file__).read_text(), Path(os.__file__).read_text()]:
        assert encoder.encode(
            text, add_special_tokens=False
        ).ids == reference.encode_ordinary(text), text[:80]


# as tiktoken 0.14 has it, with its possessive quantifiers
PATTERN = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
TEXTS = [
    "",
    "the other 12345 THE'S it'ſ I'LL",
    " \n\n  the\t \r\n x ",
    "<|endoftext|> the",
    "größer\u0085日本語 \u2028 🙂 the  ",
]


def test_a_dataset_is_made_with_it_and_its_key_needs_no_file(
    small, data, tmp_path, monkeypatch
):
    encoding, _, requests = small
    given = data(tokenizer={"encoding": NAME})
    key = Preparation(given, tmp_path).plan().key
    assert not requests
    for changes in (
        {"pattern": encoding.pattern + "|x"},
        {"special": encoding.special | {"<|other|>": 270}},
    ):
        with monkeypatch.context() as patch:
            patch.setitem(ENCODINGS, NAME, replace(encoding, **changes))
            assert Preparation(given, tmp_path).plan().key != key
    reference = preprocess(given, tmp_path)
    assert requests.total() == 1 and key.startswith(reference.path.rsplit("-", 1)[1])
    verify(reference, tmp_path, "deep")
    shutil.rmtree(tmp_path / "tiktoken")
    assert preprocess(given, tmp_path).built == ()


def test_a_named_encoding_is_valid_with_every_key():
    assert section(**section().model_dump()) == section(), (
        "a configuration that is written out names every key"
    )


@pytest.fixture(scope="module")
def short_words(tmp_path_factory):
    """Ranks among which is every word of up to 5 of 5 characters, so that ids say where a text was cut."""
    words = [
        "".join(letters)
        for size in range(2, 6)
        for letters in product(" \n\ra1", repeat=size)
    ]
    tokens = [
        *(bytes([byte]) for byte in range(256)),
        *(word.encode() for word in words),
    ]
    file = tmp_path_factory.mktemp("words") / "words.tiktoken"
    file.write_bytes(
        b"".join(
            b"%s %d\n" % (base64.b64encode(token), rank)
            for rank, token in enumerate(tokens)
        )
    )
    return file, words, {token: rank for rank, token in enumerate(tokens)}


@pytest.mark.parametrize("name", [*ENCODINGS])
def test_texts_are_cut_as_by_the_pattern_that_tiktoken_itself_has(
    short_words, name, monkeypatch
):
    tiktoken, public = (
        pytest.importorskip("tiktoken"),
        pytest.importorskip("tiktoken_ext.openai_public"),
    )
    file, words, ranks = short_words
    monkeypatch.setattr(
        public, "load_tiktoken_bpe", lambda url, expected_hash: (url, expected_hash)
    )
    theirs, ours = getattr(public, name)(), ENCODINGS[name]
    assert (
        theirs["mergeable_ranks"] == (ours.url, ours.sha256)
        and theirs["special_tokens"] == ours.special
    )
    reference = tiktoken.Encoding(
        name, pat_str=theirs["pat_str"], mergeable_ranks=ranks, special_tokens={}
    )
    encoder = encoder_of(from_rank_file(file, ours.pattern, ["<|endoftext|>"]), True)
    texts = [
        *words,
        "a\n  ",
        "a \n \n",
        "a  \n\n  \nb  ",
        "1\r\n \r\n",
        *TEXTS,
        *(f"{text}\n \n  " for text in TEXTS),
    ]
    found = [
        encoding.ids
        for encoding in encoder.encode_batch(texts, add_special_tokens=False)
    ]
    expected = reference.encode_ordinary_batch(texts, num_threads=1)
    assert not [
        text
        for text, ids, wanted in zip(texts, found, expected, strict=True)
        if ids != wanted
    ]


@pytest.mark.parametrize("name", [*ENCODINGS])
def test_the_real_encodings_are_tiktokens_where_its_cache_has_them(name):
    """Their files are not part of this project; with tiktoken and its cache (TIKTOKEN_CACHE_DIR) all ids are compared."""
    tiktoken = pytest.importorskip("tiktoken")
    encoding = ENCODINGS[name]
    if not (
        tiktoken_encodings.cache() / hashlib.sha1(encoding.url.encode()).hexdigest()
    ).is_file():
        pytest.skip(f"tiktoken's cache has no {name}")
    reference, tokenizer = tiktoken.get_encoding(name), load(section(encoding=name))
    assert tokenizer.get_vocab_size() == reference.n_vocab
    assert end_of_text(tokenizer, section(encoding=name)) == reference.eot_token
    encoder = encoder_of(tokenizer, True)
    for text in [*TEXTS, Path(os.__file__).read_text()]:
        assert encoder.encode(
            text, add_special_tokens=False
        ).ids == reference.encode_ordinary(text), text[:80]
