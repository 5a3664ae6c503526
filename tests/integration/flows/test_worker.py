"""The worker of `serve`: what it starts for a run, and what it logs of a server that is gone."""

import asyncio
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.workers.base import BaseWorker
from prefect.workers.process import ProcessWorker

from infini_llama.flows.executions import FOLDER
from infini_llama.flows.workarounds import worker


@pytest.mark.parametrize(
    ("command", "started"),
    [
        (None, f"{sys.executable} -m infini_llama.flows.workarounds.engine"),
        ("own", "own"),
    ],
)
def test_prefects_command_starts_runs_by_our_engine(command, started):
    assert BaseWorker.get_worker_class_from_type("process") is worker.Worker
    configuration = worker.Worker.job_configuration(command=command)
    configuration.prepare_for_flow_run(FlowRun(flow_id=uuid4()))
    assert configuration.command == started


@pytest.mark.parametrize(
    ("error", "lines"), [(httpx.ConnectError("refused"), 1), (ValueError("a fault"), 4)]
)
def test_a_lost_connection_is_logged_in_one_line(error, lines):
    record = worker.BriefRecord(
        "a",
        logging.ERROR,
        "f.py",
        1,
        "it failed %s",
        ("again",),
        (type(error), error, None),
    )
    text = logging.Formatter().format(record)
    assert text.startswith("it failed again") and str(error) in text
    assert ("\n" in text) == (lines > 1)


GIVING_UP = """
import asyncio
from infini_llama.flows.workarounds.worker import Worker
fault = RuntimeError("Service exceeded error threshold.")
asyncio.run(Worker("infini-llama").teardown(RuntimeError, fault, None))
"""


def test_a_worker_that_gives_up_ends_without_the_end_of_its_runs(tmp_path):
    command = [sys.executable, "-c", GIVING_UP]
    environment = os.environ | {"PREFECT_HOME": str(tmp_path)}
    assert subprocess.run(command, env=environment, check=False).returncode == 70


@pytest.fixture
def proposed(monkeypatch, tmp_path) -> list[str]:
    """States that the worker has proposed for its run."""
    states: list[str] = []

    async def crashed(
        self: object, flow_run: FlowRun, message: str, client: object
    ) -> None:
        states.append("Crashed")

    async def set_state(run: UUID, state: State, force: bool) -> None:
        states.append(state.name or "")

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(ProcessWorker, "_propose_crashed_state", crashed)
    client = SimpleNamespace(set_flow_run_state=set_state)
    monkeypatch.setattr(worker.Worker, "client", client)
    return states


def report(process: worker.Worker, run: FlowRun, error: Exception) -> None:
    async def submit() -> None:
        try:
            raise error
        except Exception:
            await process._propose_crashed_state(run, "Failed to submit")

    asyncio.run(submit())


def test_a_run_that_a_lost_connection_kept_from_starting_is_submitted_again(proposed):
    process = worker.Worker(work_pool_name="pool")
    report(process, FlowRun(flow_id=uuid4()), httpx.ConnectError("refused"))
    assert proposed == ["Scheduled"]
    report(process, FlowRun(flow_id=uuid4()), ValueError("a wrong job variable"))
    assert proposed == ["Scheduled", "Crashed"]


def test_the_end_of_a_process_is_reported_once(proposed, monkeypatch):
    """By Prefect's executor; the worker's own report would end what Retry has started."""
    process = worker.Worker(work_pool_name="pool")
    run = FlowRun(flow_id=uuid4())

    async def ended(self: object, flow_run: FlowRun) -> SimpleNamespace:
        return SimpleNamespace(status_code=-9)

    monkeypatch.setattr(ProcessWorker, "run", ended)
    assert asyncio.run(process.run(run)).status_code == -9
    report(process, run, ValueError("exited with non-zero status code -9"))
    assert proposed == []
    report(process, run, ValueError("Failed to submit"))
    assert proposed == ["Crashed"]
