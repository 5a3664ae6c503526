"""The settings of deploy/compose.yaml, tried: its commands and variables, on a Postgres and a Redis of this machine."""

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from support.laboratory import CONFIG
from support.services import POSTGRES, free_port, postgres
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
BIN = Path(sys.executable).parent
AUTH = "somebody:with-a-password"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not POSTGRES or not shutil.which("redis-server"),
        reason="the services of compose.yaml are run without Docker: needs Postgres' and Redis' servers on PATH",
    ),
]


@contextmanager
def process(folder: Path, *command: str, **options):
    """A process for the time of the block, ended as a group; its output is in `folder`."""
    with (folder / f"{Path(command[0]).name}-{time.time_ns()}.log").open("wb") as log:
        started = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, **options
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, 9)
            started.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def status(url: str, auth: str | None = None) -> int:
    request = urllib.request.Request(url)
    if auth:
        request.add_header(
            "Authorization", "Basic " + base64.b64encode(auth.encode()).decode()
        )
    try:
        return urllib.request.urlopen(request, timeout=5).status
    except urllib.error.HTTPError as answer:
        return answer.code
    except OSError:
        return 0


@contextmanager
def redis(folder: Path):
    """Redis with the arguments of compose.yaml."""
    port, data = free_port(), folder / "redis"
    data.mkdir()
    with process(
        folder,
        *SERVICES["redis"]["command"],
        "--port",
        str(port),
        "--dir",
        str(data),
        "--bind",
        "127.0.0.1",
    ):
        wait_until(lambda: answers(port))
        yield port


def variables(service: str, moved: dict[str, str]) -> dict[str, str]:
    """A service's variables, with the addresses of this machine instead of the containers'; nothing of the user's Prefect."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_")
    }
    settings = dict(SERVICES[service]["environment"])
    for name in settings:
        for there, here in moved.items():
            settings[name] = settings[name].replace(there, here)
    assert not [name for name, value in settings.items() if "${" in value]
    return own | settings


@pytest.mark.timeout(600)
def test_server_services_and_worker_come_up_as_compose_starts_them(tmp_path):
    with ExitStack() as running:
        account = SERVICES["postgres"]["environment"]
        there = postgres(account["POSTGRES_USER"], "secret1", account["POSTGRES_DB"])
        database, messages = (
            running.enter_context(there),
            running.enter_context(redis(tmp_path)),
        )
        api, health = free_port(), 8080
        moved = {
            "${POSTGRES_PASSWORD:?set it in deploy/.env}": "secret1",
            "@postgres:5432": f"@127.0.0.1:{database}",
            "${PREFECT_AUTH:?set it in deploy/.env, as user:password}": AUTH,
            "${PREFECT_AUTH}": AUTH,
            "redis://redis:6379": f"redis://127.0.0.1:{messages}",
            "0.0.0.0": "127.0.0.1",
            "http://server:4200": f"http://127.0.0.1:{api}",
            "127.0.0.1:4200": f"127.0.0.1:{api}",
            "/tmp/prefect": str(tmp_path / "prefect"),
            "/state": str(tmp_path / "state"),
            "/app": str(ROOT),
        }
        redis_address = {
            "PREFECT_REDIS_MESSAGING_HOST": "127.0.0.1",
            "PREFECT_REDIS_MESSAGING_PORT": str(messages),
        }
        server = (
            variables("server", moved)
            | redis_address
            | {"PREFECT_SERVER_API_PORT": str(api)}
        )
        services = variables("services", moved) | redis_address
        worker = variables("worker", moved) | {
            "PREFECT_WORKER_WEBSERVER_PORT": str(health),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
        }

        def start(name: str, environment: dict[str, str]) -> subprocess.Popen:
            path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
            program, *arguments = SERVICES[name]["command"]
            found = shutil.which(program, path=path)
            assert found, program
            return running.enter_context(
                process(tmp_path, found, *arguments, env=environment | {"PATH": path})
            )

        start("server", server)
        base = f"http://127.0.0.1:{api}/api"
        # The health check of compose.yaml has no password.
        wait_until(lambda: status(f"{base}/ready") == 200)
        assert status(f"{base}/admin/version") == 401
        assert status(f"{base}/admin/version", AUTH) == 200
        assert status(f"{base}/admin/version", "somebody:else") == 401
        background = start("services", services)
        project = [
            "--no-prompt",
            "deploy",
            "--all",
            "--prefect-file",
            "deploy/prefect.yaml",
        ]
        at_work = start("worker", worker)

        def prefect(*arguments: str) -> str:
            command = [BIN / "prefect", *arguments]
            done = subprocess.run(
                command,
                env=worker,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        wait_until(lambda: status(f"http://127.0.0.1:{health}/health") == 200)
        prefect(*project)
        assert "pretrain/pretrain" in prefect("deployment", "ls")
        data = {
            "source": "files",
            "files": [str(tmp_path / "*.txt")],
            "sequence_length": 16,
        }
        train = {
            "max_steps": 4,
            "global_batch_size": 2,
            "micro_batch_size": 2,
            "warmup_steps": 1,
            "sample_tokens": 2,
        }
        config = {
            "data": data
            | {"validation_fraction": 0.3, "tokenizer": {"vocab_size": 300}},
            "model": CONFIG["model"],
            "train": train,
            "environment": {"device": "cpu", "threads": 1},
            "runtime": {"name": "composed"},
        }
        for number in range(60):
            (tmp_path / f"{number}.txt").write_text(f"line {number} of the text\n" * 9)
        prefect(
            "deployment",
            "run",
            "pretrain/pretrain",
            "--param",
            f"config={json.dumps(config)}",
        )
        summary = tmp_path / "state" / "runs" / "composed" / "summary.json"
        wait_until(summary.exists, 240)
        wait_until(
            lambda: (
                "composed"
                in prefect("flow-run", "ls", "--state-type", "COMPLETED", "-o", "json")
            ),
            60,
        )
        assert background.poll() is None and at_work.poll() is None
