"""Shards of earlier datasets are taken where their text and tokenizer are the same, and only where they are whole."""

import errno
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infini_llama.configs.errors import PipelineError
from infini_llama.tasks.preprocess.tokenizers import engines
from infini_llama.tasks.preprocess.tokens import build as work
from infini_llama.tasks.preprocess.tokens import reuse
from infini_llama.tasks.storage.artifacts import check
from support.stages import preprocess, read_manifest, verify


@pytest.fixture
def tokenized(monkeypatch) -> list[str]:
    """Names of the shards whose text is tokenized from here on, with their split."""
    names: list[str] = []
    write = work.write_shard
    monkeypatch.setattr(
        work,
        "write_shard",
        lambda path, *rest: (names.append(f"{path.parent.name}/{path.name}"), write(path, *rest)),
    )
    return names


@dataclass(frozen=True)
class Grown:
    """A dataset with a frozen tokenizer, two more files of text, and what a build from nothing makes of them."""

    home: Path
    settings: dict[str, Any]
    before: dict[str, Any]
    fresh: dict[str, Any]
    fresh_home: Path


@pytest.fixture(scope="module")
def _grown(data, corpus, tmp_path_factory) -> Grown:
    folder = tmp_path_factory.mktemp("grown")
    text = shutil.copytree(corpus, folder / "text")
    learned = preprocess(data(files=[str(corpus)]), folder / "learned")
    frozen = folder / "learned" / learned["path"] / "tokenizer.json"
    settings = data(files=[str(text)], tokenizer={"path": str(frozen)}, shard_size=2048)
    before = preprocess(settings, folder / "home")
    for number in range(2):
        (text / f"text-9{number}-tomorrow.txt").write_text("another day, and what it brought " * 30, encoding="utf-8")
    fresh = preprocess(settings, folder / "fresh")
    return Grown(folder / "home", settings, before, fresh, folder / "fresh")


@pytest.fixture
def grown(_grown, tmp_path):
    """Of it a home of one's own, the settings, and the reference before the text grew."""
    return shutil.copytree(_grown.home, tmp_path / "home", symlinks=True), _grown.settings, _grown.before


@pytest.fixture
def is_fresh(_grown, digests):
    """Whether the dataset in a home has the bytes of a build from nothing."""

    def compare(home: Path, reference: dict[str, Any]) -> bool:
        assert reference == _grown.fresh
        return digests(home / reference["path"]) == digests(_grown.fresh_home / reference["path"])

    return compare


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.arrow"))


def test_with_a_frozen_tokenizer_only_new_units_are_tokenized_and_the_bytes_are_those_of_a_build_from_nothing(
    grown, tokenized, is_fresh, caplog
):
    home, settings, before = grown
    with caplog.at_level(logging.INFO, logger="infini_llama.preprocess"):
        reference = preprocess(settings, str(home))
    after = shards(home / reference["path"])
    assert reference["path"] != before["path"] and 0 < len(tokenized) <= 3 < len(after) - len(tokenized)
    message = f"{len(after) - len(tokenized)} of {len(after)} shards are reused from earlier datasets"
    assert message in caplog.text and f"; {len(tokenized)} are tokenized" in caplog.text
    linked = [path for path in after if path.stat().st_nlink > 1]
    assert len(linked) == len(after) - len(tokenized)
    assert is_fresh(home, reference)
    assert verify(reference, str(home), "deep", 0)["ok"] and verify(before, str(home), "deep", 0)["ok"]


def test_a_file_inserted_first_reuses_the_shards_of_the_others(data, corpus, tmp_path, tokenized, digests):
    """The shards of another source keep their content, whatever their numbers become."""
    frozen = tmp_path / "one" / preprocess(data(), str(tmp_path / "one"))["path"] / "tokenizer.json"
    (tmp_path / "a").mkdir()
    for number in range(20):
        (tmp_path / "a" / f"{number}.txt").write_text(f"the {number}th text of another source " * 40)
    same = {"tokenizer": {"path": str(frozen)}, "shard_size": 2048, "files": []}
    sources = [{"name": "b", "files": [str(corpus)]}]
    preprocess(data(sources=sources, **same), str(tmp_path / "home"))
    tokenized.clear()
    sources.append({"name": "a", "files": [str(tmp_path / "a")]})
    reference = preprocess(data(sources=sources, **same), str(tmp_path / "home"))
    count = len(shards(tmp_path / "home" / reference["path"]))
    new = len(tokenized)
    tokenized.clear()
    assert preprocess(data(sources=sources, **same), str(tmp_path / "fresh")) == reference
    assert len(tokenized) == count and 0 < new < count / 1.5
    assert digests(tmp_path / "home" / reference["path"]) == digests(tmp_path / "fresh" / reference["path"])


@pytest.mark.parametrize("damage", ["flipped", "gone", "moved aside", "not whole"])
def test_no_shard_is_taken_that_is_not_what_its_manifest_says(grown, tokenized, is_fresh, caplog, damage):
    home, settings, before = grown
    folder = home / before["path"]
    shard = folder / "train" / "data-00001.arrow"
    match damage:
        case "flipped":
            content = bytearray(shard.read_bytes())
            content[len(content) // 2] ^= 1
            shard.write_bytes(content)
        case "gone":
            shard.unlink()
        case "moved aside":
            folder.rename(folder.with_name(f"{folder.name}.damaged-1"))
        case "not whole":
            (folder / "manifest.json").unlink()
    reference = preprocess(settings, str(home))
    assert "train/data-00001.arrow" in tokenized
    assert ("train/data-00000.arrow" in tokenized) == (damage in ("moved aside", "not whole"))
    assert (f"{shard} does not have" in caplog.text) == (damage == "flipped")
    check(home / reference["path"], "dataset", checksums=True)
    assert is_fresh(home, reference)


def test_where_there_are_no_links_shards_are_copied(grown, tokenized, is_fresh, monkeypatch):
    def refuse(*paths: Path) -> None:
        raise OSError(1, "Operation not permitted")

    home, settings, _ = grown
    monkeypatch.setattr(reuse.os, "link", refuse)
    reference = preprocess(settings, str(home))
    monkeypatch.undo()
    assert len(tokenized) <= 3
    assert all(path.stat().st_nlink == 1 for path in shards(home / reference["path"]))
    assert is_fresh(home, reference)


def test_another_tokenizer_or_end_of_text_shares_no_shard(grown, data, tmp_path, tokenized):
    home, settings, _ = grown
    preprocess(settings | {"tokenizer": settings["tokenizer"] | {"path": None, "vocab_size": 280}}, str(home))
    assert len(tokenized) > 3
    tokenized.clear()
    tokenizer = Path(settings["tokenizer"]["path"])
    other = tmp_path / "other.json"
    other.write_text(tokenizer.read_text(encoding="utf-8").replace("<|endoftext|>", "<|the end|>"), encoding="utf-8")
    preprocess(settings | {"tokenizer": settings["tokenizer"] | {"path": str(other), "eos": "<|the end|>"}}, str(home))
    assert len(tokenized) > 3


@pytest.mark.parametrize("other", ["engine", "version of the engine"])
def test_another_engine_or_version_of_it_shares_no_shard(grown, tokenized, monkeypatch, other):
    home, settings, _ = grown
    if other == "engine":
        pytest.importorskip("gigatoken")
        settings = settings | {"tokenizer_engine": "gigatoken"}
    else:
        monkeypatch.setattr(engines, "version", lambda name: "0.0.1")
    reference = preprocess(settings, str(home))
    assert len(tokenized) == len(shards(home / reference["path"]))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_shard_that_cannot_be_read_is_tokenized_again_and_no_space_is_said(
    grown, is_fresh, monkeypatch, caplog, code
):
    def refuse(*paths: Path) -> None:
        raise OSError(code, os.strerror(code))

    home, settings, before = grown
    monkeypatch.setattr(reuse.os, "link", refuse)
    monkeypatch.setattr(reuse.shutil, "copyfile", refuse)
    if code in reuse.NO_SPACE:
        with pytest.raises(PipelineError, match=os.strerror(code)):
            preprocess(settings, str(home))
        return
    reference = preprocess(settings, str(home))
    monkeypatch.undo()
    shard = home / before["path"] / "train" / "data-00001.arrow"
    assert f"{shard} " in caplog.text and os.strerror(code) in caplog.text
    assert is_fresh(home, reference)


def test_a_shard_that_is_a_symbolic_link_or_a_folder_is_tokenized_again(grown, tmp_path, tokenized, is_fresh, caplog):
    home, settings, before = grown
    first, second = (home / before["path"] / "train" / f"data-0000{number}.arrow" for number in range(2))
    first.rename(tmp_path / "elsewhere.arrow")
    first.symlink_to(tmp_path / "elsewhere.arrow")
    second.unlink()
    second.mkdir()
    reference = preprocess(settings, str(home))
    assert {"train/data-00000.arrow", "train/data-00001.arrow"} < set(tokenized)
    assert f"{first} " in caplog.text and f"{second} " in caplog.text
    assert not any(path.is_symlink() for path in shards(home / reference["path"]))
    assert is_fresh(home, reference)


def test_units_of_another_version_are_rebuilt_when_a_build_resumes(grown, tokenized, monkeypatch):
    home, settings, _ = grown
    write = work.write_shard

    def full(path: Path, *rest: Any) -> None:
        if path.name == "data-00003.arrow":
            raise OSError(errno.EIO, "Input/output error")
        write(path, *rest)

    monkeypatch.setattr(work, "write_shard", full)
    with monkeypatch.context() as older:
        older.setattr(engines, "version", lambda name: "0.0.1")
        with pytest.raises(OSError):
            preprocess(settings, str(home / "anew"))
    monkeypatch.setattr(work, "write_shard", write)
    assert len(tokenized) == 3
    tokenized.clear()
    reference = preprocess(settings, str(home / "anew"))
    after = shards(home / "anew" / reference["path"])
    assert len(tokenized) == len(after)
    keys = read_manifest(home / "anew" / reference["path"], "dataset")["meta"]["units"]
    assert keys.keys() == {f"{path.parent.name}/{path.name}" for path in after}


def test_a_build_killed_after_linking_resumes(grown, is_fresh, monkeypatch):
    home, settings, _ = grown
    write = work.write_shard

    def full(*given: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(work, "write_shard", full)
    with pytest.raises(OSError):
        preprocess(settings, str(home))
    assert list(home.rglob(".*.work/train/*.arrow"))
    monkeypatch.setattr(work, "write_shard", write)
    reference = preprocess(settings, str(home))
    assert is_fresh(home, reference)
