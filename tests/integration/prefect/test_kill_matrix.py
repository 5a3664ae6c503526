"""kill -9 of each process of `serve` in each state of a run: it completes with the weights of an undisturbed run.

A run that waits for a person is resumed or retried as its page does it. With `concurrency_limit: 1`, so that a slot that is not given back
stops the next run.
"""

import json
import os
import signal
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.laboratory import workers_of

from .conftest import FINAL, Served, served_at, slow_settings

STEPS = 60
ENDED = ("FAILED", "CRASHED", "CANCELLED")
# Processes that there are in each state.
CELLS = {
    "scheduled": ("server", "worker", "serve"),
    "pending": ("server", "worker", "serve"),
    "preprocess": ("server", "worker", "flow", "serve"),
    "training": ("server", "worker", "flow", "torchrun", "rank", "serve"),
    "awaiting-retry": ("server", "worker", "flow", "serve"),
    "suspending": ("server", "worker", "flow", "rank", "serve"),
    "suspended": ("server", "worker", "serve"),
    "cancelling": ("server", "worker", "flow", "torchrun", "rank", "serve"),
    "crashed-and-retried": ("server", "worker", "serve"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    home = Path(os.path.realpath(tmp_path_factory.mktemp("served")))
    settings = slow_settings(home, max_steps=STEPS, save_steps=10, eval_steps=STEPS)
    with served_at(home, settings | {"deployment": {"concurrency_limit": 1}}) as house:
        yield house


def weights(served: Served, name: str) -> str:
    summary = served.home / "runs" / name / "summary.json"
    return json.loads(summary.read_text())["weights_sha256"]


@pytest.fixture(scope="module")
def undisturbed(served) -> str:
    run = served.create_named("undisturbed")
    assert served.wait_for(run, *FINAL)["state_type"] == "COMPLETED"
    return weights(served, "undisturbed")


def task_states(served: Served, run: str) -> list[str]:
    tasks = served.post("task_runs/filter", flow_runs={"id": {"any_": [run]}})
    return [task["state_name"] for task in tasks]


def kill(served: Served, part: str) -> None:
    if part == "rank":
        for rank in workers_of(served.marker):
            os.kill(rank, signal.SIGKILL)
        return
    served.kill(part)
    if part == "serve":
        served.processes.pop("serve").wait(60)
        served.serve()


def to_state(served: Served, state: str, name: str) -> str:
    """The ID of a new run that is in this state."""
    slow_text = {"files": [f"{sysconfig.get_path('stdlib')}/*.py"]}
    slow_text["tokenizer"] = {"kind": "unigram", "vocab_size": 6000 + len(name)}
    changes: dict[str, object] = {}
    if state == "preprocess":
        changes = {"data": slow_text, "max_steps": 20}
    if state == "awaiting-retry":
        changes = {"runtime": {"retry_delay": 25}}
    run = served.create_named(name, **changes)
    if state == "pending":
        served.wait_for(run, "PENDING", "RUNNING")
    elif state == "preprocess":
        served.wait_for(run, "RUNNING")
        time.sleep(4)
    elif state != "scheduled":
        served.wait_for_step(name, 10)
    after: dict[str, Callable[[], object]] = {
        "awaiting-retry": lambda: _fail(served, run),
        "suspending": lambda: (served.suspend(run), time.sleep(0.7)),
        "suspended": lambda: _suspend(served, run, name),
        "cancelling": lambda: _cancel(served, run),
        "crashed-and-retried": lambda: _crash_and_retry(served, run),
    }
    if state in after:
        after[state]()
    return run


def _fail(served: Served, run: str) -> None:
    kill(served, "rank")
    served.wait(
        lambda: "AwaitingRetry" in task_states(served, run), "the task is not retried"
    )


def _suspend(served: Served, run: str, name: str) -> None:
    served.suspend(run)
    served.wait(lambda: not served.processes_of_run(name), "its workers go on")


def _cancel(served: Served, run: str) -> None:
    served.post(f"flow_runs/{run}/set_state", state={"type": "CANCELLING"})
    time.sleep(0.3)


def _crash_and_retry(served: Served, run: str) -> None:
    served.kill("flow")
    served.wait_for(run, "CRASHED")
    served.retry(run)


def to_completed(served: Served, run: str) -> list[str]:
    """Wait for the end of a run, and resume or retry it where a person has to; its states."""
    states: list[str] = []
    for _ in range(3):
        states.append(served.wait_for(run, *FINAL, "PAUSED")["state_type"])
        if states[-1] == "COMPLETED":
            return states
        time.sleep(5)
        if served.state(run) == "PAUSED":
            served.post(f"flow_runs/{run}/resume")
        elif served.state(run) in ENDED:
            served.retry(run)
        served.wait(
            lambda: served.state(run) not in (*ENDED, "PAUSED"),
            "it is not started again",
        )
    raise AssertionError(f"{states}, then {served.get(run)['state']}")


def has_free_slot(served: Served) -> bool:
    (limit,) = served.post("v2/concurrency_limits/filter")
    return limit["active_slots"] == 0


@pytest.mark.parametrize(
    ("state", "part"),
    [(state, part) for state, parts in CELLS.items() for part in parts],
)
def test_a_kill_costs_nothing_but_time(served, undisturbed, state, part):
    name = f"{state}-{part}"
    run = to_state(served, state, name)
    kill(served, part)
    states = to_completed(served, run)
    served.wait(lambda: set(served.states(run)) <= set(FINAL), f"{served.states(run)}")
    served.wait(lambda: has_free_slot(served), "the slot is not free")
    assert not served.processes_of_run(name)
    if state != "preprocess":
        assert weights(served, name) == undisturbed
    if part in ("server", "worker", "torchrun") and state in (
        "scheduled",
        "pending",
        "training",
    ):
        assert states == ["COMPLETED"], "a person had to act"
