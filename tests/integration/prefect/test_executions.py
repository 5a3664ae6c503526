"""Executions of one flow run: by `run` and by `serve`, after Retry and Resume, and deleted."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.laboratory import COMMAND
from support.services import free_port

from .conftest import FINAL, Served, served_at, slow_settings


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    home = Path(os.path.realpath(tmp_path_factory.mktemp("served")))
    settings = slow_settings(home, max_steps=90, save_steps=20, eval_steps=90)
    with served_at(home, settings | {"deployment": {"concurrency_limit": 1}}) as house:
        yield house


def test_tasks_of_a_run_that_was_suspended_end_with_it(served):
    run = served.create_named("paused")
    for step in (20, 40, 60):
        served.wait_for_step("paused", step)
        served.suspend(run)
        served.wait(lambda: not served.processes_of_run("paused"), "its workers go on")
        served.post(f"flow_runs/{run}/resume")
    assert served.wait_for(run, *FINAL)["state_type"] == "COMPLETED"
    served.wait(lambda: set(served.states(run)) <= set(FINAL), f"{served.states(run)}")


def test_retry_within_a_second_of_crashed_is_not_undone(served):
    run = served.create_named("quick")
    served.wait_for_step("quick", 20)
    served.kill("flow")
    served.wait_for(run, "CRASHED")
    served.retry(run)
    served.wait_for_step("quick", 40)
    assert served.wait_for(run, *FINAL)["state_type"] == "COMPLETED", served.get(run)[
        "state"
    ]


def test_a_run_that_is_deleted_while_it_trains_saves_a_checkpoint_and_ends(served):
    run = served.create_named("deleted", max_steps=3000)
    served.wait_for_step("deleted", 20)
    address = f"{served.api}/flow_runs/{run}"
    httpx.delete(address, headers=served.headers(), timeout=60).raise_for_status()
    served.wait(lambda: not served.processes_of_run("deleted"), "its workers go on")
    served.wait(lambda: served.attempts("deleted"), "its attempt is not recorded")
    (attempt,) = served.attempts("deleted")
    assert attempt.kind == "preempted" and attempt.checkpoint_step == attempt.step
    log = served.home / "serve.log"
    served.wait(
        lambda: f"{run} was deleted" in log.read_text(), "serve does not say so"
    )
    following = served.create_named(
        "following", max_steps=10, train={"warmup_steps": 2}
    )
    assert served.wait_for(following, *FINAL)["state_type"] == "COMPLETED"


def assert_is_cancelled(served: Served, run: str, name: str) -> None:
    """Cancel the run, which then ends as cancelled, with a checkpoint of its last step."""
    state = {"type": "CANCELLING", "name": "Cancelling"}
    served.post(f"flow_runs/{run}/set_state", state=state)
    assert served.wait_for(run, *FINAL)["state_type"] == "CANCELLED"
    served.wait(lambda: not served.processes_of_run(name), "its workers go on")
    (attempt,) = served.attempts(name)
    assert attempt.kind == "preempted" and attempt.checkpoint_step == attempt.step
    served.wait(lambda: set(served.states(run)) <= set(FINAL), "its tasks are Running")


def test_a_run_of_the_command_line_is_cancelled_on_a_server(served):
    api = f"PREFECT_API_URL={served.api}"
    command = ("env", api, COMMAND, "run", str(served.config), "runtime.name=by-hand")
    process = served.begin("by-hand", *command, "train.max_steps=400")
    served.wait_for_step("by-hand", 20)
    (run,) = [run["id"] for run in served.runs() if run["name"] == "by-hand"]
    assert_is_cancelled(served, run, "by-hand")
    assert process.wait(60) == 75


def test_a_run_whose_worker_was_killed_is_cancelled(served):
    run = served.create_named("orphaned", max_steps=400)
    served.wait_for_step("orphaned", 20)
    served.kill("worker")
    assert_is_cancelled(served, run, "orphaned")


def test_a_name_with_the_time_is_kept_by_a_retry(served):
    run = served.create_named("named-{date}-{time}")
    served.wait(
        lambda: served.get(run)["name"].startswith("named-2"), "the run was not named"
    )
    name = served.get(run)["name"]
    served.wait_for_step(name, 20)
    served.kill("flow")
    served.wait_for(run, "CRASHED")
    time.sleep(2)
    served.retry(run)
    assert served.wait_for(run, *FINAL)["state_type"] == "COMPLETED", served.get(run)[
        "state"
    ]
    assert served.get(run)["name"] == name
    assert [attempt.from_step > 0 for attempt in served.attempts(name)] == [False, True]
    assert len(list((served.home / "runs").glob("named-*"))) == 1


def test_a_killed_run_is_crashed_by_the_next_command_on_its_database(served, tmp_path):
    """`run` with a server of its own; `serve` then shows its runs."""
    home = tmp_path / "home"
    home.mkdir()
    config = home / "small.yaml"
    config.write_text(served.config.read_text())
    other = Served(home, config, free_port(), "", variables=served.variables)
    command = (COMMAND, "run", str(config), "runtime.name=first")
    first = other.begin("first", *command)
    other.wait_for_step("first", 20)
    first.kill()
    first.wait(60)
    other.wait(lambda: not other.processes_of_run("first"), "its workers go on")
    (file,) = (home / "prefect" / "flow-runs").iterdir()
    second = other.begin("second", *command)
    assert second.wait(600) == 0, other.logs()
    assert "run first has lost its process" in (home / "second.log").read_text()
    try:
        other.serve()
        runs = {run["id"]: run["state_type"] for run in other.runs()}
        assert runs.pop(file.name) == "CRASHED"
        assert set(runs.values()) == {"COMPLETED"}
        other.wait(
            lambda: set(other.states(file.name)) <= set(FINAL), "its tasks are Running"
        )
    finally:
        other.end("serve")


def test_serve_logs_which_runs_of_earlier_executions_it_has_marked(served):
    run = served.create_named("marked")
    served.wait_for_step("marked", 20)
    served.kill("serve", "flow", "worker", "server")
    served.processes.pop("serve").wait(60)
    served.wait(lambda: not served.processes_of_run("marked"), "its workers go on")
    served.serve()
    assert served.state(run) == "CRASHED"
    log = (served.home / "serve.log").read_text()
    assert "run marked has lost its process" in log


def test_a_run_whose_deployment_is_deleted_completes(served):
    """While it holds a slot; this is the last test, since the deployment is gone."""
    run = served.create_named("undeployed", max_steps=150)
    served.wait_for_step("undeployed", 20)
    address = f"{served.api}/deployments/{served.deployment()['id']}"
    httpx.delete(address, headers=served.headers(), timeout=60).raise_for_status()
    assert served.wait_for(run, *FINAL)["state_type"] == "COMPLETED", served.get(run)[
        "state"
    ]
