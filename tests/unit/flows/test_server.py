"""The embedded Prefect server: comes up, takes the user's own API where there is one, and never outlives its parent."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.flows.server import given_api, lasting_api, prefect_api


def test_own_api_is_used_and_nothing_started(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with prefect_api(tmp_path / "home"):
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
    assert not (tmp_path / "home").exists()


def started_with(monkeypatch, host: str, home: Path) -> dict[str, str]:
    """The environment that the server of `serve` at `host` is started with; none is started."""
    begun: dict[str, str] = {}

    class Started(Exception):
        pass

    def popen(command, *, env, **_):
        begun.update(env)
        raise Started

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(Started), lasting_api(home, host, 4200):
        pass
    return begun


def test_a_public_server_requires_an_auth_string(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setattr("infini_llama.flows.server._refuse_taken", lambda host, port: None)
    for host in ("0.0.0.0", "::", "192.168.1.7", "machine.example"):
        with pytest.raises(ConfigError, match="PREFECT_SERVER_API_AUTH_STRING"), lasting_api(tmp_path, host, 4200):
            pass
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert "PREFECT_API_AUTH_STRING" not in started_with(monkeypatch, host, tmp_path)
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "me:mine")
    began = started_with(monkeypatch, "0.0.0.0", tmp_path)
    assert began["PREFECT_API_AUTH_STRING"] == "me:mine", "also for the worker and for deploying"


def test_origins_are_the_uis_unless_the_user_names_others(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setattr("infini_llama.flows.server._refuse_taken", lambda host, port: None)
    began = started_with(monkeypatch, "127.0.0.1", tmp_path)
    assert began["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4200,http://localhost:4200"
    monkeypatch.setenv("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", "https://ours.example")
    assert (
        started_with(monkeypatch, "127.0.0.1", tmp_path)["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
        == "https://ours.example"
    )


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
    for api in (prefect_api(tmp_path), lasting_api(tmp_path, "127.0.0.1", 0), given_api(tmp_path)):
        with pytest.raises(PipelineError, match="PREFECT_API_URL") as found, api:
            raise AssertionError("it was taken for one that answers")
        assert found.value.exit_code == 70


def test_a_server_that_disappears_is_reported(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # refused at once
    with pytest.raises(PipelineError, match="PREFECT_API_URL"), prefect_api(tmp_path):
        raise RuntimeError("Failed to reach API at http://127.0.0.1:9/api/")


def test_an_invalid_address_is_refused(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "nonsense")
    with pytest.raises(ConfigError, match="PREFECT_API_URL=nonsense"), prefect_api(tmp_path):
        pass
