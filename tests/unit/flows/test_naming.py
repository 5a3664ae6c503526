"""The home folder, and what is resolved for one run: its full name and an absolute home."""

import json
import os
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import DeploymentConfig
from infini_llama.flows import naming, pipeline
from infini_llama.flows.cli.main import main
from infini_llama.flows.naming import config_of_run, find, home_folder, run_name


@pytest.fixture(params=["file", "file/below", "circle", os.fsdecode(b"l\xe9gal")])
def home(request, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    return str(tmp_path / request.param)


def test_a_home_that_is_a_file_is_a_wrong_setting(home, monkeypatch):
    with pytest.raises(ConfigError, match=r"runtime\.home"):
        config_of_run(
            parse_config(
                {"data": {"source": "python-stdlib"}, "runtime": {"home": home}}
            )
        )
    monkeypatch.setenv("INFINI_LLAMA_HOME", home)
    with pytest.raises(ConfigError, match="INFINI_LLAMA_HOME"):
        home_folder()


@pytest.mark.parametrize("place", ["units", "datasets", "locks"])
def test_a_broken_link_or_a_file_in_the_place_of_a_folder_is_a_wrong_setting(
    place, tmp_path, capsys
):
    """As where the disk that a link leads to is not mounted."""
    (tmp_path / "text.txt").write_text("one two three\n" * 50)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / place).symlink_to(tmp_path / "not" / "mounted")
    (tmp_path / "my.yaml").write_text(f"data: {{files: [{tmp_path / 'text.txt'}]}}")
    assert (
        main(
            [
                "preprocess",
                str(tmp_path / "my.yaml"),
                f"runtime.home={tmp_path / 'home'}",
                "--json",
            ]
        )
        == 64
    )
    assert str(tmp_path / "home" / place) in capsys.readouterr().err


def test_a_missing_home_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(tmp_path / "new" / "home"))
    assert home_folder() == tmp_path / "new" / "home"


def test_latest_is_the_dataset_that_was_used_last_where_no_link_could_be_made(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(tmp_path))
    for age, name in enumerate(("incomplete", "newest", "older")):
        folder = tmp_path / "datasets" / name
        folder.mkdir(parents=True)
        if name != "incomplete":
            (folder / "manifest.json").touch()
        os.utime(folder, (1e9 - age, 1e9 - age))
    for path in ("latest", str(tmp_path / "datasets" / "latest")):
        assert find(path, "runs", "datasets") == tmp_path / "datasets" / "newest"
    (tmp_path / "datasets" / "latest").symlink_to("older")
    assert find("latest", "runs", "datasets") == tmp_path / "datasets" / "older"
    with pytest.raises(ConfigError, match="latest"):
        find("latest", "runs")


def test_a_run_name_contains_the_time_in_the_zone_of_the_schedule():
    due = datetime(2026, 11, 21, 23, 30, 5, tzinfo=UTC).astimezone(
        timezone(timedelta(hours=9))
    )
    assert run_name("nightly-{date}-{time}", due) == "nightly-2026-11-22-083005"
    assert run_name("plain", due) == "plain"


def test_a_command_gives_its_run_one_time_however_often_it_needs_the_name(
    tmp_path, monkeypatch, capsys
):
    class Clock(datetime):
        """Each look is a second later."""

        looks = 0

        @classmethod
        def now(cls, tz=None):
            cls.looks += 1
            return datetime(2026, 1, 2, 12, 0, cls.looks)

    def refuse(config):
        raise ConfigError(f"the run is {config.runtime.name}")

    monkeypatch.setattr(naming, "datetime", Clock)
    monkeypatch.setattr(pipeline, "refuse_blocks", refuse)
    config = {
        "data": {"source": "python-stdlib"},
        "runtime": {"name": "a-{time}", "home": str(tmp_path)},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        main(["run", str(tmp_path / "config.json"), "--no-prefect"])
        == ConfigError.exit_code
    )
    assert "the run is a-120001" in capsys.readouterr().err


def test_the_settings_of_a_run_hold_no_deployment_and_absolute_paths(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = {
        "data": {"source": "python-stdlib"},
        "runtime": {"name": "a-{date}", "home": "here"},
    }
    offered = {"deployment": {"concurrency_limit": 2}}
    settings = config_of_run(parse_config(config | offered), datetime(2026, 1, 2, 12))
    assert (settings.runtime.name, settings.runtime.home) == (
        "a-2026-01-02",
        Path(tmp_path, "here"),
    )
    assert settings.deployment == DeploymentConfig()
    for resume, absolute in (
        ("best", "best"),
        ("a/latest", str(tmp_path / "a/latest")),
    ):
        followed = parse_config(
            {"data": config["data"], "runtime": {"home": "here", "resume": resume}}
        )
        assert config_of_run(followed).runtime.resume == absolute


def test_a_tilde_is_the_users_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = {"data": {"source": "python-stdlib"}}
    runtime = config_of_run(
        parse_config(data | {"runtime": {"home": "~/mine", "resume": "~/checkpoint"}})
    ).runtime
    assert (runtime.home, runtime.resume) == (
        tmp_path / "mine",
        str(tmp_path / "checkpoint"),
    )
    monkeypatch.setenv("INFINI_LLAMA_HOME", "~/other")
    assert (
        home_folder()
        == config_of_run(parse_config(data)).runtime.home
        == tmp_path / "other"
    )
    monkeypatch.setenv("INFINI_LLAMA_HOME", "~no-such-user/other")
    with pytest.raises(ConfigError, match="INFINI_LLAMA_HOME"):
        home_folder()


@pytest.mark.parametrize(
    ("variables", "refused"), [({"JOB_COMPLETION_INDEX": "1"}, True), ({}, False)]
)
def test_a_name_with_the_time_is_refused_where_each_node_runs_the_command(
    monkeypatch, variables, refused
):
    """By hand, the others join by the name that node 0 prints."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sections = {
        "data": {"source": "python-stdlib"},
        "environment": {"nnodes": 2},
        "runtime": {"name": "run-{date}"},
    }
    with (
        pytest.raises(ConfigError, match=r"runtime\.name=run-\{date\}")
        if refused
        else nullcontext()
    ):
        config_of_run(parse_config(sections))


def test_a_batch_that_does_not_fit_the_nodes_of_the_scheduler_is_named(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    sections = {
        "data": {"source": "python-stdlib"},
        "train": {"global_batch_size": 8, "micro_batch_size": 8},
        "environment": {"nproc_per_node": 1},
    }
    with pytest.raises(
        ConfigError, match=r"scheduler.*train\.global_batch_size=8.*nnodes=2"
    ):
        config_of_run(parse_config(sections))
