"""One flow run, as the worker of `serve` executes it.

This is Prefect's engine with the clients of `connection`, and with the lock that shows that the run
has a process.

Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#16746, open: a run whose worker is killed
stays Running. Test: `test_a_worker_that_is_stopped_reports_nothing_of_its_runs`.

Prefect's worker sets PREFECT__FLOW_RUN_ID, which is private to that version.
"""

import os
import runpy
from pathlib import Path

from infini_llama.flows.executions import FOLDER, hold
from infini_llama.flows.workarounds.connection import adapt_clients

if __name__ == "__main__":
    adapt_clients(patient=True)
    hold(os.environ["PREFECT__FLOW_RUN_ID"], Path(os.environ[FOLDER]))
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
