"""Another user's runs on the same server, while `serve` and `run` of this user are started, killed and ended for ten minutes.

The other user has a home folder, a work pool and processes of his own. Two of his flows have the name of ours: that of another program, and
infini-llama's.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from support.laboratory import COMMAND, CONFIG, inject

from .conftest import DATABASE, SLOW, House, server_at, slow_settings

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"),
    reason="root alone can start processes of another user",
)
DURATION = 600  # seconds
NOBODY = 65534
# With one capability: Python may be installed in a folder that only root may enter.
AS_NOBODY = [
    "setpriv",
    f"--reuid={NOBODY}",
    f"--regid={NOBODY}",
    "--clear-groups",
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
]
# Programs that sleep until there is a file "released": a flow that is called, with the name that it is given.
CALLED = """
import sys, time
from pathlib import Path
from prefect import flow

@flow(name=sys.argv[1])
def sleeps():
    while not Path("released").exists():
        time.sleep(0.5)

sleeps()
"""
# One that is served, and Pending as long as its module is imported.
SERVED = """
import time
from pathlib import Path
from prefect import flow

while __name__ != "__main__" and not Path("released").exists():
    time.sleep(0.5)

@flow
def begins_slowly():
    pass

if __name__ == "__main__":
    begins_slowly.serve("of-another", pause_on_shutdown=False)
"""
# For every Python that executes a flow run for a worker, before anything else.
SLOW_MACHINE = """
import os, time
while "PREFECT__FLOW_RUN_ID" in os.environ and not os.path.exists(os.environ["RELEASED"]):
    time.sleep(0.5)
"""
# Steps of a fifth of a second until the file is there.
SLOW_UNTIL = SLOW.replace(
    "time.sleep(0.2)",
    'time.sleep(0 if os.path.exists(os.environ["RELEASED"]) else 0.2)',
)


@dataclass
class Other:
    """The other user, with a folder of his own."""

    house: House
    folder: Path

    def environment(self) -> dict[str, str]:
        return self.house.environment() | {
            "HOME": str(self.folder),
            "PREFECT_HOME": str(self.folder / "prefect"),
            "INFINI_LLAMA_HOME": str(self.folder / "workspace"),
            "RELEASED": str(self.folder / "released"),
        }

    def begin(self, name: str, *command: str) -> None:
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            subprocess.Popen(
                [*AS_NOBODY, *command],
                env=self.environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def write(self, name: str, text: str) -> str:
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return str(file)

    def release(self) -> None:
        (self.folder / "released").touch()


def run_of(house: House, flow: str, *states: str, **filters: object) -> str:
    """ID of the only run of a flow, once it is in one of these states."""
    named = {"flows": {"name": {"any_": [flow]}}} | filters
    house.wait(
        lambda: any(run["state_type"] in states for run in house.runs(**named)),
        f"{flow} is never {states}",
    )
    (run,) = house.runs(**named)
    return run["id"]


def pending_run_of(house: House, deployment: str) -> str:
    """ID of a new run of a deployment, which a process is started for."""
    named = {"name": {"any_": [deployment]}}
    house.wait(
        lambda: house.post("deployments/filter", deployments=named),
        "it is not deployed",
    )
    (deployed,) = house.post("deployments/filter", deployments=named)
    run = house.create_run(deployed["id"])
    house.wait_for(run, "PENDING")
    return run


def history(house: House, run: str) -> list[str]:
    """The types of all its states; those of a run that waits for its time are one."""
    query = {"flow_run_id": run}
    states = httpx.get(f"{house.api}/flow_run_states/", params=query, timeout=60).json()
    types = [
        state["type"] for state in sorted(states, key=lambda state: state["timestamp"])
    ]
    return [new for old, new in zip(["", *types], types, strict=False) if new != old]


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    """A server and our configuration, whose runs need more than ten seconds."""
    home = Path(os.path.realpath(tmp_path_factory.mktemp("ours")))
    settings = slow_settings(home, max_steps=60, save_steps=10, eval_steps=60)
    with server_at(home, settings, DATABASE) as house:
        yield house


@pytest.fixture(scope="module")
def other(house) -> Iterator[Other]:
    with tempfile.TemporaryDirectory(
        prefix="other-", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o777)
        other = Other(house, Path(os.path.realpath(folder)))
        yield other
        other.release()
        for command in ("worker start", "served.py"):
            for pid in processes_with(other.folder, command):
                os.kill(pid, signal.SIGTERM)


def processes_with(folder: Path, command: str) -> list[int]:
    """Processes that work in `folder`, and whose command line contains `command`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if (process / "cwd").readlink() == folder and command in line:
                found.append(int(process.name))
    return found


def begin_runs(other: Other) -> dict[str, str]:
    """The states of the other user's runs by their IDs: he begins one of each kind."""
    house = other.house
    python = sys.executable
    program = other.write("called.py", CALLED)
    other.begin("plain", python, program, "plain")
    other.begin("same-name", python, program, "pretrain")
    runs = {run_of(house, "plain", "RUNNING"): "RUNNING"}
    runs[run_of(house, "pretrain", "RUNNING")] = "RUNNING"
    other.begin("served", python, other.write("served.py", SERVED))
    runs[pending_run_of(house, "of-another")] = "PENDING"
    return runs | begin_our_flow(other)


def begin_our_flow(other: Other) -> dict[str, str]:
    """He trains with `run`, and has a deployment in a work pool of his own."""
    house = other.house
    hook = inject(other.folder, "infini_llama.tasks.train.worker.trainer", SLOW_UNTIL)
    env = {"PYTHONPATH": hook.partition("=")[2]}
    settings = CONFIG | {
        "train": CONFIG["train"]
        | {"max_steps": 10 * DURATION, "save_steps": 1000, "eval_steps": 10 * DURATION},
        "environment": CONFIG["environment"] | {"env": env},
        "deployment": {"work_pool": "of-another"},
    }
    config = other.write("trained.yaml", yaml.safe_dump(settings))
    other.begin("run", COMMAND, "run", config, "runtime.name=his")
    his = {"flow_runs": {"name": {"any_": ["his"]}}}
    runs = {run_of(house, "pretrain", "RUNNING", **his): "RUNNING"}
    small = settings | {
        "train": settings["train"] | {"max_steps": 10, "eval_steps": 10}
    }
    file = other.write("deployed.yaml", yaml.safe_dump(small))
    slow_machine = Path(
        other.write("slow-machine/sitecustomize.py", SLOW_MACHINE)
    ).parent
    path = os.pathsep.join(
        [str(slow_machine), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    subprocess.run(
        [*AS_NOBODY, COMMAND, "deploy", file],
        env=other.environment() | {"PYTHONPATH": path},
        cwd=other.folder,
        check=True,
        timeout=300,
    )
    worker = (
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        "of-another",
    )
    other.begin("worker", *worker)
    return runs | {pending_run_of(house, "deployed"): "PENDING"}


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(60)


def serve_and_be_killed(house: House, name: str) -> None:
    """`serve` and all its processes are killed while a run trains; the next one marks the run, and is ended."""
    house.begin_worker()
    run = house.submit(name)
    house.wait_for_step(name, 10)
    kill(house.processes.pop("serve"))
    house.wait(lambda: not house.processes_of_run(name), "its workers go on")
    house.begin_worker()
    house.wait_for(run, "CRASHED")
    time.sleep(35)  # two looks at the states of all runs
    house.end("serve")


def run_and_be_killed(house: House, name: str) -> None:
    """`run` is killed while it trains; the next one marks its flow run, and completes."""
    command = (COMMAND, "run", str(house.config), f"runtime.name={name}")
    first = house.begin("run", *command)
    house.wait_for_step(name, 10)
    kill(first)
    house.wait(lambda: not house.processes_of_run(name), "its workers go on")
    assert house.begin("run", *command).wait(600) == 0, house.logs()
    named = house.runs(flow_runs={"name": {"any_": [name]}})
    assert sorted(run["state_type"] for run in named) == ["COMPLETED", "CRASHED"]


def test_runs_of_another_user_are_left_alone(house, other):
    runs = begin_runs(other)
    histories = {run: history(house, run) for run in runs}
    actions: list[Callable[[House, str], None]] = [
        serve_and_be_killed,
        run_and_be_killed,
    ]
    end = time.monotonic() + DURATION
    count = 0
    while time.monotonic() < end or count < len(actions):
        actions[count % len(actions)](house, f"ours-{count}")
        count += 1
        assert {run: house.state(run) for run in runs} == runs
    assert {run: history(house, run) for run in runs} == histories
    other.release()
    for run, state in runs.items():
        assert house.wait_for(run, "COMPLETED", "FAILED", "CRASHED", "CANCELLED")[
            "state_type"
        ] == ("COMPLETED"), house.get(run)["state"]
        since = ["COMPLETED"] if state == "RUNNING" else ["RUNNING", "COMPLETED"]
        assert history(house, run) == histories[run] + since
