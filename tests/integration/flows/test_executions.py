"""A flow run that is cancelled on the server, without a worker that stops its process."""

import json
import subprocess
import sys

import pytest

from support.laboratory import own_environment

# A flow that is cancelled in its first second, in three ways.
CANCELLED = """
import json, os, signal, sys, threading, time
from pathlib import Path
from uuid import UUID

from infini_llama.flows.server import api_for_run

home = Path(sys.argv[1])
with api_for_run(home):
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.exceptions import TerminationSignal
    from prefect.runtime import flow_run
    from prefect.states import State

    from infini_llama.flows import executions
    from infini_llama.tasks.runs.lost_requests import no_request_lost

    executions.POLL_SECONDS = 0.3
    requests = []
    runs = []

    class Stopped(BaseException):
        pass

    def stop(number, frame):
        raise Stopped

    def wait():
        try:
            time.sleep(20)
        except TerminationSignal:
            requests.append("first")
            try:
                time.sleep(4)  # the checkpoint is saved
            except TerminationSignal:
                requests.append("second")
            raise

    @flow
    def train(states, is_stopped_by_worker):
        runs.append(UUID(flow_run.id))
        with no_request_lost(TerminationSignal), executions.execution(home):
            with get_client(sync_client=True) as client:
                for name in states:
                    state = State(type=name.upper(), name=name)
                    client.set_flow_run_state(runs[-1], state, force=True)
            if is_stopped_by_worker:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            wait()

    def ending(states, is_stopped_by_worker=False):
        requests.clear()
        end = "returned"
        try:
            train(states, is_stopped_by_worker)
        except Stopped:
            end = "stopped"
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(runs[-1]).state
        return {"end": end, "state": state.name, "requests": list(requests)}

    signal.signal(signal.SIGTERM, stop)
    endings = {
        "cancelling": ending(["Cancelling"]),
        "cancelled": ending(["Cancelling", "Cancelled"]),
        "by worker": ending(["Cancelling"], is_stopped_by_worker=True),
    }
    print(json.dumps(endings))
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory) -> dict[str, dict]:
    """How the flow of CANCELLED has ended."""
    home = tmp_path_factory.mktemp("cancelled")
    done = subprocess.run(
        [sys.executable, "-c", CANCELLED, str(home)],
        env=own_environment(home),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("state", ["cancelling", "cancelled"])
def test_a_cancelled_run_without_a_worker_is_stopped_once(endings, state):
    """The server itself sets Cancelled where nothing answers to Cancelling."""
    stopped = {"end": "stopped", "state": "Cancelled", "requests": ["first"]}
    assert endings[state] == stopped


def test_a_run_that_its_worker_stops_gets_no_second_request(endings):
    assert endings["by worker"]["requests"] == ["first"]
