"""A page of another origin cannot start anything on the server of `serve`: seen on a real one."""

import os
import socket
from collections.abc import Iterator

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate

from infini_llama.flows.server import lasting_api

EVIL = {"Origin": "https://evil.example"}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
VARIABLE = b'{"name": "of_another_origin", "value": "x"}'


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(folder))
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))
        patch.chdir(folder)
        with lasting_api(folder, "127.0.0.1", port) as started:
            assert started
            yield f"http://127.0.0.1:{port}"


def test_the_preflight_of_another_origin_is_refused(origin):
    answer = httpx.options(f"{origin}/api/variables/", headers=EVIL | PREFLIGHT)
    assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("kind", [{"Content-Type": "text/plain"}, {}])
def test_a_request_without_a_preflight_changes_nothing(origin, kind):
    answer = httpx.post(f"{origin}/api/variables/", content=VARIABLE, headers=EVIL | kind)
    assert answer.status_code >= 400 and "access-control-allow-origin" not in answer.headers


def test_another_origin_reads_nothing(origin):
    answer = httpx.post(f"{origin}/api/flow_runs/filter", json={}, headers=EVIL)
    assert "access-control-allow-origin" not in answer.headers


def test_the_ui_and_clients_are_answered(origin):
    answer = httpx.options(f"{origin}/api/variables/", headers=PREFLIGHT | {"Origin": origin})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin
    with get_client(sync_client=True) as client:
        client.create_variable(VariableCreate(name="mine", value="x"))
        assert [variable.name for variable in client.read_variables()] == ["mine"], "nothing of another origin"
