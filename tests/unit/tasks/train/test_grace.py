"""The grace period grows with what saves take."""

import json
import socket

from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.records.metrics import TrainLine
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train import stopping
from infini_llama.tasks.train.launch import TorchrunWorkers
from infini_llama.tasks.train.stopping import (
    grace_period,
    notify_systemd,
    stop_seconds,
    stop_workers,
)
from support.records import make_attempt, make_plan

STEP = {
    "kind": "train",
    "step": 1,
    "step_time": 2.0,
    "save_time": 0.0,
    "save_write_time": 0.0,
}
SAVED = STEP | {"step": 2, "save_time": 4.0, "save_write_time": 10.0}


def run_with(tmp_path, *records) -> RunFolder:
    run = RunFolder(tmp_path)
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_the_configured_grace_period_holds_until_a_longer_one_is_measured(tmp_path):
    runtime = RuntimeConfig(grace_period=25.0)
    assert grace_period(RunFolder(tmp_path), runtime) == 25.0
    assert grace_period(run_with(tmp_path, STEP), runtime) == 25.0
    measured = grace_period(run_with(tmp_path, STEP, SAVED), runtime)
    assert (
        measured
        == stop_seconds([TrainLine.model_validate(SAVED)])
        == 1.5 * (2 + 4 + 20)
    )


def test_systemds_stop_timeout_is_extended(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_systemd(39.0)
        assert systemd.recv(200) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=44000000"


class Interrupted(TorchrunWorkers):
    """Workers whose stop is interrupted by each of `requests` in turn, and then succeeds."""

    def __init__(self, *requests: BaseException) -> None:
        object.__setattr__(self, "requests", list(requests))

    def request_stop(self) -> None:
        if self.requests:
            raise self.requests.pop(0)

    def end_within(self, grace_period: float) -> None:
        pass


def test_a_request_to_stop_that_comes_while_a_fault_stops_the_workers_is_kept(
    tmp_path, monkeypatch
):
    attempt = make_attempt(
        tmp_path, parse_config({"data": {"source": "python-stdlib"}}), plan=make_plan()
    )
    first, second = KeyboardInterrupt(), KeyboardInterrupt()
    assert stop_workers(attempt, Interrupted()) is None
    # Within a second: one request, for which the workers still save.
    repeated = Interrupted(first, second)
    assert stop_workers(attempt, repeated) is first and not repeated.requests
    monkeypatch.setattr(stopping, "ONE_REQUEST_SECONDS", -1.0)
    ended = Interrupted(first, second, KeyboardInterrupt())
    assert stop_workers(attempt, ended) is first and len(ended.requests) == 1
    again = Interrupted(second, KeyboardInterrupt())
    assert stop_workers(attempt, again, first) is first and len(again.requests) == 1


class Recorded(TorchrunWorkers):
    """Workers that write down what is called."""

    def __init__(self, calls: list[str]) -> None:
        object.__setattr__(self, "calls", calls)

    def request_stop(self) -> None:
        self.calls.append("request_stop")

    def end_within(self, grace_period: float) -> None:
        self.calls.append(f"end_within {grace_period:g}")


def test_the_workers_are_asked_before_the_metrics_of_a_long_run_are_read(
    tmp_path, monkeypatch
):
    """These take 36 microseconds per step: after half a million steps, most of a pod's grace period."""
    calls: list[str] = []

    def read(run: RunFolder) -> list[TrainLine]:
        calls.append("read_metrics")
        return [TrainLine.model_validate(SAVED)]

    monkeypatch.setattr(stopping, "read_metrics", read)
    attempt = make_attempt(
        tmp_path, parse_config({"data": {"source": "python-stdlib"}}), plan=make_plan()
    )
    stop_workers(attempt, Recorded(calls))
    assert calls == ["request_stop", "read_metrics", "end_within 39"]
