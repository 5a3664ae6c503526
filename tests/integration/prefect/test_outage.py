"""A server that is down for minutes while a run trains, on a machine of its own: the run goes on, keeps its slot, and is not crashed.

Prefect's own server, with the leases of limits in memory: the new one knows none of them.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import House, server_at, slow_settings

OUTAGE = 450  # seconds; the client tries for 510


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Iterator[House]:
    home = Path(os.path.realpath(tmp_path_factory.mktemp("limited")))
    settings = slow_settings(home, max_steps=6000, save_steps=20, eval_steps=3000)
    with server_at(home, settings | {"deployment": {"concurrency_limit": 1}}) as house:
        house.begin_worker()
        yield house


def test_a_run_trains_through_an_outage_and_keeps_its_slot(limited):
    run = limited.submit("through")
    limited.wait_for_step("through", 20)
    processes = limited.processes_of_run("through").keys()
    limited.end("server", signal.SIGKILL)
    time.sleep(OUTAGE)
    limited.begin_server()
    next_run = limited.submit("next")
    # In which the automation would act, and the worker take the next run.
    time.sleep(120)
    assert limited.state(run) == "RUNNING" and limited.state(next_run) == "SCHEDULED"
    assert limited.processes_of_run(
        "through"
    ).keys() == processes and not limited.attempts("through")
    limited.wait_for_step("through", limited.step("through") + 20)
    limited.cli("flow-run", "cancel", run)
    assert (
        limited.wait_for(run, "CANCELLED", "FAILED", "CRASHED", "COMPLETED")[
            "state_type"
        ]
        == "CANCELLED"
    )
    limited.wait_for(next_run, "RUNNING")
    limited.cli("flow-run", "cancel", next_run)
    limited.wait_for(next_run, "CANCELLED", "FAILED", "CRASHED", "COMPLETED")
