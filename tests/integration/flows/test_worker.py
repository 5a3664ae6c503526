"""The worker of `serve`: a run that is resumed while its process still ends waits for it."""

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import anyio
from prefect.workers.base import BaseWorker
from prefect.workers.process import ProcessWorker

from infini_llama.flows.worker import ResumingProcessWorker

RUN: Any = SimpleNamespace(flow_run=SimpleNamespace(id=uuid4()))


def submitted(kind: type[ProcessWorker]) -> list:
    """What a worker starts of one due run whose process still has a slot of its limit of two."""

    async def poll() -> list:
        worker = kind(work_pool_name="pool", limit=2)
        worker._limiter = anyio.CapacityLimiter(2)
        worker._limiter.acquire_on_behalf_of_nowait(RUN.flow_run.id)
        return await worker._submit_scheduled_flow_runs([RUN])

    return asyncio.run(poll())


def test_a_resumed_run_waits_until_its_process_has_ended():
    assert submitted(ResumingProcessWorker) == []


def test_it_is_what_prefects_command_starts_for_a_process_pool():
    assert BaseWorker.get_worker_class_from_type("process") is ResumingProcessWorker
