"""The worker of `serve`: what it starts for a run, and what it logs of a server that is gone."""

import logging
import sys
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.workers.base import BaseWorker

from infini_llama.flows import worker


@pytest.mark.parametrize(
    ("command", "started"),
    [(None, f"{sys.executable} -m infini_llama.flows.engine"), ("own", "own")],
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
        "a", logging.ERROR, "f.py", 1, "it failed %s", ("again",), (type(error), error, None)
    )
    text = logging.Formatter().format(record)
    assert text.startswith("it failed again") and str(error) in text
    assert ("\n" in text) == (lines > 1)
