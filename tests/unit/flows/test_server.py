"""The embedded Prefect server: comes up, takes the user's own API where there is one, and never outlives its parent."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.flows.server import given_api, lasting_api, prefect_api

HOLD = """
import sys, time
from pathlib import Path
from infini_llama.configs.errors import ConfigError
from infini_llama.flows.server import lasting_api, prefect_api
with prefect_api(Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def no_prefect(monkeypatch, tmp_path):
    """A user without any Prefect settings, standing in an empty folder."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)


def servers_of(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT_HOME") == str(home / "prefect") and "uvicorn" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_dies_with_its_parent(no_prefect, tmp_path, ending):
    home = tmp_path / "home"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        assert len(servers_of(home)) == 1
        parent.send_signal(ending)
        parent.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while servers_of(home) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert servers_of(home) == []
    assert not (home / "prefect" / "server.log").read_text().count("Traceback")


def test_own_api_is_used_and_nothing_started(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with prefect_api(tmp_path / "home"):
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
    assert not (tmp_path / "home").exists()


def test_api_of_the_active_profile_is_used(no_prefect, tmp_path):
    folder = tmp_path / "user" / ".prefect"
    folder.mkdir(parents=True)
    (folder / "profiles.toml").write_text(
        'active = "team"\n[profiles.team]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    )
    check = (
        "import os, sys; from pathlib import Path; from infini_llama.flows.server import prefect_api\n"
        "with prefect_api(Path('home')):\n"
        "    from prefect.settings import get_current_settings\n"
        "    assert get_current_settings().api.url == 'http://127.0.0.1:9/api', get_current_settings().api.url\n"
        "    assert 'PREFECT_HOME' not in os.environ\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    subprocess.run([sys.executable, "-c", check], env=environment, check=True, timeout=60)
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


def test_a_server_that_others_reach_needs_a_password(no_prefect, monkeypatch, tmp_path):
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


def test_a_server_that_is_silent_or_gone_is_a_sentence(no_prefect, monkeypatch, tmp_path, silent):
    monkeypatch.setattr("infini_llama.flows.server.ANSWER_SECONDS", 0.05)
    monkeypatch.setenv("PREFECT_API_URL", silent)
    for api in (prefect_api(tmp_path), lasting_api(tmp_path, "127.0.0.1", 0), given_api(tmp_path)):
        with pytest.raises(PipelineError, match="PREFECT_API_URL") as found, api:
            raise AssertionError("it was taken for one that answers")
        assert found.value.exit_code == 70


def test_a_server_that_goes_away_meanwhile_is_a_sentence(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # refused at once
    with pytest.raises(PipelineError, match="PREFECT_API_URL"), prefect_api(tmp_path):
        raise RuntimeError("Failed to reach API at http://127.0.0.1:9/api/")


def test_an_address_that_is_none_is_a_wrong_setting(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "nonsense")
    with pytest.raises(ConfigError, match="PREFECT_API_URL=nonsense"), prefect_api(tmp_path):
        pass
