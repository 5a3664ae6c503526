"""What Prefect itself does, for which flows/workarounds has something else.

A test that fails here says that Prefect has changed: what works around it can go.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock
from uuid import uuid4

import anyio
import httpx
import prefect
import psutil
import pytest
from prefect import flow_engine
from prefect.client.base import PrefectHttpxSyncClient
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow
from prefect.server.events.ordering import (
    EventArrivedEarly,
    get_triggers_causal_ordering,
)
from prefect.server.events.schemas.events import Event, Resource
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.settings.models.server.api import ServerAPISettings
from prefect.settings.models.server.concurrency import ServerConcurrencySettings
from prefect.settings.models.server.ui import ServerUISettings
from prefect.types._datetime import now
from prefect.utilities.callables import parameter_schema
from prefect.utilities.processutils import run_process
from prefect.workers.base import BaseWorker
from sqlalchemy import make_url

from infini_llama.flows.pretrain import pretrain
from support.services import answering, free_port
from support.waiting import wait_until

FACTS = """
import json, sys
from prefect.client.orchestration import get_client
from prefect.flows import Flow

def function(x):
    return x

with get_client(sync_client=True) as client:
    fault = client.api_healthcheck()
before = "fastapi" in sys.modules
Flow(function).serialize_parameters({"x": 1})
print(json.dumps({"is_reached": fault is None, "fastapi": [before, "fastapi" in sys.modules]}))
"""
TEMPORARY = """
import sys, time
from prefect.server.api.server import SubprocessASGIServer
print(SubprocessASGIServer(port=int(sys.argv[1]))._run_uvicorn_command().pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    """Of a process without this program, with a proxy and an API that only the proxy answers for."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_")
    }
    with answering(lambda _: (200, "")) as proxy:
        environment |= {
            "HOME": str(tmp_path_factory.mktemp("home")),
            "PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api",
            "HTTP_PROXY": f"http://{proxy}",
            "NO_PROXY": "",
        }
        command = [sys.executable, "-c", FACTS]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


def test_a_server_on_this_machine_is_asked_through_the_proxy(facts):
    assert facts["is_reached"]


def test_fastapi_is_imported_to_store_parameters(facts):
    assert facts["fastapi"] == [False, True]


def test_a_form_has_every_parameter_of_the_function():
    assert list(parameter_schema(Flow(pretrain.fn)).properties) != ["changes"]


def test_a_first_connection_is_not_tried_again(monkeypatch):
    tries: list[httpx.Request] = []

    def refuse(_: httpx.Client, request: httpx.Request, **settings: object) -> None:
        tries.append(request)
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx.Client, "send", refuse)
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 2}),
        pytest.raises(httpx.ConnectError),
    ):
        PrefectHttpxSyncClient(base_url="http://127.0.0.1:1").get("/health")
    assert len(tries) == 1


def test_the_engine_cancels_a_run_whose_lease_is_lost():
    source = " ".join(inspect.getsource(flow_engine).split())
    assert source.count("lease_id, 300, raise_on_lease_renewal_failure=True") == 2


def test_leases_are_kept_in_memory():
    assert ServerConcurrencySettings().lease_storage.endswith(".memory")


def test_a_server_allows_every_origin():
    assert ServerAPISettings().cors_allowed_origins == "*"


def test_the_ui_is_unpacked_beside_the_code():
    code = Path(prefect.__file__).parent
    assert ServerUISettings().static_directory is None
    assert code in prefect.__ui_static_subpath__.parents


def test_an_event_waits_for_the_one_before():
    """A server that has not seen the one before keeps back the event of a suspension."""
    run = Resource({"prefect.resource.id": "prefect.flow-run.1"})
    suspended = Event(
        occurred=now("UTC"),
        event="prefect.flow-run.Suspended",
        resource=run,
        id=uuid4(),
    )

    async def process(event: Event) -> None:
        ordering = get_triggers_causal_ordering()
        async with ordering.preceding_event_confirmed(AsyncMock(), event.receive()):
            pass

    asyncio.run(process(suspended))
    follower = suspended.model_copy(update={"id": uuid4(), "follows": uuid4()})
    with pytest.raises(EventArrivedEarly):
        asyncio.run(process(follower))


def test_the_path_of_the_database_ends_at_a_question_mark():
    assert (
        make_url("sqlite+aiosqlite:////home/what?/prefect.db").database == "/home/what"
    )


def test_a_temporary_server_outlives_its_flow(tmp_path):
    command = [sys.executable, "-c", TEMPORARY, str(free_port())]
    environment = os.environ | {"HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path)}
    flow = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert flow.stdout is not None
    server = psutil.Process(int(flow.stdout.readline()))
    flow.kill()
    flow.wait()
    flow.stdout.close()
    wait_until(lambda: server.ppid() != flow.pid, 60)
    assert server.status() != psutil.STATUS_ZOMBIE
    server.send_signal(signal.SIGKILL)


def test_a_server_answers_to_any_host():
    from prefect.server.api.server import create_app

    async def status() -> int:
        transport = httpx.ASGITransport(create_app(webserver_only=True))
        async with httpx.AsyncClient(transport=transport) as client:
            return (await client.get("http://evil.example/api/health")).status_code

    assert asyncio.run(status()) == 200


def reports_of_worker(is_started: bool, **run: object) -> list[str]:
    """What Prefect's worker reports as crashed where its `run` does this."""
    worker = Mock(
        job_configuration=SimpleNamespace(resolve_for_flow_run=AsyncMock()),
        work_pool=None,
        run=AsyncMock(**run),
        _give_worker_labels_to_flow_run=AsyncMock(),
        _propose_submitting_state=AsyncMock(),
        _propose_crashed_state=AsyncMock(),
    )
    status = Mock()
    status._future.done.return_value = is_started
    submission = BaseWorker._submit_run_and_capture_errors(
        worker, FlowRun(flow_id=uuid4()), status
    )
    with contextlib.suppress(asyncio.CancelledError):  # of a worker that is stopped
        asyncio.run(submission)
    return [call.args[1] for call in worker._propose_crashed_state.await_args_list]


def test_a_worker_that_is_stopped_reports_nothing_of_its_runs():
    assert reports_of_worker(True, side_effect=asyncio.CancelledError) == []


def test_a_worker_that_gives_up_kills_the_processes_of_its_runs(tmp_path):
    """They are in a group of tasks that ends with it; none is asked to end before."""
    started, asked = tmp_path / "started", tmp_path / "asked"
    run = (
        "import pathlib, signal, sys, time\n"
        f"def ask(*_): pathlib.Path({str(asked)!r}).touch(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, ask)\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    worker = Mock(_exit_stack=contextlib.AsyncExitStack(), _scheduled_task_scopes=[])
    worker._emit_worker_stopped_event = AsyncMock()
    processes = []

    async def give_up() -> None:
        runs = await worker._exit_stack.enter_async_context(anyio.create_task_group())
        command = [sys.executable, "-c", run]
        start = partial(
            run_process, command, task_status_handler=lambda process: process
        )
        processes.append(await runs.start(start))
        while not started.exists():
            await anyio.sleep(0.05)
        fault = RuntimeError("Service exceeded error threshold.")
        await BaseWorker.teardown(worker, type(fault), fault, None)

    with pytest.raises(ExceptionGroup):
        asyncio.run(give_up())
    assert processes[0].returncode == -signal.SIGKILL
    assert not asked.exists()


def test_a_worker_gives_up_a_run_when_the_server_is_gone():
    (report,) = reports_of_worker(False, side_effect=httpx.ConnectError("refused"))
    assert report.startswith("Failed to submit flow run")


def test_a_worker_reports_the_end_of_a_process_again():
    """Its executor has reported it before `run` returns."""
    (report,) = reports_of_worker(True, return_value=SimpleNamespace(status_code=-9))
    assert "status code -9" in report


def test_a_lone_surrogate_cannot_be_sent():
    with pytest.raises(UnicodeEncodeError):
        httpx.Request("POST", "http://127.0.0.1:1", json=[{"message": "\udc80"}])
