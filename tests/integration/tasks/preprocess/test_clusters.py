"""Dask and Ray do the same units as local processes: equal bytes, also where a worker is killed in the middle."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.sources.files import File
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.parts import Filters, Part
from infini_llama.tasks.preprocess.tokens.units import Recipe
from infini_llama.tasks.preprocess.workers import (
    Job,
    _dask,
    _ray,
    prepare_part_elsewhere,
    versions,
)
from support.stages import finish_build, start_build
from support.texts import write_files
from support.tokenizer_kinds import train_bpe


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_a_worker_killed_in_the_middle_loses_only_its_part(
    data, tmp_path, digests, engine, small_parts
):
    pytest.importorskip("distributed" if engine == "dask" else engine)
    texts = (f"{number} größer " * 100 for number in range(400))
    settings = data(files=[write_files(tmp_path / "text", texts)])
    expected = preprocess(settings, tmp_path / "local")
    home = tmp_path / engine
    build = start_build(changed(settings, engine=engine, num_workers=2), home)
    killed = None
    while build.poll() is None and killed is None:
        for folder in home.glob("units/*/.*.tmp"):
            pid = int(folder.name.split(".")[-2].split("-")[0])
            if any(home.glob("units/*/*/manifest.json")):
                os.kill(pid, signal.SIGKILL)
                killed = pid
                break
        time.sleep(0.002)
    reference = finish_build(build)
    assert killed is not None and not Path(f"/proc/{killed}").exists()
    assert reference.digest == expected.digest
    assert digests(home / "datasets") == digests(tmp_path / "local" / "datasets")
    assert not [
        path for path in (home / "datasets").iterdir() if path.name.startswith(".")
    ]


@pytest.mark.slow
def test_a_dask_cluster_that_does_not_answer_is_named(data, tmp_path, capfd):
    """Ray reports it by itself, and tries for minutes."""
    pytest.importorskip("distributed")
    variable, address = "DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:1"
    build = start_build(data(engine="dask"), tmp_path / "home", **{variable: address})
    build.communicate(timeout=200)
    assert (
        f"ConfigError: no cluster answers at {variable}={address}"
        in capfd.readouterr().err
    )


@pytest.mark.slow
def test_a_dask_cluster_that_does_not_start_in_time_is_named(data, tmp_path, capfd):
    pytest.importorskip("distributed")
    build = start_build(
        data(engine="dask"),
        tmp_path / "home",
        DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT="0.001s",
    )
    build.communicate(timeout=200)
    assert "PipelineError: data.engine=dask" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_bad_text_has_the_same_error_as_without_a_cluster(data, tmp_path, engine):
    pytest.importorskip("distributed" if engine == "dask" else engine)
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    path = str(tmp_path / "tokenizer.json")
    train_bpe([], 257).save(path)
    settings = data(
        files=[str(tmp_path / "*.txt")],
        tokenizer={"vocab_size": 257, "path": path},
        engine=engine,
    )
    with pytest.raises(DataError, match=r"^\S+bad\.txt is not UTF-8"):
        preprocess(settings, tmp_path / "home")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_a_stopped_build_does_not_wait_for_its_parts(data, tmp_path, engine):
    """The workers would wait forever for a pipe that nobody writes into."""
    pytest.importorskip("distributed" if engine == "dask" else engine)
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "tokenizer.json").touch()
    job = Job(Recipe(tmp_path, 0, "tokenizers", True), Filters(0, False))
    part = Part(
        [File(tmp_path / "pipe.txt", "pipe.txt", "text")], None, 0.0, 0, (None,)
    )
    open_pool = {"dask": _dask, "ray": _ray}[engine]
    with (
        pytest.raises(KeyboardInterrupt),
        open_pool(job, data(engine=engine), 1) as pool,
    ):
        for _ in range(3):
            pool.submit(part)
        raise KeyboardInterrupt


def test_a_worker_with_other_versions_or_without_the_folder_is_refused(tmp_path):
    job, part = (
        Job(Recipe(tmp_path, 0, "tokenizers", True), Filters(0, False)),
        Part([], None, 0.0, 0, ()),
    )
    with pytest.raises(PipelineError, match=r"tokenizers .*0\.0\.1"):
        prepare_part_elsewhere(job, part, versions() | {"tokenizers": "0.0.1"})
    with pytest.raises(PipelineError, match=rf"{tmp_path}.*runtime\.home"):
        prepare_part_elsewhere(job, part, versions())
    (tmp_path / "tokenizer.json").touch()
    assert prepare_part_elsewhere(job, part, versions()).records == 0


def test_an_engine_that_is_not_installed_is_named(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dask", None)
    with pytest.raises(ConfigError, match=r"data\.engine=dask.*infini-llama\[dask\]"):
        preprocess(data(engine="dask"), tmp_path / "home")
