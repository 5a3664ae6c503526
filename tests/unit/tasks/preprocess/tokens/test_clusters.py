"""Dask and Ray do the same units as local processes: equal bytes, also where a worker is killed in the middle."""

import gzip
import json
import sys

import numpy as np
import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.tokens.clusters import Share, do_share, parts_of
from infini_llama.tasks.preprocess.tokens.plan import Unit, plan_units, shares_of
from infini_llama.tasks.preprocess.workers.clusters import Terms, do_part, versions
from support.stages import plan, preprocess, survey

UNITS = [Unit("train", number, number, 1, 10) for number in range(100)]


def test_shares_are_all_the_units_in_order():
    for most in (1, 3, 8):
        shares = shares_of(UNITS, most)
        assert [unit for share in shares for unit in share] == UNITS
        assert max(map(len, shares)) == most and min(map(len, shares[:-1])) == most
    assert shares_of(UNITS[:1], 8) == [UNITS[:1]] and shares_of([], 8) == []


def test_no_share_begins_in_a_file_that_can_only_be_read_from_its_beginning(tmp_path):
    (tmp_path / "a.txt").write_text("a first file " * 200)
    for name, opened in (("b.jsonl.gz", gzip.open), ("c.jsonl", open)):
        with opened(tmp_path / name, "wt") as file:
            file.writelines(json.dumps({"text": f"{name} {number} " * 50}) + "\n" for number in range(60))
    corpus = survey({"files": [str(tmp_path)]})
    units = [unit for unit in plan_units(corpus, 10_000).units if unit.split == "train"]
    shares = shares_of(units, 2)
    begin = np.cumsum([0, *map(len, corpus.train)])
    packed = range(int(begin[1]) + 1, int(begin[2]))
    assert not [share[0].first for share in shares if share[0].first in packed]
    assert len([share for share in shares if share[0].first > begin[2]]) > 1  # of lines, each is gone to
    assert [unit for share in shares for unit in share] == units


def write(plan, units, work, into, finish):
    for unit in units:
        (into / unit.file).parent.mkdir(parents=True, exist_ok=True)
        (into / unit.file).write_text(f"shard {unit.number}")
        finish(unit.file, "key", 1, 2)


@pytest.fixture
def share(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "tokenizer.json").write_text("{}")
    return Share(UNITS[:2], tmp_path / "work")


def test_a_part_is_added_to_the_build_without_leftovers(share):
    assert [entry.file for entry in do_share((write, None), share)] == [unit.file for unit in UNITS[:2]]
    assert (share.work / UNITS[1].file).read_text() == "shard 1"
    assert not list(parts_of(share.work).iterdir())


def test_a_failed_part_leaves_nothing(share):
    def fail(plan, units, work, into, finish):
        (into / "train").mkdir(parents=True)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        do_share((fail, None), share)
    assert not list(parts_of(share.work).iterdir()) and not (share.work / "train").exists()


def test_a_worker_with_other_versions_or_without_the_folder_is_refused(tmp_path):
    seen = tmp_path / "seen"
    seen.touch()
    own = versions(DataConfig())
    assert do_part(max, 1, 2, Terms(own, seen)) == 2
    with pytest.raises(PipelineError, match=r"tokenizers .*0\.0\.1"):
        do_part(max, 1, 2, Terms(own | {"tokenizers": "0.0.1"}, seen))
    with pytest.raises(PipelineError, match=r"elsewhere.*runtime\.home"):
        do_part(max, 1, 2, Terms(own, tmp_path / "elsewhere" / "seen"))


def test_workers_need_the_library_of_sketches_where_these_are_made(tmp_path):
    wanted = versions(DataConfig(near_duplicates=0.8))
    assert wanted.keys() - versions(DataConfig()).keys() == {"rensa"}
    (tmp_path / "seen").touch()
    with pytest.raises(PipelineError, match=r"rensa .*, not 0\.0\.1"):
        do_part(max, 1, 2, Terms(wanted | {"rensa": "0.0.1"}, tmp_path / "seen"))


def test_neither_engine_nor_address_is_part_of_a_key(data, tmp_path):
    settings = data(), data(engine="ray", engine_address="head:6379")
    assert plan(settings[0], str(tmp_path)) == plan(settings[1], str(tmp_path))


def test_an_engine_that_is_not_installed_is_named(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dask", None)
    with pytest.raises(ConfigError, match=r"data\.engine=dask.*infini-llama\[dask\]"):
        preprocess(data(engine="dask"), str(tmp_path / "home"))
