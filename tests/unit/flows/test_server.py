"""Which Prefect server a command uses, and what it reports of one that does not respond."""

import os
import socket

import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.flows.server import Server, api_for_deploy, api_for_run, api_for_serve


def test_own_api_is_used_and_nothing_started(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with api_for_run(tmp_path / "home"):
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "machine.example"])
def test_a_public_server_requires_an_auth_string(no_prefect, tmp_path, host):
    with pytest.raises(ConfigError, match="PREFECT_SERVER_API_AUTH_STRING"), api_for_serve(tmp_path, host, 4200):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_server_is_local(tmp_path, host):
    assert Server(tmp_path, host, 4200, {}).is_local


def test_a_taken_address_is_refused(no_prefect, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ConfigError, match="--port"):
        Server(tmp_path, "127.0.0.1", listener.getsockname()[1], {}).refuse_taken_address()


@pytest.fixture
def silent():
    """The address of a server that takes connections and answers none."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/api"


def test_an_unreachable_server_is_reported(no_prefect, monkeypatch, tmp_path, silent):
    monkeypatch.setattr("infini_llama.flows.server.ANSWER_SECONDS", 0.05)
    monkeypatch.setenv("PREFECT_API_URL", silent)
    for api in (api_for_run(tmp_path), api_for_serve(tmp_path, "127.0.0.1", 0), api_for_deploy(tmp_path)):
        with pytest.raises(PipelineError, match="PREFECT_API_URL") as raised, api:
            raise AssertionError("it was taken for one that answers")
        assert raised.value.exit_code == 70


def test_a_server_that_disappears_is_reported(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # refused at once
    with pytest.raises(PipelineError, match="PREFECT_API_URL"), api_for_run(tmp_path):
        raise RuntimeError("Failed to reach API at http://127.0.0.1:9/api/")


def test_an_invalid_address_is_refused(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "nonsense")
    with pytest.raises(ConfigError, match="PREFECT_API_URL=nonsense"), api_for_run(tmp_path):
        pass
