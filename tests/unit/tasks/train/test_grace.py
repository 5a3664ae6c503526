"""The grace period grows with what saves take, and what cannot fit is refused with the key."""

import json
import socket

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.records.metrics import TrainLine
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.grace import grace_period, needed, request_time_to_stop

STEP = {"kind": "train", "step": 1, "step_time": 2.0, "save_time": 0.0, "save_write_time": 0.0}
SAVED = STEP | {"step": 2, "save_time": 4.0, "save_write_time": 10.0}


def run_with(tmp_path, *records) -> RunFolder:
    run = RunFolder(tmp_path)
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def limits(own: float, orchestrator: float | None) -> RuntimeConfig:
    return RuntimeConfig(grace_period=own, orchestrator_grace=orchestrator)


def test_the_configured_timeout_holds_until_a_longer_one_is_measured(tmp_path):
    assert grace_period(RunFolder(tmp_path), limits(25.0, None)) == 25.0
    assert grace_period(run_with(tmp_path, STEP), limits(25.0, None)) == 25.0
    assert (
        grace_period(run_with(tmp_path, STEP, SAVED), limits(25.0, None))
        == needed([TrainLine.model_validate(SAVED)])
        == 1.5 * (2 + 4 + 20)
    )


def test_a_shorter_grace_period_of_the_orchestrator_is_refused(tmp_path):
    run = run_with(tmp_path, STEP, SAVED)
    assert grace_period(run, limits(25.0, 44.0)) == 39.0
    with pytest.raises(ConfigError, match=r"runtime\.orchestrator_grace=43.* 39 s.* 44 s"):
        grace_period(run, limits(25.0, 43.0))
    assert grace_period(run_with(tmp_path, STEP), limits(25.0, 20.0)) == 15.0, "less than wished, more than needed"


def test_systemds_stop_timeout_is_read(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        request_time_to_stop(39.0)
        assert systemd.recv(200) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=44000000"
