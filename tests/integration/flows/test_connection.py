"""The way to a Prefect server: past every proxy on this machine, and by a usable proxy to another one."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import prefect
import pytest
from prefect._internal.websockets import websocket_connect
from prefect.client.orchestration import get_client
from prefect.context import refresh_global_settings_context
from websockets.asyncio.server import serve

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.flows.server import api_for_deploy
from infini_llama.flows.workarounds.connection import is_local, proxy_variable
from support.services import answering, free_port

SOCKS = {"ALL_PROXY": "socks5://127.0.0.1:9"}
PROXIES = [
    SOCKS,
    {"all_proxy": "socks://127.0.0.1:9/"},
    {"HTTP_PROXY": "http://127.0.0.1:9"},
    {"http_proxy": "nonsense"},
]
REMOTE = "http://prefect.invalid:4200/api"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    for name in [
        name
        for name in os.environ
        if name.startswith("PREFECT_") or name.lower().endswith("_proxy")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def api(monkeypatch) -> Callable[[str], None]:
    """Sets PREFECT_API_URL, also for the client, which this process has imported already."""

    def use(url: str) -> None:
        monkeypatch.setenv("PREFECT_API_URL", url)
        refresh_global_settings_context()

    return use


def health(_: str) -> tuple[int, str]:
    return 200, json.dumps(prefect.__version__)


@pytest.fixture
def healthy(api) -> Iterator[None]:
    """PREFECT_API_URL names a server on this machine."""
    with answering(health) as place:
        api(f"http://{place}/api")
        yield


@pytest.mark.parametrize("proxies", PROXIES)
def test_a_server_on_this_machine_is_reached_without_a_proxy(
    healthy, monkeypatch, tmp_path, proxies
):
    for name, value in proxies.items() | {("NO_PROXY", "internal.example")}:
        monkeypatch.setenv(name, value)
    before = {
        name: value
        for name, value in os.environ.items()
        if name.lower().endswith("_proxy")
    }

    async def by_websocket() -> None:
        async with serve(
            lambda connection: connection.wait_closed(), "127.0.0.1", 0
        ) as server:
            port = server.sockets[0].getsockname()[1]
            async with websocket_connect(f"ws://127.0.0.1:{port}") as connection:
                await (await connection.ping())

    async def by_asynchronous_client() -> None:
        async with get_client() as client:
            assert await client.api_healthcheck() is None

    with api_for_deploy(tmp_path):
        with get_client(sync_client=True) as client:
            assert client.api_healthcheck() is None
        asyncio.run(by_asynchronous_client())
        asyncio.run(by_websocket())
    assert {
        name: value
        for name, value in os.environ.items()
        if name.lower().endswith("_proxy")
    } == before


@pytest.mark.parametrize("proxies", PROXIES[:2])
def test_an_unusable_proxy_is_named_where_the_server_is_on_another_machine(
    api, monkeypatch, tmp_path, proxies
):
    ((name, value),) = proxies.items()
    monkeypatch.setenv(name, value.replace("127", "user:secret@127"))
    api(REMOTE)
    with pytest.raises(ConfigError, match=name) as raised, api_for_deploy(tmp_path):
        pass
    assert "secret" not in str(raised.value)


def test_a_proxy_that_does_not_answer_is_named(api, monkeypatch, tmp_path):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    api(REMOTE)
    with (
        pytest.raises(PipelineError, match="HTTP_PROXY"),
        api_for_deploy(tmp_path),
        get_client(sync_client=True) as client,
    ):
        client.hello()


def test_the_variable_of_a_proxy(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "http://proxy:1")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert proxy_variable(REMOTE) == "ALL_PROXY"
    assert (
        proxy_variable("http://127.0.0.1:4200/api") is None
        and proxy_variable("http://inside.example/api") is None
    )
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    assert proxy_variable("https://prefect.invalid/api") == "https_proxy"


PATIENT = """
import sys
from prefect.client.orchestration import get_client
from infini_llama.flows.workarounds.connection import adapt_clients

adapt_clients(patient=sys.argv[1] == "patient")
with get_client(sync_client=True) as client:
    print("asked", flush=True)
    sys.exit(client.api_healthcheck() is not None)
"""


def test_a_run_waits_for_a_server_that_it_has_not_reached_yet():
    port = free_port()
    environment = os.environ | {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    hasty = subprocess.run(
        [sys.executable, "-c", PATIENT, "hasty"],
        env=environment,
        check=False,
        timeout=60,
    )
    assert hasty.returncode == 1
    with subprocess.Popen(
        [sys.executable, "-c", PATIENT, "patient"],
        env=environment,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(2)  # the first request has failed
        with answering(health, port=port):
            assert process.wait(60) == 0


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "127.1.2.3", "0.0.0.0"]
)
def test_addresses_of_this_machine(host):
    assert is_local(f"http://{host}:4200/api")


@pytest.mark.parametrize(
    "address",
    [REMOTE, "http://192.0.2.1/api", "https://[2001:db8::1]:4200/api", "nonsense", ""],
)
def test_addresses_of_other_machines(address):
    assert not is_local(address)
