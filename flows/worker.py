"""Prefect's command with this project's process worker: `python -m infini_llama.flows.worker worker start --pool … --limit …`.

Prefect 3.8's own worker ends with an error if a suspended run is resumed while the process of that run still saves its checkpoint:
its limit counts a run once. This one starts such a run when its process has ended.
"""

import warnings
from typing import TYPE_CHECKING

from prefect.workers.process import ProcessWorker

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import WorkerFlowRunResponse

with warnings.catch_warnings(action="ignore"):  # Prefect warns that this type of worker is replaced, which is meant

    class ResumingProcessWorker(ProcessWorker):
        """Leaves a run that still occupies a slot of the limit to the next poll."""

        async def _submit_scheduled_flow_runs(
            self, flow_run_response: "list[WorkerFlowRunResponse]"
        ) -> "list[FlowRun]":
            ending = self.limiter.statistics().borrowers
            startable = [response for response in flow_run_response if response.flow_run.id not in ending]
            return await super()._submit_scheduled_flow_runs(startable)


if __name__ == "__main__":
    from prefect.cli import app

    app()
