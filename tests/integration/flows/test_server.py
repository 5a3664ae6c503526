"""Which Prefect server a command uses, what it reports of one that does not respond, and that its own never outlives it."""

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import httpx
import prefect
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import refresh_global_settings_context
from prefect.deployments.runner import DeploymentApplyError

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.flows.deployments import read_deployment
from infini_llama.flows.server import (
    api_for_deploy,
    api_for_run,
    api_for_serve,
    has_api,
    log_into,
    prepare_client,
)
from infini_llama.flows.settings import START_TIMEOUT
from infini_llama.flows.workarounds.connection import is_loopback
from infini_llama.flows.workarounds.server import Server
from infini_llama.tasks.storage.locks import Busy, Lock
from support.services import answering
from support.waiting import wait_until

HOLD = """
import os, sys, time
from pathlib import Path
from infini_llama.flows.server import api_for_run

def proxies():
    return {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}

before = proxies()
with api_for_run(Path(sys.argv[1])):
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        client.read_flows()
    print("up" if proxies() == before else proxies(), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def no_prefect(monkeypatch, tmp_path):
    """A user without any Prefect settings, standing in an empty folder."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    yield
    monkeypatch.undo()
    refresh_global_settings_context()  # Prefect keeps the settings that a test has made it read


def test_a_folder_that_cannot_be_made_is_named(no_prefect, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"runtime\.home"):
        log_into(tmp_path / "file" / "home", verbose=True)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "file" / "prefect"))
    with pytest.raises(ConfigError, match="PREFECT_HOME"):
        Server(tmp_path, "127.0.0.1", 1, {}).start()


def test_a_home_folder_that_cannot_be_looked_into_is_not_needed(
    no_prefect, monkeypatch, tmp_path
):
    # As one of another user, whatever rights the tests have.
    monkeypatch.setenv("HOME", f"/{'x' * 300}")
    prepare_client(tmp_path)
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "prefect") and not has_api()


def test_an_empty_setting_of_prefect_is_one_that_is_not_set(
    no_prefect, monkeypatch, tmp_path
):
    for name in ("PREFECT_HOME", "PREFECT_API_URL", "PREFECT_SERVER_API_AUTH_STRING"):
        monkeypatch.setenv(name, "")
    prepare_client(tmp_path)
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "prefect") and not has_api()
    assert "PREFECT_SERVER_API_AUTH_STRING" not in os.environ


def servers_of(home: Path) -> list[psutil.Process]:
    servers = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("PREFECT_HOME") == str(home / "prefect")
                and "uvicorn" in process.cmdline()
            ):
                servers.append(process)
    return servers


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's"
)
def test_a_server_ends_with_its_parent_by_ctrl_c(no_prefect, tmp_path):
    """By SIGKILL: test_flow.py. Its database is in its home, whose path has characters with a meaning in URLs."""
    home = tmp_path / "why? [1] 100%25 #ö" / "home"
    command = [sys.executable, "-c", HOLD, str(home)]
    environment = os.environ | {
        "ALL_PROXY": "socks://127.0.0.1:9",
        "NO_PROXY": "internal.example",
    }
    environment |= {
        "PREFECT_SERVER_API_AUTH_STRING": "user:password",
        "PREFECT_API_AUTH_STRING": "of:another",
    }
    environment |= {
        "PREFECT_SERVER_API_BASE_PATH": "/other",
        "PREFECT_CLIENT_MAX_RETRIES": "",
    }
    # With any of them, uvicorn would not serve as the command line says.
    of_uvicorn = {
        "WEB_CONCURRENCY": "2",
        "FORWARDED_ALLOW_IPS": "*",
        "UVICORN_SSL_KEYFILE": "missing.pem",
    }
    environment |= of_uvicorn
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        (server,) = servers_of(home)
        assert not of_uvicorn.keys() & server.environ().keys()
        parent.send_signal(signal.SIGINT)
        parent.communicate(timeout=30)
    wait_until(lambda: servers_of(home) == [], 10)
    assert not (home / "prefect" / "server.log").read_text().count("Traceback")
    assert (home / "prefect" / "prefect.db").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [home.parent.name]


def test_api_of_the_active_profile_is_used(no_prefect, tmp_path):
    folder = tmp_path / "user" / ".prefect"
    folder.mkdir(parents=True)
    (folder / "profiles.toml").write_text(
        'active = "team"\n[profiles.team]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    )
    check = (
        "import os, sys; from pathlib import Path; from infini_llama.flows.server import api_for_run\n"
        "with api_for_run(Path('home')):\n"
        "    from prefect.settings import get_current_settings\n"
        "    assert get_current_settings().api.url == 'http://127.0.0.1:9/api', get_current_settings().api.url\n"
        "    assert 'PREFECT_HOME' not in os.environ\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
    assert not (tmp_path / "home").exists()


def test_own_api_is_used_and_nothing_started(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with api_for_run(tmp_path / "home"):
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "machine.example"])
def test_a_public_server_requires_an_auth_string(no_prefect, tmp_path, host):
    with (
        pytest.raises(ConfigError, match="PREFECT_SERVER_API_AUTH_STRING"),
        api_for_serve(tmp_path, host, 4200),
    ):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_an_address_of_this_machine_alone_is_a_loopback(host):
    assert is_loopback(host)


def test_a_taken_address_is_refused(no_prefect, tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ConfigError, match="--port"),
    ):
        Server(
            tmp_path, "127.0.0.1", listener.getsockname()[1], {}
        ).refuse_taken_address()
    with pytest.raises(ConfigError, match="--port"):
        Server(tmp_path, "127.0.0.1", 70_000, {}).refuse_taken_address()


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
    for api in (
        api_for_run(tmp_path),
        api_for_serve(tmp_path, "127.0.0.1", 0),
        api_for_deploy(tmp_path),
    ):
        with pytest.raises(PipelineError, match="PREFECT_API_URL") as raised, api:
            raise AssertionError("it was taken for one that answers")
        assert raised.value.exit_code == 70


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (200, "<html>", 64),
        (200, '"2.20.3"', 64),
        (401, "{}", 64),
        (403, "{}", 64),
        (404, "{}", 64),
        (500, "", 70),
    ],
)
def test_a_server_that_is_not_usable_is_reported(
    no_prefect, monkeypatch, tmp_path, status, body, code
):
    """A page, another major version of Prefect, a wrong password, no API there, and a fault."""

    with answering(lambda _: (status, body)) as place:
        monkeypatch.setenv("PREFECT_API_URL", f"http://user:secret@{place}/api")
        refresh_global_settings_context()
        for api in (
            api_for_run(tmp_path),
            api_for_serve(tmp_path, "127.0.0.1", 0),
            api_for_deploy(tmp_path),
        ):
            with pytest.raises(PipelineError, match="PREFECT_API_URL") as raised, api:
                raise AssertionError("it was taken for Prefect's API")
            assert raised.value.exit_code == code and "secret" not in str(raised.value)


def test_blanks_around_an_address_are_left_out(no_prefect, monkeypatch, tmp_path):
    with answering(as_empty_server) as place:
        monkeypatch.setenv("PREFECT_API_URL", f" http://{place}/api ")
        with api_for_run(tmp_path):
            assert os.environ["PREFECT_API_URL"] == f"http://{place}/api"
        monkeypatch.setenv("PREFECT_API_URL", " ")
        prepare_client(tmp_path)
        assert not has_api()


def as_empty_server(path: str) -> tuple[int, str]:
    """The answer of a server of this version that has nothing."""
    if path.endswith("/version"):
        return 200, f'"{prefect.__version__}"'
    return 404, "{}"


@pytest.mark.parametrize("block", ["local-file-system/missing", "missing"])
def test_a_result_storage_block_that_the_server_lacks_is_named(
    no_prefect, monkeypatch, tmp_path, block
):
    with answering(as_empty_server) as place:
        monkeypatch.setenv("PREFECT_API_URL", f"http://{place}/api")
        monkeypatch.setenv("PREFECT_DEFAULT_RESULT_STORAGE_BLOCK", block)
        refresh_global_settings_context()
        for api in (api_for_run(tmp_path), api_for_serve(tmp_path, "127.0.0.1", 0)):
            with (
                pytest.raises(
                    ConfigError, match=f"PREFECT_DEFAULT_RESULT_STORAGE_BLOCK={block}"
                ),
                api,
            ):
                raise AssertionError("every run would load the block")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PREFECT_CLIENT_MAX_RETRIES", "many"),
        ("PREFECT_PROFILE", "nobody"),
        ("SSL_CERT_FILE", "missing.pem"),
        ("prefect.toml", "="),
    ],
)
def test_a_wrong_setting_of_prefect_is_named(no_prefect, tmp_path, name, value):
    environment = {"PREFECT_HOME": str(tmp_path / "prefect")}
    if name == "prefect.toml":
        (tmp_path / name).write_text(value)
    else:
        environment[name] = value
    check = """
from infini_llama.configs.errors import ConfigError
from infini_llama.flows.settings import client_settings
try:
    client_settings()
except ConfigError as error:
    print(error)
"""
    command = [sys.executable, "-c", check]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert name.removeprefix("PREFECT_CLIENT_").lower() in done.stdout.lower(), (
        done.stdout
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PREFECT_API_REQUEST_TIMEOUT", "abc"),
        ("PREFECT_CLIENT_CUSTOM_HEADERS", "{bad"),
    ],
)
def test_a_wrong_setting_of_prefect_is_named_beside_an_own_server(
    no_prefect, tmp_path, name, value
):
    """In a process of its own, as `run`: Prefect's settings fail while it is imported."""
    check = """
from pathlib import Path
from infini_llama.configs.errors import ConfigError
from infini_llama.flows.server import api_for_run
try:
    with api_for_run(Path("home")):
        pass
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", check],
        env=os.environ | {name: value},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    key = name.split("_", 2)[2].lower()
    assert "a setting of Prefect is wrong" in done.stdout and key in done.stdout


def test_a_server_that_disappears_is_reported(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # refused at once
    with pytest.raises(PipelineError, match="PREFECT_API_URL"), api_for_run(tmp_path):
        raise RuntimeError("Failed to reach API at http://127.0.0.1:9/api/")


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (
            httpx.ReadTimeout("timed out"),
            PipelineError,
            r"does not respond \(timed out\)",
        ),
        (ValueError("a fault"), DeploymentApplyError, "a fault"),
    ],
)
def test_a_server_that_does_not_take_a_deployment_is_reported(
    no_prefect, monkeypatch, tmp_path, fault, kind, words
):
    """An overloaded one, whose error Prefect wraps; an error of another kind stays as it is."""

    def fail(*_: object, **__: object) -> None:
        raise fault

    file = tmp_path / "small.yaml"
    file.write_text("data: {source: python-stdlib}")
    deployment = read_deployment(str(file)).to_prefect()
    monkeypatch.setattr(SyncPrefectClient, "create_flow_from_name", lambda *_: uuid4())
    monkeypatch.setattr(SyncPrefectClient, "create_deployment", fail)
    with answering(as_empty_server) as place:
        monkeypatch.setenv("PREFECT_API_URL", f"http://{place}/api")
        refresh_global_settings_context()
        with pytest.raises(kind, match=words), api_for_deploy(tmp_path):
            deployment.apply()


def test_a_server_that_needs_too_long_is_reported_with_what_to_set(
    no_prefect, monkeypatch, tmp_path
):
    monkeypatch.setenv(START_TIMEOUT, "0")
    with (
        pytest.raises(PipelineError, match=START_TIMEOUT) as raised,
        api_for_run(tmp_path),
    ):
        pass
    assert raised.value.exit_code == 70 and not servers_of(tmp_path)
    with (
        Lock(tmp_path / "prefect" / "server-start.lock"),
        pytest.raises(Busy, match=str(os.getpid())),
        api_for_run(tmp_path),
    ):
        pass
    monkeypatch.setenv(START_TIMEOUT, "soon")
    with (
        pytest.raises(ConfigError, match=f"{START_TIMEOUT}=soon"),
        api_for_run(tmp_path),
    ):
        pass


def test_an_invalid_address_is_refused(no_prefect, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "nonsense")
    with (
        pytest.raises(ConfigError, match="PREFECT_API_URL=nonsense"),
        api_for_run(tmp_path),
    ):
        pass


def with_newer_database(file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute(
            "create table alembic_version (version_num varchar(32) not null)"
        )
        database.execute("insert into alembic_version values ('ffffffffffff')")
        database.commit()


def with_damaged_database(file: Path) -> None:
    file.write_bytes(b"garbage" * 1000)


def with_read_only_database(file: Path) -> None:
    """SQLite writes no file of a newer format, also as root; byte 18 is the format's version."""
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("create table other (number integer)")
        database.commit()
    content = bytearray(file.read_bytes())
    content[18] = 9
    file.write_bytes(content)


def with_folder(file: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_newer_database, "newer version of Prefect"),
        (with_damaged_database, "is damaged"),
        (with_read_only_database, "may not be written by this user"),
        (with_folder, "cannot be opened by this user"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_with_what_to_do(
    no_prefect, tmp_path, change, words
):
    file = tmp_path / "prefect" / "prefect.db"
    file.parent.mkdir()
    change(file)
    with pytest.raises(ConfigError, match=words) as refused, api_for_run(tmp_path):
        pass
    assert str(file) in str(refused.value) and "ry again" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "PREFECT_SERVER_DATABASE_CONNECTION_URL",
        "PREFECT_API_DATABASE_CONNECTION_URL",
        "prefect.toml",
    ],
)
def test_a_database_that_a_setting_names_is_named(
    no_prefect, monkeypatch, tmp_path, name
):
    missing = tmp_path / "missing" / "prefect.db"
    url = f"sqlite+aiosqlite:///{missing}"
    if name == "prefect.toml":
        (tmp_path / name).write_text(f'server.database.connection_url = "{url}"\n')
    else:
        monkeypatch.setenv(name, url)
    with (
        pytest.raises(
            ConfigError, match="another place in PREFECT_SERVER_DATABASE_CONNECTION_URL"
        ) as refused,
        api_for_run(tmp_path),
    ):
        pass
    assert f"Prefect's database {url} cannot be opened" in str(refused.value)


def test_a_named_database_is_named_without_its_password(
    no_prefect, monkeypatch, tmp_path
):
    database = "postgresql+asyncpg://user:hunter/2@127.0.0.1:1/prefect"
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", database)
    server = Server(tmp_path, "127.0.0.1", 4200, {})
    server.log.parent.mkdir()
    server.log.write_text("No space left on device\n")
    with pytest.raises(PipelineError) as refused:
        server.refuse_database()
    assert "postgresql+asyncpg://user:***@127.0.0.1:1/prefect" in str(refused.value)


def test_a_full_disk_of_the_database_is_named(no_prefect, tmp_path):
    """As SQLite reports it; lines of an earlier server's log are not of this one."""
    server = Server(tmp_path, "127.0.0.1", 4200, {})
    server.log.parent.mkdir()
    server.log.write_text("sqlite3.DatabaseError: file is not a database\n")
    server.logged_before = server.log.stat().st_size
    server.refuse_database()
    with server.log.open("a") as log:
        log.write("sqlite3.OperationalError: database or disk is full\n")
    with pytest.raises(PipelineError, match="free space") as refused:
        server.refuse_database()
    assert not isinstance(refused.value, ConfigError)


def test_the_cause_of_a_server_that_does_not_start_is_named_without_the_password(
    no_prefect, monkeypatch, tmp_path
):
    database = "postgresql+asyncpg://user:hunter2@127.0.0.1:1/prefect"
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", database)
    cause = r"exited with code 3 \(ConnectionRefusedError: .*'127\.0\.0\.1', 1"
    with pytest.raises(PipelineError, match=cause) as raised, api_for_run(tmp_path):
        pass
    assert "hunter2" not in str(raised.value)
