"""The settings of one run: its name in full, and nothing of how it is offered; and what is one command."""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, TrainFailed
from infini_llama.configs.loading import parse_config
from infini_llama.flows import pipeline
from infini_llama.flows.pipeline import resolved, run_name
from infini_llama.tasks.runs.run_folder import RunFolder, attempts
from infini_llama.tasks.train import launch as local
from support.made_up_runs import add_checkpoint


def test_a_name_tells_when_the_run_was_due_in_this_machines_time_zone(monkeypatch):
    due = datetime(2026, 11, 21, 23, 30, 5, tzinfo=UTC)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert run_name("nightly-{date}-{time}", due) == "nightly-2026-11-22-083005"
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
    assert run_name("plain", due) == "plain"


def test_the_settings_of_a_run_hold_no_deployment_and_an_absolute_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"data": {"source": "python-stdlib"}, "runtime": {"name": "a-{date}", "home": "here"}}
    settings = resolved(parse_config(config), datetime(2026, 1, 2, 12))
    assert settings["runtime"] | {"name": "a-2026-01-02", "home": str(Path(tmp_path, "here"))} == settings["runtime"]
    assert "deployment" not in settings


def test_where_to_start_is_ruled_anew_by_each_command_of_one_process(tmp_path, monkeypatch):
    """As in a notebook; the tries of one command are one. The workers here end at once, without a word."""
    monkeypatch.setattr(local, "torchrun", lambda order_path, plan, where: [sys.executable, "-c", ""])
    (tmp_path / "text").mkdir()
    for number in range(8):
        words = f"Text {number}, of a few words, again and again.\n" * 20
        (tmp_path / "text" / f"{number}.txt").write_text(words, encoding="utf-8")
    data = {"files": [f"{tmp_path}/text/*.txt"], "validation_fraction": 0.25, "sequence_length": 16, "device": "cpu"}
    settings = {
        "data": data | {"tokenizer": {"vocab_size": 300}},
        "runtime": {"name": "twice", "home": str(tmp_path), "resume": "never", "retries": 1, "retry_delay": 0},
        "environment": {"device": "cpu"},
    }
    folder = RunFolder(tmp_path / "runs" / "twice")
    with pytest.raises(TrainFailed, match="no worker started"):
        pipeline.run(parse_config(settings))
    first, second = attempts(folder)
    assert first.invocation == second.invocation
    add_checkpoint(folder, 10, 1.0)
    with pytest.raises(ConfigError, match=r"runtime\.resume=never, but"):
        pipeline.run(parse_config(settings))
