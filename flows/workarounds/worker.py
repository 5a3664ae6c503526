"""Prefect's command as `serve` starts its worker: `python -m` this module, `worker start …`.

Its runs are executed by the module `engine`; both have the clients of `connection`. That the server
is started again is logged in a line, not in a traceback for each connection.

Each run is registered before its process starts, so that `lost_runs` finds those whose process and
worker were killed.

Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#16746, open; PrefectHQ/prefect#23016, open,
would report the runs of a worker that is stopped. Test:
`test_a_worker_that_is_stopped_reports_nothing_of_its_runs`.
"""

import logging
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from anyio import to_thread
from httpx import TransportError
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.states import Scheduled
from prefect.utilities.processutils import command_to_string
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker
from websockets.exceptions import WebSocketException

from infini_llama.configs.errors import PipelineError
from infini_llama.flows.executions import FOLDER, register
from infini_llama.flows.lost_runs import forget_if_reported
from infini_llama.flows.workarounds.connection import adapt_clients

DISCONNECTED = (OSError, TransportError, WebSocketException)


class RunConfiguration(ProcessJobConfiguration):
    """The configuration of a flow run's process, whose command is the module `engine`.

    A command of the work pool or the deployment stays. Prefect 3.9.1 has no setting for the command
    of one worker, and `_command_configured` is private. No issue upstream is known.
    """

    def prepare_for_flow_run(self, *arguments: Any, **settings: Any) -> None:
        super().prepare_for_flow_run(*arguments, **settings)
        if not self._command_configured:
            self._command_configured = True
            engine = "infini_llama.flows.workarounds.engine"
            self.command = command_to_string([sys.executable, "-m", engine])


# Prefect intentionally warns where a type of worker is replaced. Here, that is meant.
with warnings.catch_warnings(action="ignore"):

    class Worker(ProcessWorker):
        """Starts flow runs by the module `engine`.

        Prefect 3.9.1 has no hooks for the start of a process and its end, so that `run` and two
        private methods are overridden. No issue upstream is known.

        Attributes:
            ended: runs whose process has ended, and was reported by Prefect's executor.
        """

        job_configuration = RunConfiguration

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.ended: set[UUID] = set()

        async def run(self, flow_run: FlowRun, *arguments: Any, **settings: Any) -> Any:
            result = await super().run(flow_run, *arguments, **settings)
            self.ended.add(flow_run.id)
            with suppress(Exception):  # the server is down, or the run was deleted
                folder = Path(os.environ[FOLDER])
                await to_thread.run_sync(forget_if_reported, flow_run.id, folder)
            return result

        async def teardown(self, *exc_info: Any) -> None:
            """End the worker.

            Leaving its context kills the processes of its runs. So a worker that gives up, since
            its server was away for long or refuses it, ends at once, and they go on.

            Needed with Prefect 3.9.1. Upstream: no issue is known. Test:
            `test_a_worker_that_gives_up_kills_the_processes_of_its_runs`.
            """
            fault = exc_info[1] if exc_info else None
            if isinstance(fault, Exception):
                self._logger.error("The worker ends, its runs go on.", exc_info=fault)
                os._exit(PipelineError.exit_code)
            await super().teardown(*exc_info)

        async def _propose_pending_state(self, flow_run: FlowRun) -> bool:
            self.ended.discard(flow_run.id)
            is_accepted = await super()._propose_pending_state(flow_run)
            if is_accepted:
                register(
                    str(flow_run.id), Path(os.environ[FOLDER]), str(flow_run.state_id)
                )
            return is_accepted

        async def _propose_crashed_state(
            self, flow_run: FlowRun, message: str, client: PrefectClient | None = None
        ) -> None:
            """Report a run that could not be started.

            A server that was gone for a moment is no reason to give it up: it is submitted again.

            Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#7689, closed, asks for another
            submission. Test: `test_a_worker_gives_up_a_run_when_the_server_is_gone`.

            The end of a process has been reported by then. A second report would end the execution
            that a person has started by Retry in between.

            Needed with Prefect 3.9.1. Upstream: no issue is known. Test:
            `test_a_worker_reports_the_end_of_a_process_again`.
            """
            if flow_run.id in self.ended:
                self.ended.discard(flow_run.id)
                return
            if isinstance(sys.exception(), DISCONNECTED):
                again = Scheduled(message=f"{message} The run is submitted again.")
                try:
                    await self.client.set_flow_run_state(flow_run.id, again, force=True)
                except Exception:  # `serve` marks it as lost
                    self._logger.exception(
                        "Flow run '%s' cannot be submitted again", flow_run.id
                    )
                return
            await super()._propose_crashed_state(flow_run, message, client)


class BriefRecord(logging.LogRecord):
    """A log record with the error of a lost connection in its message, and no traceback of it.

    Prefect 3.9.1 logs a traceback for each request that fails. No issue upstream is known.
    """

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
