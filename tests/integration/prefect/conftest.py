"""A real Prefect server and a real worker: on SQLite, and on PostgreSQL where a test names it or INFINI_TEST_POSTGRES is set."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infini_llama.configs.loading import load_config
from infini_llama.flows.deployments import Deployment
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder, read_attempts
from support.browser import CHROMIUM, Browser
from support.laboratory import COMMAND, CONFIG, inject, processes_of
from support.services import POSTGRES, free_port, postgres

ROOT = Path(__file__).parents[3]
# Seconds that a test waits for what should happen: it ends one that hangs, and is no promise on a busy machine.
LONGEST = 900
DATABASE = "postgres" if os.environ.get("INFINI_TEST_POSTGRES") else "sqlite"
DEPLOY = """
import sys
from datetime import timedelta
from infini_llama.flows.deployments import deploy, read_deployment
deploy([read_deployment(sys.argv[1])], silent_for=timedelta(seconds=float(sys.argv[2])))
"""
# Steps of a fifth of a second. With a path in FAULT, one worker ends with an error after 25 steps, once.
SLOW = """
import time
import uuid

def change(module):
    step, calls = module.optimizer_step, []
    def slow(*arguments):
        calls.append(1)
        time.sleep(0.2)
        flag = os.environ.get("FAULT")
        if flag and len(calls) == 25 and not os.path.exists(flag):
            open(flag, "w").close()
            raise RuntimeError("the injected fault")
        return step(*arguments)
    module.optimizer_step = slow
"""
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def slow_settings(home: Path, **train: object) -> dict:
    """CONFIG with these keys of `train` and steps of a fifth of a second."""
    (home / "slow").mkdir()
    path = inject(
        home / "slow", "infini_llama.tasks.train.worker.trainer", SLOW
    ).partition("=")[2]
    return CONFIG | {
        "train": CONFIG["train"] | train,
        "environment": CONFIG["environment"] | {"env": {"PYTHONPATH": path}},
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integration/prefect" in str(item.path):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(2 * LONGEST))


@dataclass
class House:
    """A server at `port` and a worker on this machine; both can be ended and started again."""

    home: Path
    config: Path
    port: int
    database: str
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def marker(self) -> str:
        return f"INFINI_TEST_HOUSE={self.port}"

    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PREFECT_", "PYTEST_"))
        }
        name, value = self.marker.split("=")
        return kept | {
            name: value,
            "PREFECT_HOME": str(self.home / "prefect-home"),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": self.database,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_UI_API_URL": "/api",
            "INFINI_LLAMA_CODE": str(ROOT),
            "INFINI_LLAMA_HOME": str(self.home),
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            **self.variables,
        }

    def begin(self, name: str, *command: str) -> subprocess.Popen:
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment(),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[name]

    def begin_server(self) -> None:
        python = (
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--port",
            str(self.port),
        )
        process = self.begin("server", *python)
        self.wait(
            lambda: self._answers() or process.poll() is not None,
            "the server does not answer",
        )

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.api}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def begin_worker(self, *options: str) -> None:
        """Start `serve`, and wait until it takes runs."""
        log = self.home / "serve.log"
        before = log.read_text().count("ready;") if log.exists() else 0
        self.begin(
            "serve", COMMAND, "serve", str(self.config), *(options or ("--limit", "2"))
        )
        self.wait(
            lambda: log.read_text().count("ready;") > before,
            "the worker does not come up",
        )

    def end(self, name: str, number: signal.Signals = signal.SIGINT) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(120)

    def wait(self, true: Callable[[], object], otherwise: str) -> None:
        deadline = time.monotonic() + LONGEST
        while not true():
            assert time.monotonic() < deadline, "\n".join([otherwise, *self.logs()])
            time.sleep(0.3)

    def logs(self) -> list[str]:
        """The end of each; folders may come and go meanwhile."""
        files = [
            Path(folder, name)
            for folder, _, names in os.walk(self.home)
            for name in names
        ]
        return [
            f"{log.name}:\n{log.read_text()[-3000:]}"
            for log in files
            if log.suffix == ".log"
        ]

    def call(self, *command: str, folder: Path | None = None) -> str:
        """What a command prints in `folder`, by default home; it must exit with 0."""
        options = {
            "env": self.environment(),
            "cwd": folder or self.home,
            "capture_output": True,
            "text": True,
        }
        done = subprocess.run(command, timeout=180, check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ours(self, *arguments: str) -> str:
        """`infini-llama`."""
        return self.call(COMMAND, *arguments)

    def cli(self, *arguments: str, folder: Path | None = None) -> str:
        """Prefect's own command."""
        return self.call(sys.executable, "-m", "prefect", *arguments, folder=folder)

    def headers(self) -> dict[str, str]:
        """Of a POST."""
        return {}

    def post(self, path: str, **fields: object) -> Any:
        url, tries = f"{self.api}/{path}", 0
        while (
            answer := httpx.post(url, json=fields, headers=self.headers(), timeout=60)
        ).status_code == 503 and tries < 10:
            tries += 1  # a busy database; Prefect's own client retries as well
            time.sleep(1)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def send_heartbeat(self, run: str, *tags: str) -> None:
        """What the process of a run with these tags sends every half minute."""
        flow = {
            "prefect.resource.id": "prefect.flow.of-the-run",
            "prefect.resource.role": "flow",
            "prefect.resource.name": "pretrain",
        }
        related = [flow]
        for tag in tags:
            resource = {
                "prefect.resource.id": f"prefect.tag.{tag}",
                "prefect.resource.role": "tag",
            }
            related.append(resource)
        event = {
            "id": str(uuid.uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": "prefect.flow-run.heartbeat",
            "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
            "related": related,
        }
        httpx.post(
            f"{self.api}/events", json=[event], headers=self.headers(), timeout=60
        ).raise_for_status()

    def submit(self, name: str, *overrides: str) -> str:
        """Id of a new run of the deployment, with settings of its own."""
        config = load_config(self.config, [f"runtime.name={name}", *overrides])
        return self.create_run(
            name=name, parameters=Deployment(name, config).parameters()
        )

    def create_run(self, deployment: str | None = None, **fields: object) -> str:
        """Id of a new run of a deployment, by default that of the configuration."""
        return self.post(
            f"deployments/{deployment or self.deployment()['id']}/create_flow_run",
            **fields,
        )["id"]

    def get(self, run: str) -> dict:
        return httpx.get(f"{self.api}/flow_runs/{run}", timeout=30).json()

    def runs(self, **filters: object) -> list[dict]:
        return self.post("flow_runs/filter", **filters)

    def deployment(self) -> dict:
        return httpx.get(
            f"{self.api}/deployments/name/pretrain/small", timeout=30
        ).json()

    def artifacts(self, run: str) -> dict[str, dict]:
        """The newest of each key; what Prefect itself stores has none."""
        query = {"flow_runs": {"id": {"any_": [run]}}, "sort": "CREATED_DESC"}
        return {
            artifact["key"]: artifact
            for artifact in reversed(self.post("artifacts/filter", **query))
            if artifact["key"]
        }

    def suspend(self, run: str) -> None:
        """As the page's button does."""
        soon = datetime.now(UTC) + timedelta(seconds=300)
        details = {"pause_reschedule": True, "pause_timeout": soon.isoformat()}
        state = {"type": "PAUSED", "name": "Suspended", "state_details": details}
        answer = self.post(f"flow_runs/{run}/set_state", state=state)
        assert answer["status"] == "ACCEPT", answer

    def state(self, run: str) -> str:
        return self.get(run)["state_type"]

    def tasks(self, run: str) -> list[str]:
        """State types of the run's tasks."""
        tasks = self.post(
            "task_runs/filter", task_runs={}, flow_runs={"id": {"any_": [run]}}
        )
        return [task["state_type"] for task in tasks]

    def wait_for(self, run: str, *states: str) -> dict:
        self.wait(
            lambda: self.state(run) in states,
            f"the run never was {states}: {self.get(run)['state']}",
        )
        return self.get(run)

    def step(self, name: str) -> int:
        """Of the newest committed checkpoint."""
        return checkpoints.latest_step(self.home / "runs" / name / "checkpoints")

    def wait_for_step(self, name: str, step: int) -> None:
        self.wait(lambda: self.step(name) >= step, f"{name} never reached step {step}")

    def attempts(self, name: str) -> list[AttemptRecord]:
        return read_attempts(RunFolder(self.home / "runs" / name))

    def processes_of_run(self, name: str) -> dict[int, str]:
        return {
            pid: command
            for pid, command in processes_of(self.marker).items()
            if f"/runs/{name}/" in command
        }

    def page(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


PARTS = {
    "server": "allowed_hosts:create_app",
    "worker": "worker start --pool",
    "flow": "infini_llama.flows.workarounds.engine",
    "torchrun": "tasks.train.torchrun",
    "serve": f"{COMMAND} serve",
}


class Served(House):
    """`serve` with a server of its own."""

    def environment(self) -> dict[str, str]:
        return {
            name: value
            for name, value in super().environment().items()
            if not name.startswith("PREFECT_")
            or name in ("PREFECT_HOME", "PREFECT_SERVER_ANALYTICS_ENABLED")
        }

    def serve(self) -> None:
        self.begin_worker("--port", str(self.port))

    def create_named(self, name: str, **changes: object) -> str:
        """Id of a new run with these values in its form."""
        return self.create_run(
            name=name, parameters={"changes": {"name": name, **changes}}
        )

    def retry(self, run: str) -> None:
        """As Retry on its page does."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry"}
        self.post(f"flow_runs/{run}/set_state", state=state)

    def headers(self) -> dict[str, str]:
        """With the token that the server asks for, as docs/prefect.md shows it."""
        self.wait(self._answers, "the server does not answer")
        token = httpx.get(
            f"{self.api}/csrf-token", params={"client": "test"}, timeout=60
        ).json()["token"]
        return {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "test"}

    def get(self, run: str) -> dict:
        answers: list[dict] = []

        def answered() -> bool:
            try:
                answers.append(super(Served, self).get(run))
            except httpx.HTTPError:  # the server was killed, and is not up again
                return False
            return "state_type" in answers[-1]

        self.wait(answered, "the server does not answer")
        return answers[-1]

    def states(self, run: str) -> list[str]:
        """Of a flow run and of its tasks."""
        return [*self.tasks(run), self.state(run)]

    def kill(self, *parts: str) -> None:
        """SIGKILL."""
        commands = [PARTS[part] for part in parts]
        killed = [
            pid
            for pid, line in processes_of(self.marker).items()
            if any(part in line for part in commands)
        ]
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def served_at(
    home: Path, settings: dict, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """`serve` of a configuration small.yaml; nothing is left of it."""
    (home / "small.yaml").write_text(yaml.safe_dump(settings))
    house = Served(
        home, home / "small.yaml", free_port(), "", variables=dict(environment or {})
    )
    try:
        house.serve()
        yield house
    finally:
        if "serve" in house.processes:
            house.end("serve")
        for pid in processes_of(house.marker):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _database(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite+aiosqlite:///{folder}/prefect.db"
    elif POSTGRES is None:
        pytest.skip(
            "Prefect's server is also tried on PostgreSQL: needs the server's programs on PATH"
        )
    else:
        with postgres("prefect", "secret", "postgres") as port:
            yield f"postgresql+asyncpg://prefect:secret@127.0.0.1:{port}/postgres"


@contextlib.contextmanager
def server_at(home: Path, settings: dict, database: str = DATABASE) -> Iterator[House]:
    """A server without a worker, and a configuration small.yaml; nothing is left of it."""
    config = home / "small.yaml"
    config.write_text(yaml.safe_dump(settings))
    with _database(database, home) as address:
        house = House(home, config, free_port(), address)
        try:
            house.begin_server()
            yield house
        finally:
            for name in ("serve", "worker", "server"):
                if name in house.processes:
                    house.end(name)
            for pid in processes_of(house.marker):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(request, tmp_path_factory) -> Iterator[House]:
    """For what is deployed, on the database that the test names; tests start a worker where they need one."""
    home = Path(os.path.realpath(tmp_path_factory.mktemp("server")))
    (home / "text").mkdir()
    for number in range(40):
        (home / "text" / f"{number}.txt").write_text(
            f"Text {number} is short, and said again and again. " * 20
        )
    data = {
        "files": ["text/*.txt"],
        "validation_fraction": 0.2,
        "sequence_length": 32,
        "tokenizer": {"vocab_size": 300},
    }
    train = CONFIG["train"] | {
        "max_steps": 4,
        "warmup_steps": 1,
        "eval_steps": 4,
        "save_steps": 2,
        "global_batch_size": 4,
    }
    train |= {"micro_batch_size": 4, "eval_tokens": 60}
    nightly = {
        "name": "nightly",
        "cron": "0 2 * * *",
        "overrides": ["runtime.name=nightly-{date}"],
    }
    weekly = {"name": "weekly", "cron": "0 3 * * 0", "timezone": "Europe/Berlin"}
    deployment = {"schedules": [nightly, weekly], "concurrency_limit": 1}
    settings = CONFIG | {"data": data, "train": train, "deployment": deployment}
    with server_at(home, settings, getattr(request, "param", DATABASE)) as house:
        yield house


@pytest.fixture(scope="session")
def house(tmp_path_factory) -> Iterator[House]:
    home = Path(os.path.realpath(tmp_path_factory.mktemp("house")))
    settings = CONFIG | {"environment": CONFIG["environment"] | {"nproc_per_node": 2}}
    minute = {"name": "every-minute", "cron": "* * * * *", "active": False}
    minute["overrides"] = [
        "runtime.name=by-cron-{date}-{time}",
        "train.max_steps=20",
        "train.warmup_steps=2",
    ]
    never = {"name": "leap-day", "cron": "0 0 29 2 *", "timezone": "Europe/Berlin"}
    settings["deployment"] = {"schedules": [minute, never], "concurrency_limit": 2}
    with server_at(home, settings) as house:
        house.begin_worker()
        yield house


@pytest.fixture
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(
            "the buttons of the page are pressed in a browser: needs Chromium or Chrome on PATH"
        )
    with Browser() as browser:
        yield browser
