import logging
import os
from pathlib import Path

import pytest

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.tokenizers import engines
from infini_llama.tasks.preprocess.tokens import build as work
from support.stages import preprocess, verify


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def written(monkeypatch) -> list[str]:
    """Names of the shards that are written from here on."""
    names: list[str] = []
    write = work.write_shard
    monkeypatch.setattr(work, "write_shard", lambda path, *rest: (names.append(path.name), write(path, *rest)))
    return names


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 100), Path.unlink])
def test_only_the_damaged_shard_is_built_again(data, tmp_path, digests, caplog, written, damage):
    reference = preprocess(data(), str(tmp_path))
    folder = tmp_path / reference["path"]
    before = digests(folder)
    written.clear()
    damage(folder / "train" / "data-00001.arrow")
    with pytest.raises(DataError, match=r"data-00001\.arrow .*--repair"):
        verify(reference, str(tmp_path), "quick", 10**9)
    with caplog.at_level(logging.WARNING, logger="infini_llama.preprocess"):
        repaired = preprocess(data(), str(tmp_path), repair=True)
    assert written == ["data-00001.arrow"] and "data-00001.arrow" in caplog.text
    assert repaired == reference | {"built": ["tokens"]} and digests(folder) == before
    assert verify(repaired, str(tmp_path), "deep", 0)["ok"]
    assert not list(tmp_path.rglob(".*.work")) and not list(tmp_path.rglob(".*.journal"))


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def foreign(path: Path) -> None:
    (path.parent / "notes.txt").touch()


@pytest.mark.parametrize(
    ("damage", "again"), [(truncate, ["data-00001.arrow"]), (Path.unlink, ["data-00001.arrow"]), (foreign, [])]
)
def test_rebuilding_a_damaged_dataset_keeps_valid_shards(data, tmp_path, digests, written, damage, again, caplog):
    reference = preprocess(data(), str(tmp_path))
    folder = tmp_path / reference["path"]
    before = digests(folder)
    written.clear()
    damage(folder / "train" / "data-00001.arrow")
    assert preprocess(data(), str(tmp_path)) == reference | {"built": ["tokens"]}
    assert written == again and digests(folder) == before
    assert ("notes.txt" in caplog.text) == (damage is foreign)


def test_shards_that_another_version_wrote_are_built_again_too(data, tmp_path, digests, written, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(engines, "version", lambda name: "0.0.1")
        reference = preprocess(data(), str(tmp_path))
    before, count = digests(tmp_path / reference["path"]), len(written)
    written.clear()
    flip(tmp_path / reference["path"] / "train" / "data-00001.arrow")
    assert preprocess(data(), str(tmp_path), repair=True) == reference | {"built": ["tokens"]}
    assert len(written) == count and digests(tmp_path / reference["path"]) == before


def test_only_a_damaged_row_table_is_rebuilt(data, tmp_path, written):
    reference = preprocess(data(), str(tmp_path))
    written.clear()
    assert preprocess(data(), str(tmp_path), repair=True) == reference | {"built": []}
    flip(tmp_path / reference["path"] / "chunks" / reference["chunks"] / "train.rows.npy")
    assert preprocess(data(), str(tmp_path), repair=True) == reference | {"built": ["chunks"]} and written == []
    assert verify(reference, str(tmp_path), "deep", 0)["ok"]


@pytest.mark.parametrize("name", ["tokenizer.json", "manifest.json"])
def test_without_tokenizer_or_manifest_all_is_built_again(data, tmp_path, digests, name):
    reference = preprocess(data(), str(tmp_path))
    before = digests(tmp_path / reference["path"])
    flip(tmp_path / reference["path"] / name)
    assert preprocess(data(), str(tmp_path), repair=True) == reference
    assert digests(tmp_path / reference["path"]) == before and verify(reference, str(tmp_path), "deep", 0)["ok"]
