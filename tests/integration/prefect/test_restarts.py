"""kill -9 of the server of `serve` before, during and after each state of a run: nothing is lost, and no state is left behind.

With `concurrency_limit: 1`, so that a slot that is not given back stops the next run, and with proxies in the environment that nothing
can use.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from .conftest import DEPLOY, FINAL, Served, served_at, slow_settings

PROXIES = {
    "ALL_PROXY": "socks://127.0.0.1:9/",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "internal.example",
}
SILENT_FOR = 100.0  # seconds, of the automation; a run sends a heartbeat every 30, and again when the server is back


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    home = Path(os.path.realpath(tmp_path_factory.mktemp("served")))
    settings = slow_settings(home, max_steps=60, save_steps=20, eval_steps=60)
    settings["deployment"] = {"concurrency_limit": 1}
    with served_at(home, settings, PROXIES) as house:
        command = [sys.executable, "-c", DEPLOY, str(house.config), str(SILENT_FOR)]
        variables = {
            name: value
            for name, value in house.environment().items()
            if name not in PROXIES
        }
        variables["PREFECT_API_URL"] = house.api
        subprocess.run(command, env=variables, cwd=home, check=True, timeout=120)
        yield house
        assert "Traceback" not in (home / "prefect" / "worker.log").read_text()


def restart(served: Served) -> None:
    """Kill the server, and wait until `serve` has started it again."""
    served.kill("server")
    served.wait(lambda: not served._answers(), "the server still answers")
    served.wait(served._answers, "the server is not started again")


def assert_at_rest(served: Served, run: str, state: str) -> None:
    """The run and its tasks end, and give their slot back."""
    ended = served.wait_for(run, *FINAL)
    assert ended["state_type"] == state, ended["state"]
    served.wait(lambda: set(served.states(run)) <= set(FINAL), f"{served.states(run)}")
    (limit,) = served.post("v2/concurrency_limits/filter")
    assert limit["active_slots"] == 0


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_a_run_completes(served, moment):
    """Before it starts: test_kill_matrix.py."""
    run = served.create_named(moment)
    if moment == "starting":
        served.wait_for(run, "RUNNING")
    else:
        served.wait_for_step(moment, 20)
    restart(served)
    if moment == "training":
        lease = served.get(run)["state"]["state_details"][
            "deployment_concurrency_lease_id"
        ]
        served.post(f"v2/concurrency_limits/leases/{lease}/renew", lease_duration=300)
    assert_at_rest(served, run, "COMPLETED")


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_suspended_run_stays_suspended_and_resumes(served, moment):
    name = f"suspended-{moment}"
    run = served.create_named(name, max_steps=2000)
    served.wait_for(run, "RUNNING")
    if moment == "before":
        restart(served)
    served.wait_for_step(name, 20)
    served.suspend(run)
    if moment == "after":
        served.wait(lambda: not served.processes_of_run(name), "its workers go on")
    if moment != "before":
        restart(served)
    served.wait(lambda: served.attempts(name), "training does not end")
    (attempt,) = served.attempts(name)
    assert attempt.kind == "preempted" and attempt.checkpoint_step == attempt.step
    time.sleep(SILENT_FOR + 30)  # nothing is to happen
    suspended = served.get(run)["state"]
    assert suspended["type"] == "PAUSED"
    later = datetime.now(UTC) + timedelta(days=29)
    assert datetime.fromisoformat(suspended["state_details"]["pause_timeout"]) > later
    served.post(f"flow_runs/{run}/resume")
    served.wait_for_step(name, attempt.step + 1)
    assert served.state(run) == "RUNNING"
    served.post(f"flow_runs/{run}/set_state", state={"type": "CANCELLING"})
    assert_at_rest(served, run, "CANCELLED")


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_failed_attempt_is_retried(served, moment):
    name = f"retried-{moment}"
    env = {"PYTHONPATH": str(served.home / "slow"), "FAULT": str(served.home / name)}
    run = served.create_named(
        name, environment={"env": env}, runtime={"retry_delay": 15}
    )
    served.wait_for_step(name, 20)
    if moment == "before":
        restart(served)
    served.wait(lambda: served.attempts(name), "the first attempt does not fail")
    if moment == "after":
        served.wait(lambda: served.processes_of_run(name), "there is no second attempt")
    if moment != "before":
        restart(served)
    assert_at_rest(served, run, "COMPLETED")
    assert [attempt.from_step for attempt in served.attempts(name)] == [0, 20]


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_cancelled_run_saves_a_checkpoint(served, moment):
    name = f"cancelled-{moment}"
    run = served.create_named(name, max_steps=2000)
    served.wait_for_step(name, 20)
    if moment == "before":
        restart(served)
    served.post(f"flow_runs/{run}/set_state", state={"type": "CANCELLING"})
    if moment == "after":
        served.wait(lambda: not served.processes_of_run(name), "its workers go on")
    if moment != "before":
        restart(served)
    assert_at_rest(served, run, "CANCELLED")
    (attempt,) = served.attempts(name)
    assert attempt.kind == "preempted" and attempt.checkpoint_step == attempt.step


@pytest.mark.parametrize("resuming", [False, True])
def test_a_pending_run_without_a_process_is_begun_by_the_next_worker(served, resuming):
    """Its worker is killed as well, which would have marked it."""
    name = f"lost-{resuming}"
    run = served.create_named(name, max_steps=60)
    if resuming:
        served.wait_for_step(name, 20)
        served.suspend(run)
        served.wait(lambda: not served.processes_of_run(name), "its workers go on")
        served.post(f"flow_runs/{run}/resume")
    served.wait_for(run, "PENDING")
    served.kill("worker")
    with contextlib.suppress(AssertionError):  # perhaps the worker had not started one
        served.kill("flow")
    assert served.state(run) == "PENDING"
    assert_at_rest(served, run, "COMPLETED")


def test_a_lease_outlives_its_server_and_the_slot_is_free_once_it_expires(served):
    """As that of a GPU, whose run was killed together with the server."""
    served.post("v2/concurrency_limits/", name="test-slot", limit=1)
    lease = served.post(
        "v2/concurrency_limits/increment-with-lease",
        slots=1,
        names=["test-slot"],
        lease_duration=60,
    )
    restart(served)
    served.post(
        f"v2/concurrency_limits/leases/{lease['lease_id']}/renew", lease_duration=60
    )
    restart(served)

    def occupied() -> int:
        return httpx.get(
            f"{served.api}/v2/concurrency_limits/test-slot", timeout=30
        ).json()["active_slots"]

    assert occupied() == 1
    served.wait(lambda: occupied() == 0, "the slot of an expired lease is not free")
    httpx.request(
        "DELETE",
        f"{served.api}/v2/concurrency_limits/test-slot",
        headers=served.headers(),
        timeout=30,
    ).raise_for_status()
