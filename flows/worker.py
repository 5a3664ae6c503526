"""Prefect's command as `serve` starts its worker.

The command is `python -m infini_llama.flows.worker worker start --pool … --limit …`. Its runs are
executed by `flows.engine`; both have the clients of `flows.connection`. That the server is started
again is logged in a line, not in a traceback for each connection.
"""

import logging
import sys
import warnings
from typing import Any

from httpx import TransportError
from prefect.utilities.processutils import command_to_string
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker
from websockets.exceptions import WebSocketException

from infini_llama.flows.connection import adapt_clients

DISCONNECTED = (OSError, TransportError, WebSocketException)


class RunConfiguration(ProcessJobConfiguration):
    """The configuration of a flow run's process."""

    def prepare_for_flow_run(self, *arguments: Any, **settings: Any) -> None:
        super().prepare_for_flow_run(*arguments, **settings)
        if not self._command_configured:
            self._command_configured = True
            self.command = command_to_string([sys.executable, "-m", "infini_llama.flows.engine"])


# Prefect warns that this type of worker is replaced, which is meant.
with warnings.catch_warnings(action="ignore"):

    class Worker(ProcessWorker):
        """Starts flow runs by `flows.engine`."""

        job_configuration = RunConfiguration


class BriefRecord(logging.LogRecord):
    """A log record with the error of a lost connection in its message, and no traceback of it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        error = self.exc_info[1] if self.exc_info else None
        if isinstance(error, DISCONNECTED):
            self.msg = f"{self.getMessage()} ({type(error).__name__}: {error})"
            self.args = ()
            self.exc_info = None


if __name__ == "__main__":
    from prefect.cli import app

    logging.setLogRecordFactory(BriefRecord)
    adapt_clients(patient=True)
    app()
