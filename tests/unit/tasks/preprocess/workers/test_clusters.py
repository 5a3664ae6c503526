"""Dask and Ray do the same units as local processes: equal bytes, also where a worker is killed in the middle."""

import sys

import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.tasks.preprocess.workers.clusters import Terms, do_part, versions
from support.stages import plan, preprocess


def test_a_worker_with_other_versions_or_without_the_folder_is_refused(tmp_path):
    seen = tmp_path / "seen"
    seen.touch()
    own = versions()
    assert do_part(max, 1, 2, Terms(own, seen)) == 2
    with pytest.raises(PipelineError, match=r"tokenizers .*0\.0\.1"):
        do_part(max, 1, 2, Terms(own | {"tokenizers": "0.0.1"}, seen))
    with pytest.raises(PipelineError, match=r"elsewhere.*runtime\.home"):
        do_part(max, 1, 2, Terms(own, tmp_path / "elsewhere" / "seen"))


def test_neither_engine_nor_address_is_part_of_a_key(data, tmp_path):
    settings = data(), data(engine="ray", engine_address="head:6379")
    assert plan(settings[0], str(tmp_path)) == plan(settings[1], str(tmp_path))


def test_an_engine_that_is_not_installed_is_named(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dask", None)
    with pytest.raises(ConfigError, match=r"data\.engine=dask.*infini-llama\[dask\]"):
        preprocess(data(engine="dask"), str(tmp_path / "home"))
