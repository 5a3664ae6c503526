"""Tokens that the survey finds: text is read once, and the bytes are those of a build that reads it again."""

import gzip
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.sources import survey_cache, texts
from infini_llama.tasks.preprocess.sources.documents import Documents
from infini_llama.tasks.preprocess.tokenizers.engines import EngineDiffers
from infini_llama.tasks.preprocess.tokenizers.tokenizer import train_bpe
from infini_llama.tasks.preprocess.tokens import spool
from support.stages import preprocess

WORDS = ("the", "größer", "of", "日本", "to\n", "in", "a", "is", "🙂")


@pytest.fixture
def text(tmp_path) -> Path:
    """Several formats, copies between and in files, empty texts, a damaged record and files damaged half way."""
    choose = random.Random(5)
    folder = tmp_path / "text"
    folder.mkdir()
    known = [" ".join(choose.choices(WORDS, k=choose.randint(1, 90))) for _ in range(60)]
    for number in range(5):
        lines = "".join(json.dumps({"text": choose.choice(known) * choose.randint(0, 3)}) + "\n" for _ in range(80))
        (folder / f"{number}.jsonl").write_text(lines + "broken\n" * (number == 2), encoding="utf-8")
        (folder / f"{number}.txt").write_text(choose.choice(known), encoding="utf-8")
    damaged = gzip.compress("".join(json.dumps({"text": f"{n} of a damaged file"}) + "\n" for n in range(900)).encode())
    (folder / "1.jsonl.gz").write_bytes(damaged[:-20])
    (folder / "9.jsonl.gz").write_bytes(damaged[:-20])
    return folder


@pytest.fixture
def given(data, text, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    train_bpe([" ".join(WORDS)] * 9, 300, 2).save(str(tokenizer))
    changes = {"tokenizer": {"path": str(tokenizer)}, "tokenizer_engine": "tokenizers", "shard_size": 20_000}
    return data(files=[str(text)], on_bad_input="skip", **changes)


@pytest.fixture
def spooled(monkeypatch):
    """Small texts are read and encoded while they are surveyed, a few documents at a time."""
    spool._opened.cache_clear()
    monkeypatch.setattr(spool, "WORTH_A_CHECK", 0)
    monkeypatch.setattr(spool, "BATCH_BYTES", 1000)
    monkeypatch.setattr(texts, "BLOCK", 500)
    monkeypatch.setattr(survey_cache, "SETTLED", -(10**9))


@pytest.fixture
def read_once(spooled, monkeypatch):
    monkeypatch.setattr(Documents, "texts", lambda *_: pytest.fail("the text is read again"))


@pytest.mark.parametrize("changes", [{}, {"deduplicate": True}, {"min_length": 40, "validation_fraction": 0.5}])
def test_text_of_a_given_tokenizer_is_read_once_and_gives_the_same_bytes(given, digests, tmp_path, request, changes):
    expected = preprocess(given | changes, tmp_path / "twice")
    request.getfixturevalue("read_once")
    assert preprocess(given | changes, tmp_path / "once") == expected
    assert digests(tmp_path / "once" / "datasets") == digests(tmp_path / "twice" / "datasets")
    assert not list((tmp_path / "once" / "surveys" / "tokens").iterdir())


def test_what_a_killed_build_has_found_is_used_unless_it_is_damaged(
    given, digests, tmp_path, request, monkeypatch, spooled
):
    expected = preprocess(given, tmp_path / "plain")
    for damage in ("nothing", "tokens", "record"):
        home = tmp_path / f"damaged {damage}"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(spool.SpoolReader, "has", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            preprocess(given, home)
        (tokens,) = (home / "surveys" / "tokens").glob("*.tokens")
        if damage == "record":
            tokens.with_suffix(".json").write_text("[1, 2]")
        if damage == "tokens":
            content = bytearray(tokens.read_bytes())
            content[99] ^= 1
            tokens.write_bytes(content)
        with monkeypatch.context() as patch:
            if damage == "nothing":
                patch.setattr(Documents, "texts", lambda *_: pytest.fail("the text is read again"))
            assert preprocess(given, home) == expected
        assert digests(home / "datasets") == digests(tmp_path / "plain" / "datasets")


def test_an_added_file_is_encoded_alone(given, text, digests, tmp_path, spooled, monkeypatch):
    preprocess(given, tmp_path / "home")
    (text / "10.txt").write_text("one more, of words that no other has", encoding="utf-8")
    added, encoded = spool.SpoolWriter.add, []
    monkeypatch.setattr(
        spool.SpoolWriter, "add", lambda self, texts, sizes: (encoded.extend(texts), added(self, texts, sizes))[1]
    )
    grown = preprocess(given, tmp_path / "home")
    # damaged files are read each time, since they may have been repaired
    assert [text for text in encoded if "damaged" not in text] == ["one more, of words that no other has"]
    assert preprocess(given, tmp_path / "fresh") == grown | {"built": ["tokens", "chunks"]}


def test_an_engine_that_differs_is_refused_and_the_text_encoded_by_the_reference(given, tmp_path, spooled, monkeypatch):
    expected, refused = preprocess(given, tmp_path / "plain"), []

    def fail(*_):
        raise EngineDiffers("other ids")

    monkeypatch.setattr(spool, "open_engine", lambda *_: fail)
    monkeypatch.setattr(spool, "refuse", lambda name, *rest: refused.append(name))
    assert preprocess(given, tmp_path / "home") == expected
    assert refused == ["tokenizers"]


def test_text_that_yields_a_special_token_is_refused_by_its_file(data, tmp_path, spooled):
    letters = [chr(letter) for letter in range(32, 127)]
    vocab = {text: number for number, text in enumerate(["</s>", *letters, "</", "s>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("<", "/"), ("s", ">"), ("</", "s>")]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"text {number} with {'</s>' if number == 7 else 's>'} in it")
    with pytest.raises(DataError, match=r"/7\.txt .*</s>"):
        preprocess(data(files=[f"{tmp_path}/*.txt"], tokenizer={"path": str(tmp_path)}), tmp_path / "home")
    assert not list((tmp_path / "home" / "surveys" / "tokens").iterdir())
