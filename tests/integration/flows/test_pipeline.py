"""The settings of one run: its name in full, and nothing of how it is offered; and what is one command."""

import logging
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from infini_llama.configs.errors import ConfigError, DataError, TrainFailed
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows import pipeline
from infini_llama.flows.dataset_choice import choose_dataset, require_dataset_of_run
from infini_llama.flows.naming import usable_home
from infini_llama.flows.workarounds.api_logs import ThrottledAPILogHandler
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.runs.run_folder import RunFolder, read_attempts
from infini_llama.tasks.train import launch as local
from support.damage import flip
from support.made_up_runs import add_checkpoint, add_result, make_run


@pytest.fixture
def begun(corpus, data, tmp_path):
    """The configuration of a run that has not finished, and the folder of its text."""
    text = shutil.copytree(corpus, tmp_path / "text")
    settings = data(files=[f"{text}/*.txt"])
    make_run(
        tmp_path / "home",
        preprocess(settings, tmp_path / "home"),
        settings,
        finished=False,
    )
    config = {
        "data": settings,
        "runtime": {"name": "run", "home": str(tmp_path / "home")},
    }
    return PipelineConfig.model_validate(
        config | {"train": {"max_steps": 60, "warmup_steps": 5}}
    ), text


def test_copied_text_is_the_text_that_a_run_began_with(begun, caplog):
    """`cp -a` keeps names, sizes and times of modification, and no inode."""
    config, text = begun
    shutil.copytree(text, text.with_name("copy"))
    shutil.rmtree(text)
    text.with_name("copy").rename(text)
    preparation = pipeline.preparation_for(config)
    assert preparation.of_run is None and not caplog.text
    assert preparation.build().built == ()


@pytest.mark.parametrize("content", [b"some other text", b"\xff"])
def test_a_run_goes_on_with_the_text_that_it_began_with(begun, caplog, content):
    config, text = begun
    expected = pipeline.preparation_for(config).build()
    (text / "text-003.txt").write_bytes(content)
    preparation = pipeline.preparation_for(config)
    assert preparation.build().path == expected.path
    assert "continues with its dataset" in caplog.text and (
        "text-003" in caplog.text
    ) == (content == b"\xff")
    without_reading = choose_dataset(config, reads_text=False).lookup()
    assert without_reading and without_reading.path == expected.path
    named = choose_dataset(
        config, reads_text=True, named=config.runtime.home / expected.path
    )
    assert named.lookup() == named.of_run and named.build().path == expected.path


def test_a_run_goes_on_with_the_text_that_it_began_with_and_other_loss_weights(
    corpus, data, tmp_path
):
    text = shutil.copytree(corpus, tmp_path / "text")
    sources = [
        {"name": f"part-{number}", "files": [f"{text}/text-0{number}*.txt"]}
        for number in range(4)
    ]
    settings = data(files=[], sources=sources)
    expected = preprocess(settings, tmp_path / "home")
    make_run(tmp_path / "home", expected, settings, finished=False)
    (text / "text-003.txt").write_bytes(b"some other text")
    sources[0] |= {"loss_weight": 3, "license": "MIT"}
    runtime = {"name": "run", "home": str(tmp_path / "home")}
    config = PipelineConfig.model_validate(
        {"data": data(files=[], sources=sources), "runtime": runtime}
    )
    assert pipeline.preparation_for(config).build().path == expected.path


def test_repairing_todays_text_names_the_damaged_dataset_of_other_text(begun):
    config, text = begun
    expected = pipeline.preparation_for(config).build()
    (text / "text-003.txt").write_bytes(b"some other text")
    repaired = preprocess(config.data, config.runtime.home, repair=True)
    require_dataset_of_run(config, expected)
    require_dataset_of_run(config, repaired)
    flip(config.runtime.home / expected.path / "tokenizer.json")
    with pytest.raises(
        DataError, match=rf"began with {expected.name}, which is damaged"
    ) as caught:
        require_dataset_of_run(config, repaired)
    assert "--repair" not in str(caught.value)
    require_dataset_of_run(config, expected)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_run_goes_on_without_its_text(begun, caplog, is_finished):
    """Also one that has finished, which then has nothing to do."""
    config, text = begun
    expected = pipeline.preparation_for(config).build().path
    if is_finished:
        add_result(RunFolder.of(config.runtime), 60)
    shutil.rmtree(text)
    assert pipeline.has_finished(config) == is_finished
    dataset = choose_dataset(config, reads_text=False).lookup()
    assert (
        dataset
        and dataset.path == pipeline.preparation_for(config).build().path == expected
    )
    assert (
        "no file matches" in caplog.text and "continues with its dataset" in caplog.text
    )
    shutil.rmtree(config.runtime.home / expected)
    with pytest.raises(DataError, match="no file matches"):
        pipeline.preparation_for(config).build()


def test_each_command_of_one_process_decides_where_to_resume(
    data, tmp_path, monkeypatch
):
    """As in a notebook; the tries of one command are one. The workers here end at once, without a word."""
    monkeypatch.setattr(
        local, "torchrun_command", lambda *_, **__: [sys.executable, "-c", ""]
    )
    runtime = {"name": "twice", "home": str(tmp_path), "resume": "never"}
    runtime |= {"retries": 1, "retry_delay": 0}
    sections = {"data": data(), "runtime": runtime, "environment": {"device": "cpu"}}
    config = PipelineConfig.model_validate(sections)
    folder = RunFolder(tmp_path / "runs" / "twice")
    with pytest.raises(TrainFailed, match="no worker started"):
        pipeline.run(config)
    first, second = read_attempts(folder)
    assert first.invocation == second.invocation
    add_checkpoint(folder.checkpoints, 10, 1.0)
    with pytest.raises(ConfigError, match=r"runtime\.resume=never, but"):
        pipeline.run(config)


RETRIES = """
from infini_llama.flows.pretrain import evaluate, export, pretrain
from infini_llama.tasks.patch_environment.task import patch_environment
from infini_llama.tasks.verify_data.task import verify_data
print([part.retries for part in (pretrain, evaluate, export, patch_environment, verify_data)])
"""


def test_retries_that_a_user_has_set_for_all_flows_and_tasks_are_not_those_of_a_run():
    defaults = {
        "PREFECT_FLOWS_DEFAULT_RETRIES": "2",
        "PREFECT_TASKS_DEFAULT_RETRIES": "2",
    }
    command = [sys.executable, "-c", RETRIES]
    done = subprocess.run(
        command,
        env=os.environ | defaults,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[0, 0, 0, 0, 0]\n"


def test_a_line_for_the_page_of_a_run_can_be_sent():
    """The name of a folder may be no UTF-8, and an error of a program may have colours."""
    record = logging.LogRecord(
        "infini_llama.train", logging.INFO, "", 0, "a \udcff \0 \x1b[31mred", (), None
    )
    assert ThrottledAPILogHandler().format(record) == r"a \udcff \x00 \x1b[31mred"


def test_lengths_that_hold_no_passkey_are_refused_before_training(begun):
    config, _ = begun
    dataset = pipeline.preparation_for(config).build()
    for lengths, is_refused in (([6, 4000], True), ([4000], False), ([], False)):
        evaluation = changed(
            config.evaluate, after_training=["passkey"], passkey_lengths=lengths
        )
        asked = changed(config, evaluate=evaluation)
        with pytest.raises(ConfigError) if is_refused else nullcontext():
            pipeline.refuse_short_passkeys(asked, dataset)


def test_a_measurement_that_fails_takes_no_export_along(begun, monkeypatch):
    config, _ = begun
    steps = []

    def stage(name, result=None, fault=None):
        def run(*_):
            steps.append(name)
            if fault:
                raise fault
            return result

        return run

    summary = SimpleNamespace(paths=SimpleNamespace(run=None))
    stages = pipeline.Stages(
        preprocess=stage("preprocess"),
        verify=stage("verify", SimpleNamespace(verify_on_read=False)),
        patch_environment=stage("environment"),
        train=stage("train", summary),
        evaluate=stage("evaluate", fault=DataError("no tokens")),
        export=stage("export"),
    )
    monkeypatch.setattr(pipeline, "finish", stage("finish"))
    dataset = pipeline.preparation_for(config).build()
    evaluation = changed(config.evaluate, after_training=["perplexity", "export"])
    asked = changed(config, evaluate=evaluation)
    with pytest.raises(DataError, match="no tokens"):
        pipeline.verify_and_train(asked, dataset, stages, "")
    assert steps == ["verify", "environment", "train", "evaluate", "export", "finish"]


@pytest.mark.parametrize("below", ["", "below"])
def test_a_home_folder_whose_disk_is_missing_is_not_made(tmp_path, below):
    (tmp_path / "workspace").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match="which does not exist; mount"):
        usable_home(tmp_path / "workspace" / below, "runtime.home")
