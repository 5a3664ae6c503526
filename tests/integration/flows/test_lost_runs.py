"""Runs that the server calls Running although no process executes them."""

import os
import subprocess
import sys
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.states import Running

from infini_llama.flows.lost_runs import LostRuns, executed_runs


class Client:
    """Answers with runs, and records the states that are set."""

    def __init__(self, *runs: SimpleNamespace) -> None:
        self.runs, self.states = runs, {}

    def read_flow_runs(self, **_):
        return [*self.runs]

    def read_task_runs(self, **_):
        return []

    def set_flow_run_state(self, run, state, **_):
        self.states[run] = state.type.value


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_only_a_run_without_a_process_in_two_looks_is_crashed():
    alive, lost, ended = (SimpleNamespace(id=uuid4(), name="a", state=Running()) for _ in range(3))
    environment = os.environ | {"PREFECT__FLOW_RUN_ID": str(alive.id)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        assert alive.id in executed_runs()
        client, runs = Client(alive, lost, ended), LostRuns()
        runs.mark(client)
        assert client.states == {}
        client.runs = (alive, lost)  # the third one has reported its end meanwhile
        runs.mark(client)
        assert client.states == {lost.id: "CRASHED"}
        assert process.stdin
        process.stdin.close()
