"""One flow run, as the worker of `serve` executes it.

This is Prefect's engine with the clients of `flows.connection`, and with the lock that shows that
the run has a process.
"""

import os
import runpy
from pathlib import Path

from infini_llama.flows.connection import adapt_clients
from infini_llama.flows.lost_runs import FOLDER, hold

if __name__ == "__main__":
    adapt_clients(patient=True)
    hold(os.environ["PREFECT__FLOW_RUN_ID"], Path(os.environ[FOLDER]))
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
