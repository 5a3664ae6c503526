"""One flow run, as the worker of `serve` executes it.

This is Prefect's engine with the clients of `flows.connection`.
"""

import runpy

from infini_llama.flows.connection import adapt_clients

if __name__ == "__main__":
    adapt_clients(patient=True)
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
