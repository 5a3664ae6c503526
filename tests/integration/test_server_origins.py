"""A page of another origin or under another host name cannot start anything on the server of `serve`: seen on a real one.

On the same server, because its start takes long: a run whose lease it does not have goes on.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from prefect import flow_engine
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate
from prefect.concurrency import _leases as leases

from infini_llama.flows.server import api_for_serve
from infini_llama.flows.workarounds import slot
from support.services import free_port
from support.waiting import wait_until

EVIL = {"Origin": "https://evil.example"}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type",
}
VARIABLE = b'{"name": "of_another_origin", "value": "x"}'


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(folder))
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))
        patch.chdir(folder)
        with api_for_serve(folder, "127.0.0.1", port, ["train.example"]) as started:
            assert started
            yield f"http://127.0.0.1:{port}"


def test_the_preflight_of_another_origin_is_refused(origin):
    answer = httpx.options(f"{origin}/api/variables/", headers=EVIL | PREFLIGHT)
    assert (
        answer.status_code == 400
        and "access-control-allow-origin" not in answer.headers
    )


@pytest.mark.parametrize("kind", [{"Content-Type": "text/plain"}, {}])
def test_a_request_without_a_preflight_changes_nothing(origin, kind):
    answer = httpx.post(
        f"{origin}/api/variables/", content=VARIABLE, headers=EVIL | kind
    )
    assert (
        answer.status_code >= 400
        and "access-control-allow-origin" not in answer.headers
    )


def test_another_origin_reads_nothing(origin):
    answer = httpx.post(f"{origin}/api/flow_runs/filter", json={}, headers=EVIL)
    assert "access-control-allow-origin" not in answer.headers


def test_the_ui_and_clients_are_answered(origin):
    answer = httpx.options(
        f"{origin}/api/variables/", headers=PREFLIGHT | {"Origin": origin}
    )
    assert (
        answer.status_code == 200
        and answer.headers["access-control-allow-origin"] == origin
    )
    with get_client(sync_client=True) as client:
        client.create_variable(VariableCreate(name="mine", value="x"))
        assert [variable.name for variable in client.read_variables()] == ["mine"], (
            "nothing of another origin"
        )


def test_the_ui_is_unpacked_where_the_user_may_write(origin):
    unpacked = Path(os.environ["PREFECT_HOME"], "ui")
    pages = {path: httpx.get(f"{origin}{path}").status_code for path in ("/", "/v2/")}
    assert pages == {"/": 200, "/v2/": 200} and {
        folder.name for folder in unpacked.glob("v*")
    } == {
        "v1",
        "v2",
    }


REFUSED = [
    "evil.example",
    "EVIL.example:4200",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "[::1].evil.example",
    "",
]


def status(
    origin: str,
    path: str,
    *hosts: str,
    method: str = "GET",
    more: str = "Connection: close\r\n",
) -> int:
    """The status of a request with these Host headers, as a browser sends it."""
    address = httpx.URL(origin)
    headers = "".join(f"Host: {host}\r\n" for host in hosts) + more
    with socket.create_connection((address.host, address.port), 20) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{headers}\r\n".encode())
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize("host", REFUSED)
def test_another_host_is_refused_everywhere(origin, host):
    paths = ["/", "/api/health", "/api/csrf-token?client=a", "/api/variables/filter"]
    assert [status(origin, path, host) for path in paths] == [400] * len(paths)
    assert status(origin, "/api/variables/", host, method="POST") == 400


def test_no_host_and_two_hosts_are_refused(origin):
    assert status(origin, "/api/health") == 400
    assert status(origin, "/api/health", "localhost", "evil.example") == 400


def test_the_hosts_of_this_machine_and_names_given_are_answered(origin):
    port = httpx.URL(origin).port
    hosts = [
        "localhost",
        f"localhost:{port}",
        f"127.0.0.1:{port}",
        "[::1]:4200",
        "[::1]",
        "Train.Example:80",
    ]
    assert [status(origin, "/api/health", host) for host in hosts] == [200] * len(hosts)


def test_a_web_socket_of_another_host_is_refused(origin):
    upgrade = (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    )
    upgrade += "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
    codes = [
        status(origin, "/api/events/in", host, more=upgrade)
        for host in ("evil.example", "localhost")
    ]
    assert codes == [403, 101]


def test_a_run_whose_lease_is_lost_goes_on(origin, monkeypatch):
    """As the engine holds the slot of a run. A server that is down for minutes: prefect/test_outage.py."""
    monkeypatch.setattr(
        flow_engine, "maintain_concurrency_lease", leases.maintain_concurrency_lease
    )
    slot.keep_slots()
    lease = uuid4()

    def is_renewed() -> bool:
        return any(thread.name.endswith(str(lease)) for thread in threading.enumerate())

    with flow_engine.maintain_concurrency_lease(
        lease, 300, raise_on_lease_renewal_failure=True
    ):  # pyright: ignore[reportPrivateImportUsage]
        assert is_renewed()
        wait_until(lambda: not is_renewed(), 60)
        time.sleep(0.5)  # a cancellation would arrive here
