"""What happens to a run on the server: crash and retry, cancel, suspend and resume, a server and a worker that go away."""

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from support.laboratory import ONE_FAULT, inject, processes_of

from .conftest import DEPLOY

LONG = ("train.max_steps=6000", "train.save_steps=20", "train.eval_steps=3000")
FAULT = ONE_FAULT.format(before="")


@pytest.mark.parametrize("by", ["page", "command"])
def test_retry_of_a_failed_run_continues_from_its_checkpoint(
    house, request, tmp_path, by
):
    name = f"retried-by-{by}"
    browser = request.getfixturevalue("browser") if by == "page" else None
    fault = inject(tmp_path, "infini_llama.tasks.train.worker.trainer", FAULT)
    run = house.submit(name, "runtime.retries=0", fault)
    assert (
        house.wait_for(run, "FAILED", "CRASHED", "COMPLETED")["state_type"] == "FAILED"
    )
    assert house.attempts(name)[0].kind == "failed"
    assert "training-small" in house.artifacts(run), "a failed run has its card too"
    if browser is None:
        house.cli("flow-run", "retry", run)
    else:
        browser.open(house.page(f"runs/flow-run/{run}"))
        browser.click("button", "Retry")
        browser.wait_for("Retry", 10)
        browser.click("[role=dialog] button, .p-modal button", "Retry")
    assert house.wait_for(run, "COMPLETED", "CRASHED")["state_type"] == "COMPLETED"
    assert [attempt.from_step for attempt in house.attempts(name)] == [0, 20]
    assert house.step(name) == 60 and not house.processes_of_run(name)
    assert house.get(run)["run_count"] == 2


@pytest.mark.parametrize("by", ["page", "command"])
def test_cancel_leaves_a_checkpoint_the_state_and_nothing_running(house, request, by):
    name = f"cancelled-by-{by}"
    browser = request.getfixturevalue("browser") if by == "page" else None
    run = house.submit(name, *LONG)
    house.wait_for_step(name, 20)
    if browser is None:
        house.cli("flow-run", "cancel", run)
    else:
        browser.open(house.page(f"runs/flow-run/{run}"))
        browser.click("button", "Cancel")
        browser.click("[role=dialog] button, .p-modal button", "Confirm")
    assert (
        house.wait_for(run, "CANCELLED", "CRASHED", "FAILED", "COMPLETED")["state_type"]
        == "CANCELLED"
    )
    assert not house.processes_of_run(name)
    (attempt,) = house.attempts(name)
    assert (
        attempt.kind == "preempted"
        and attempt.step == attempt.checkpoint_step == house.step(name)
    )


def assert_continues(house, run: str, name: str) -> None:
    """Resume a suspended run: its second attempt starts at the step of the first one's end. The run is then cancelled."""
    house.post(f"flow_runs/{run}/resume")
    house.wait(
        lambda: len(list((house.home / f"runs/{name}/logs").glob("attempt-*"))) == 2,
        "it does not go on",
    )
    first = house.attempts(name)[0].step
    house.wait_for_step(name, first + 1)
    house.cli("flow-run", "cancel", run)
    house.wait_for(run, "CANCELLED")
    assert house.attempts(name)[1].from_step == first


def workers(house) -> set[int]:
    return {
        pid
        for pid, command in processes_of(house.marker).items()
        if "worker start" in command
    }


@pytest.mark.parametrize("by", ["serve", "prefect"])
def test_a_run_resumed_while_it_ends_continues_and_the_worker_stays(house, by):
    name = f"resumed-by-{by}"
    if by == "prefect":  # without a limit, as the files in deploy/ start it
        house.end("serve")
        start = (
            sys.executable,
            "-m",
            "prefect",
            "worker",
            "start",
            "--pool",
            "infini-llama",
            "--type",
            "process",
        )
        house.begin("worker", *start)
        house.wait(lambda: workers(house), "no worker")
    before = workers(house)
    run = house.submit(name, *LONG)
    house.wait_for_step(name, 20)
    house.suspend(run)
    house.wait(lambda: house.attempts(name), "training does not end")
    assert [
        command
        for command in processes_of(house.marker).values()
        if ".engine" in command
    ], "still ending"
    assert_continues(house, run, name)
    assert workers(house) == before, "a worker has exited"
    if by == "prefect":
        house.end("worker")
        house.begin_worker()


def test_a_suspended_run_ends_with_a_checkpoint_and_resumes(house):
    run = house.submit("suspended", *LONG, "runtime.resume=never")
    house.wait_for_step("suspended", 20)
    later = datetime.now(UTC) + timedelta(days=1)
    house.suspend(run)
    house.wait(lambda: not house.processes_of_run("suspended"), "its workers go on")
    house.wait(
        lambda: house.attempts("suspended"), "how they ended is not written down"
    )
    (attempt,) = house.attempts("suspended")
    assert attempt.kind == "preempted" and attempt.checkpoint_step == attempt.step
    assert house.state(run) == "PAUSED"
    house.wait(lambda: "RUNNING" not in house.tasks(run), "the task is left Running")
    assert (
        datetime.fromisoformat(
            house.get(run)["state"]["state_details"]["pause_timeout"]
        )
        > later
    )
    assert_continues(house, run, "suspended")


def test_ctrl_c_ends_everything_cancels_runs_and_pauses_nothing(house):
    run = house.submit("at-the-end", *LONG)
    house.wait_for_step("at-the-end", 20)
    house.end("serve")
    assert house.state(run) == "CANCELLED"
    assert not house.processes_of_run("at-the-end")
    assert not [
        command
        for command in processes_of(house.marker).values()
        if "worker start" in command
    ]
    deployment = house.deployment()
    assert (
        not deployment["paused"]
        and [one["active"] for one in deployment["schedules"]].count(True) == 1
    )
    house.begin_worker()


def test_a_silent_run_is_marked_as_crashed(house):
    house.call(sys.executable, "-c", DEPLOY, str(house.config), "35")
    run = house.submit("silent", *LONG)
    house.wait_for_step("silent", 20)
    # The machine is gone, as far as the server can tell.
    flow = [
        pid
        for pid, command in processes_of(house.marker).items()
        if ".engine" in command
    ]
    for pid in flow:
        os.kill(pid, signal.SIGSTOP)
    try:
        ended = house.wait_for(run, "CRASHED", "COMPLETED")
    finally:
        for pid in flow:
            os.kill(pid, signal.SIGCONT)
    assert "No heartbeat" in json.dumps(ended["state"])


def test_a_silent_run_of_another_program_is_left_alone(house):
    """Its flow has the name of ours; it is silent for longer than a run of ours that is ended."""
    house.call(sys.executable, "-c", DEPLOY, str(house.config), "35")
    flow = house.post("flows/", name="pretrain")["id"]
    running = {"type": "RUNNING", "name": "Running"}
    other = house.post("flow_runs/", flow_id=flow, name="of-another", state=running)[
        "id"
    ]
    ours = house.post("flow_runs/", flow_id=flow, tags=["infini-llama"], state=running)[
        "id"
    ]
    house.send_heartbeat(other)
    house.send_heartbeat(ours, "infini-llama")
    house.wait_for(ours, "CRASHED")
    time.sleep(10)  # in which the automation acts on a run that was silent as long
    assert house.state(other) == "RUNNING"
    house.post(f"flow_runs/{other}/set_state", state={"type": "COMPLETED"})


@pytest.mark.parametrize(
    "states",
    [("PENDING",), ("PENDING", "CANCELLING"), ("PENDING", "RUNNING", "CANCELLING")],
)
def test_a_run_without_a_machine_ends_and_gives_its_slot_back(house, states):
    """Its worker, on another machine, is gone: this machine has no process of it, and never had."""
    house.call(sys.executable, "-c", DEPLOY, str(house.config), "35")
    limit = "v2/concurrency_limits/filter"
    before = [one["active_slots"] for one in house.post(limit)]
    run = house.create_run(  # the tags of its deployment are added to these
        tags=["of-a-user"],
        state={
            "type": "SCHEDULED",
            "state_details": {"scheduled_time": "2999-01-01T00:00:00Z"},
        },
    )
    for state in states:
        house.post(f"flow_runs/{run}/set_state", state={"type": state})
    if "RUNNING" in states:  # its process goes on with heartbeats while it is cancelled
        house.send_heartbeat(run, "infini-llama")
    assert (
        house.state(run) == states[-1]
        and [one["active_slots"] for one in house.post(limit)] != before
    )
    ended = house.wait_for(run, "CRASHED", "CANCELLED")
    assert ended["state_type"] == ("CRASHED" if states == ("PENDING",) else "CANCELLED")
    assert [one["active_slots"] for one in house.post(limit)] == before
