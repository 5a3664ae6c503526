"""The settings of one run: its name in full, and nothing of how it is offered; and what is one command."""

import time
from datetime import UTC, datetime
from pathlib import Path

from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import DeploymentConfig
from infini_llama.flows.naming import resolved, run_name


def test_a_run_name_contains_the_scheduled_local_time(monkeypatch):
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
    offered = {"deployment": {"concurrency_limit": 2}}
    settings = resolved(parse_config(config | offered), datetime(2026, 1, 2, 12))
    assert (settings.runtime.name, settings.runtime.home) == ("a-2026-01-02", Path(tmp_path, "here"))
    assert settings.deployment == DeploymentConfig()
