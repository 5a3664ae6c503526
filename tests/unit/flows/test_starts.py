"""A name with {date} or {time} belongs to one start, which a retry and a requeue of its job continue."""

import json
import logging
from datetime import datetime
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows import naming, starts
from infini_llama.flows.starts import Start, start_of_command
from infini_llama.tasks.runs.mirror import Mirror, _records
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.start_records import StartRecord
from infini_llama.tasks.storage.record_files import write_record

FIRST = "train-2026-11-21-235900"
LATER = "train-2026-11-22-001000"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that stands still until a test changes it."""

    class Clock(datetime):
        moment = datetime(2026, 11, 21, 23, 59)

        @classmethod
        def now(cls, tz=None):
            return cls.moment

    monkeypatch.setattr(naming, "datetime", Clock)
    return Clock


@pytest.fixture
def config(tmp_path) -> PipelineConfig:
    runtime = {"name": "train-{date}-{time}", "home": str(tmp_path)}
    return parse_config({"data": {"source": "python-stdlib"}, "runtime": runtime})


def of_job(number: str, requeues: int | None = None) -> dict[str, str]:
    restarts = {} if requeues is None else {"SLURM_RESTART_COUNT": str(requeues)}
    return {"SLURM_JOB_ID": number} | restarts


def name_of(config: PipelineConfig, variables: dict[str, str]) -> str:
    start = start_of_command(config, variables)
    return start.claim(config).runtime.name


def finish(home: Path, name: str) -> None:
    (home / "runs" / name / "result.json").write_text("{}")


def test_a_requeued_job_continues_its_run_on_another_day(config, clock):
    assert name_of(config, of_job("7")) == FIRST
    clock.moment = datetime(2026, 11, 22, 0, 10)
    assert name_of(config, of_job("7", 1)) == FIRST
    assert name_of(config, of_job("8")) == LATER


def test_a_requeued_job_reports_what_it_has_finished(config, tmp_path):
    """Of several commands of a job, those before the one that was interrupted are finished."""
    other = parse_config(config.model_dump(mode="json") | {"train": {"seed": 7}})
    assert name_of(config, of_job("7")) == FIRST
    finish(tmp_path, FIRST)
    assert name_of(other, of_job("7")) == f"{FIRST}-2"
    assert name_of(config, of_job("7", 1)) == FIRST
    assert name_of(other, of_job("7", 1)) == f"{FIRST}-2"


def test_a_finished_command_that_a_job_executes_again_is_a_new_start(config, tmp_path):
    """As in an allocation of `salloc`, in which a person repeats a command."""
    assert name_of(config, of_job("7")) == FIRST
    assert name_of(config, of_job("7")) == FIRST, "it was not finished"
    finish(tmp_path, FIRST)
    assert name_of(config, of_job("7")) == f"{FIRST}-2"


def test_jobs_of_two_clusters_with_one_number_are_two_starts(config):
    names = {
        name_of(config, of_job("7") | {"SLURM_CLUSTER_NAME": name})
        for name in ("a", "b")
    }
    assert names == {FIRST, f"{FIRST}-2"}


def test_a_requeued_job_with_other_settings_begins_anew_with_a_warning(config, caplog):
    other = parse_config(config.model_dump(mode="json") | {"train": {"seed": 7}})
    assert name_of(config, of_job("7")) == FIRST
    with caplog.at_level(logging.WARNING):
        assert name_of(other, of_job("7", 1)) == f"{FIRST}-2"
    assert f"runtime.name={FIRST}" in caplog.text and "requeued" in caplog.text


def test_two_starts_of_one_second_have_a_folder_each(config, tmp_path, caplog):
    names = [name_of(config, {}) for _ in range(3)]
    assert names == [FIRST, f"{FIRST}-2", f"{FIRST}-3"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
    assert f"run {FIRST} belongs to another start" in caplog.text


def test_a_name_that_is_written_out_is_shared_by_all_starts(config, tmp_path):
    runtime = {"name": "train", "home": str(tmp_path)}
    config = parse_config({"data": {"source": "python-stdlib"}, "runtime": runtime})
    assert {name_of(config, variables) for variables in ({}, {}, of_job("7"))} == {
        "train"
    }
    assert not (tmp_path / "starts").exists()


def test_executions_of_a_flow_run_have_one_name(config, tmp_path, clock):
    run = Start(id="9b1c", due=datetime(2026, 11, 21, 2))
    assert run.claim(config).runtime.name == "train-2026-11-21-020000"
    finish(tmp_path, "train-2026-11-21-020000")
    retried = Start(id="9b1c", due=datetime(2026, 11, 22, 9))
    assert retried.claim(config, is_dry=True).runtime.name == "train-2026-11-21-020000"
    assert retried.claim(config).runtime.name == "train-2026-11-21-020000"


class Killed(BaseException):
    """The end of a process in the middle of a start."""


@pytest.mark.parametrize("has_record", [False, True])
def test_a_start_that_is_killed_while_it_takes_its_name_keeps_it(
    config, monkeypatch, has_record
):
    """It is killed where it writes its record: before that, or after it."""

    def kill(file: Path, record: StartRecord) -> None:
        if has_record:
            write_record(file, record)
        raise Killed

    killed = Start(id="9b1c")
    with monkeypatch.context() as patch:
        patch.setattr(starts, "write_record", kill)
        with pytest.raises(Killed):
            killed.claim(config)
    if has_record:
        other = Start(id="77aa")
        assert other.claim(config, is_dry=True).runtime.name == f"{FIRST}-2"
        assert other.claim(config).runtime.name == f"{FIRST}-2"
    assert killed.claim(config).runtime.name == FIRST


def test_a_dry_run_claims_nothing(config, tmp_path):
    start = start_of_command(config, of_job("7"))
    assert start.claim(config, is_dry=True).runtime.name == FIRST
    assert not (tmp_path / "runs").exists() and not (tmp_path / "starts").exists()
    assert start.claim(config).runtime.name == FIRST
    other = start_of_command(config, of_job("8"))
    assert other.claim(config, is_dry=True).runtime.name == f"{FIRST}-2"


def test_a_damaged_record_of_a_start_is_reported_and_replaced(config, tmp_path, caplog):
    assert name_of(config, of_job("7")) == FIRST
    (file,) = (tmp_path / "starts").iterdir()
    file.write_text("{")
    assert name_of(config, of_job("7", 1)) == f"{FIRST}-2"
    assert str(file) in caplog.text
    assert json.loads(file.read_text())["name"] == f"{FIRST}-2"


def test_a_requeued_job_on_an_empty_machine_continues_the_run_of_the_mirror(tmp_path):
    """The name of a run in the mirror is taken by no other start."""

    def on(machine: str) -> PipelineConfig:
        return parse_config(
            {
                "data": {"source": "python-stdlib"},
                "runtime": {"name": "train-{date}", "home": str(tmp_path / machine)},
                "storage": {"mirror": str(tmp_path / "mirror")},
            }
        )

    first = on("a")
    assert name_of(first, of_job("7")) == "train-2026-11-21"
    run = RunFolder(tmp_path / "a" / "runs" / "train-2026-11-21")
    run.lineage.write_text("{}")
    _records(Mirror(str(tmp_path / "mirror"), tmp_path / "a"), run)
    assert name_of(on("b"), of_job("8")) == "train-2026-11-21-2"
    start = start_of_command(first, of_job("7", 1))
    assert start.claim(on("b")).runtime.name == "train-2026-11-21"


def test_a_count_of_requeues_that_is_no_number_is_refused_by_name(config):
    with pytest.raises(ConfigError, match="SLURM_RESTART_COUNT=once"):
        start_of_command(config, of_job("7") | {"SLURM_RESTART_COUNT": "once"})
