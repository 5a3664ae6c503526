"""Runs that the server calls Running although no process executes them: marked by test_serve_kills.py on a real server."""

import os
import subprocess
import sys
from uuid import uuid4

import pytest

from infini_llama.flows.lost_runs import flow_processes


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_the_process_of_a_run_is_found_until_it_ends():
    run, environment = uuid4(), {"MARK": "a"}
    environment |= os.environ | {"PREFECT__FLOW_RUN_ID": str(run)}
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment
    ) as process:
        assert flow_processes("MARK=a") == {process.pid: run}
        assert run in flow_processes().values()
        assert run not in flow_processes("MARK=b").values()
    assert run not in flow_processes().values()
