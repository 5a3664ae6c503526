"""Fast engines: the same ids as `tokenizers`, or they are not used."""

import errno
import json
import logging
import shutil
import sys
from itertools import count
from types import ModuleType

import numpy as np
import pytest
from tokenizers import Tokenizer

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess import stage
from infini_llama.tasks.preprocess.tokenizers import engines
from infini_llama.tasks.preprocess.tokenizers.engines import EngineDiffers, choose_engine, compare, golden, open_engine
from infini_llama.tasks.preprocess.tokenizers.tokenizer import train_bpe
from infini_llama.tasks.preprocess.tokens import build as work
from support.stages import preprocess, read_manifest

TEXTS = ["the cat sat on the mat", "größer 日本語 🙂", "<|endoftext|> in the text", ""]


def longer(encode, chosen):
    """An engine like another one, but for an id too many where `chosen` says so."""

    def wrong(texts):
        ids, offsets = encode(texts)
        several = [
            np.append(one, 1) if chosen(text) else one
            for text, one in zip(texts, np.split(ids, offsets[1:-1]), strict=True)
        ]
        return np.concatenate(several), np.cumsum([0, *map(len, several)])

    return wrong


@pytest.fixture
def wrong(monkeypatch):
    """An engine that gives one id too many for a text with an x in it; installed under a real engine's name."""
    pytest.importorskip("gigatoken")
    right = engines.ENGINES["gigatoken"]

    def broken(description):
        return longer(right(description), lambda text: "x:" in text)

    monkeypatch.setitem(engines.ENGINES, "gigatoken", broken)


@pytest.mark.parametrize("engine", ["gigatoken"])
def test_every_engine_gives_the_reference_ids_on_the_golden_set(engine):
    pytest.importorskip(engine)
    tokenizer = train_bpe(TEXTS * 3, 300, 2)
    assert compare(engine, tokenizer, golden(tokenizer) + TEXTS) is None


def test_an_engine_that_differs_is_refused_once_and_for_all(wrong, tmp_path, caplog):
    tokenizer = train_bpe(TEXTS * 3, 300, 2)
    calls = []

    def texts():
        calls.append(1)
        return [*TEXTS, "{x: 1}"]

    with caplog.at_level(logging.WARNING):
        chosen = choose_engine("auto", tokenizer, texts, tmp_path)
    assert chosen.name == "tokenizers" and "other ids" in chosen.refused["gigatoken"]
    assert "gigatoken" in caplog.text
    assert choose_engine("gigatoken", tokenizer, texts, tmp_path).name == "tokenizers" and len(calls) == 1
    [note] = tmp_path.iterdir()
    note.write_text("{")
    choose_engine("auto", tokenizer, texts, tmp_path)
    assert len(calls) == 2 and "other ids" in json.loads(note.read_text())["fault"]


def test_a_difference_found_during_the_build_switches_to_the_reference(wrong, data, tmp_path, digests, monkeypatch):
    monkeypatch.setattr(engines, "_checked", lambda *_: None)  # a check that saw nothing
    monkeypatch.setattr(engines, "SAMPLED", 3)
    second = preprocess(data(tokenizer_engine="gigatoken"), str(tmp_path / "fast"))
    first = preprocess(data(tokenizer_engine="tokenizers"), str(tmp_path / "slow"))
    assert first == second
    assert digests(tmp_path / "slow" / "datasets") == digests(tmp_path / "fast" / "datasets")
    used = read_manifest(tmp_path / "fast" / second["path"], "dataset")["meta"]["engine"]
    assert used["name"] == "tokenizers" and "gigatoken" in used["refused"]
    fast, slow = (
        read_manifest(tmp_path / name / first["path"], "dataset")["meta"]["units"] for name in ("fast", "slow")
    )
    assert fast == slow  # keys of the engine that wrote the shards, not of the one that was refused


@pytest.fixture
def late(monkeypatch):
    """gigatoken, that passes its check and is right for the first text alone; the 21st is sampled."""
    pytest.importorskip("gigatoken")
    right = engines.ENGINES["gigatoken"]

    def broken(description):
        number = count()
        return longer(right(description), lambda _: next(number) > 0)

    monkeypatch.setattr(engines, "compare", lambda *_: None)
    monkeypatch.setattr(engines, "SAMPLED", 20)
    monkeypatch.setitem(engines.ENGINES, "gigatoken", broken)


def test_a_kill_after_a_mismatch_leaves_no_shard_of_the_refused_engine(late, data, tmp_path, digests, monkeypatch):
    home, settings = tmp_path / "fast", data(tokenizer_engine="gigatoken", shard_size=2048)
    write, refuse, wrong, noted = work.write_shard, stage.refuse, [], []

    def files():
        (journal,) = home.rglob(".*.journal")
        return [json.loads(line)["file"] for line in journal.read_text().splitlines()]

    def refusing(*given):
        noted.extend(files())
        refuse(*given)

    def dying(path, *rest):
        if noted:
            raise OSError(errno.EIO, "Input/output error")
        write(path, *rest)
        wrong.append(path)

    monkeypatch.setattr(work, "write_shard", dying)
    monkeypatch.setattr(stage, "refuse", refusing)
    with pytest.raises(OSError, match="Input/output error"):
        preprocess(settings, str(home))
    assert len(wrong) > 1 and noted == files() == ["tokenizer.json"] and not any(path.exists() for path in wrong)
    monkeypatch.setattr(work, "write_shard", write)
    reference = preprocess(settings, str(home))
    assert preprocess(settings | {"tokenizer_engine": "tokenizers"}, str(tmp_path / "slow")) == reference
    assert digests(home / "datasets") == digests(tmp_path / "slow" / "datasets")


def test_shards_of_an_engine_that_is_refused_later_are_in_no_later_dataset(
    late, data, corpus, tmp_path, digests, monkeypatch
):
    frozen = tmp_path / "one" / preprocess(data(), str(tmp_path / "one"))["path"] / "tokenizer.json"
    text = shutil.copytree(corpus, tmp_path / "text")
    settings = data(files=[str(text)], tokenizer={"path": str(frozen)}, tokenizer_engine="gigatoken", shard_size=2048)
    monkeypatch.setattr(engines, "SAMPLED", 1000)
    earlier = preprocess(settings, str(tmp_path / "home"))["path"]  # wrong from the second text on, and not caught
    tokenizer = Tokenizer.from_file(str(tmp_path / "home" / earlier / "tokenizer.json"))
    engines.refuse("gigatoken", tokenizer, tmp_path / "home" / "engine-checks", "another text showed it")
    (text / "text-99-tomorrow.txt").write_text("another day, and what it brought " * 30, encoding="utf-8")
    reference = preprocess(settings, str(tmp_path / "home"))
    preprocess(settings | {"tokenizer_engine": "tokenizers"}, str(tmp_path / "fresh"))
    assert digests(tmp_path / "home" / reference["path"]) == digests(tmp_path / "fresh" / reference["path"])


def test_auto_uses_a_fast_engine_for_large_enough_text(data, tmp_path, monkeypatch):
    pytest.importorskip("gigatoken")

    def used(home):
        return read_manifest(home / preprocess(data(), str(home))["path"], "dataset")["meta"]["engine"]["name"]

    assert used(tmp_path / "little") == "tokenizers"
    monkeypatch.setattr(stage, "WORTH_A_CHECK", 1)
    assert used(tmp_path / "much") == "gigatoken"


def test_one_document_of_so_many_is_sampled_over_all_batches(wrong, monkeypatch):
    monkeypatch.setattr(engines, "SAMPLED", 4)
    encode = open_engine("gigatoken", train_bpe(TEXTS * 3, 300, 2))
    encode(["a", "x:", "x:"])
    with pytest.raises(EngineDiffers, match="x:"):
        encode(["a", "x:"])


@pytest.mark.parametrize("engine", ["gigatoken"])
def test_characters_of_newer_unicode_versions_use_the_reference_engine(engine):
    pytest.importorskip(engine)
    texts = ['"\U00016ed1",', "no such character", "größer", "\U0003298dไ"]
    tokenizer = train_bpe(texts * 50, 300, 2)
    slow, fast = engines.reference(engines.encoder_of(tokenizer)), open_engine(engine, tokenizer)
    for found, right in zip(fast(texts), slow(texts), strict=True):
        assert found.tolist() == right.tolist()
    assert [engines._is_young(text) for text in texts] == [True, False, False, True]


def test_of_a_long_document_the_beginning_is_sampled(wrong, monkeypatch):
    monkeypatch.setattr(engines, "LONGEST_SAMPLED", 10)
    encode = open_engine("gigatoken", train_bpe(TEXTS * 3, 300, 2))
    encode(["a" * 20 + "x:"])
    with pytest.raises(EngineDiffers, match="x:"):
        open_engine("gigatoken", train_bpe(TEXTS * 3, 300, 2))(["x:" + "a" * 20])


def test_a_tokenizer_unsupported_by_an_engine_is_refused_with_the_reason():
    pytest.importorskip("gigatoken")
    description = json.loads(train_bpe(TEXTS * 3, 300, 2).to_str())
    description["model"] = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    description["added_tokens"] = []
    assert compare("gigatoken", Tokenizer.from_str(json.dumps(description)), ["a b"])


def test_an_engine_that_cannot_be_imported_is_used_once_it_can(tmp_path, monkeypatch):
    """Neither its refusal nor an earlier good check outlasts the installation."""
    tokenizer = train_bpe(TEXTS * 3, 300, 2)
    monkeypatch.setattr(engines, "version", lambda name: "1.0")
    monkeypatch.setitem(
        engines.ENGINES, "gigatoken", lambda description: engines.reference(Tokenizer.from_str(description))
    )
    used = []
    for module in (None, ModuleType("gigatoken"), None):
        monkeypatch.setitem(sys.modules, "awkward", module)
        monkeypatch.setitem(sys.modules, "gigatoken", module)
        used.append(choose_engine("auto", tokenizer, list, tmp_path).name)
    assert used == ["tokenizers", "gigatoken", "tokenizers"]


def test_a_requested_engine_that_is_not_installed_is_reported(tmp_path, monkeypatch):
    def missing(name):
        raise engines.PackageNotFoundError(name)

    monkeypatch.setattr(engines, "version", missing)
    with pytest.raises(ConfigError, match=r"infini-llama\[fast\]"):
        choose_engine("gigatoken", train_bpe(TEXTS * 3, 300, 2), list, tmp_path)
