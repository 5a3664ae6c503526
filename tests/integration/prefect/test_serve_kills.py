"""kill -9 of each process of `serve` while a run trains: the weights of an undisturbed run, and nothing that only says Running."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from support.laboratory import COMMAND, CONFIG, processes_of
from support.services import free_port

from .conftest import House

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
PARTS = {
    "server": "allowed_hosts:create_app",
    "worker": "worker start --pool",
    "flow": "prefect.engine",
    "torchrun": "tasks.train.torchrun",
    "serve": f"{COMMAND} serve",
}


class Served(House):
    """`serve` with a server of its own."""

    def environment(self) -> dict[str, str]:
        return {
            name: value
            for name, value in super().environment().items()
            if not name.startswith("PREFECT_") or name in ("PREFECT_HOME", "PREFECT_SERVER_ANALYTICS_ENABLED")
        }

    def serve(self) -> None:
        self.begin_worker("--port", str(self.port))

    def headers(self) -> dict[str, str]:
        """With the token that the server asks for, as docs/prefect.md shows it."""
        self.wait(self._answers, 240, "the server does not answer")
        token = httpx.get(f"{self.api}/csrf-token", params={"client": "test"}, timeout=60).json()["token"]
        return {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "test"}

    def get(self, run: str) -> dict:
        answers: list[dict] = []

        def answered() -> bool:
            try:
                answers.append(super(Served, self).get(run))
            except httpx.HTTPError:  # the server was killed, and is not up again
                return False
            return "state_type" in answers[-1]

        self.wait(answered, 240, "the server does not answer")
        return answers[-1]

    def states(self, run: str) -> list[str]:
        """Of a flow run and of its tasks."""
        tasks = self.post("task_runs/filter", task_runs={}, flow_runs={"id": {"any_": [run]}})
        return [task["state_type"] for task in tasks] + [self.state(run)]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    home = Path(os.path.realpath(tmp_path_factory.mktemp("served")))
    train = CONFIG["train"] | {"max_steps": 120, "save_steps": 20, "eval_steps": 60}
    (home / "small.yaml").write_text(yaml.safe_dump(CONFIG | {"train": train}))
    house = Served(home, home / "small.yaml", free_port(), "")
    try:
        house.serve()
        yield house
    finally:
        if "serve" in house.processes:
            house.end("serve")
        for pid in processes_of(house.marker):
            os.kill(pid, signal.SIGKILL)


def weights(house: Served, name: str) -> str:
    return json.loads((house.home / "runs" / name / "summary.json").read_text())["weights_sha256"]


@pytest.fixture(scope="module")
def undisturbed(served) -> str:
    run = served.submit("undisturbed")
    assert served.wait_for(run, *FINAL, seconds=400)["state_type"] == "COMPLETED"
    return weights(served, "undisturbed")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_a_killed_process_costs_nothing(served, undisturbed, part):
    run = served.submit(part)
    served.wait_for_step(part, 20)
    killed = [pid for pid, command in processes_of(served.marker).items() if PARTS[part] in command]
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    if part == "serve":
        served.processes.pop("serve").wait(60)
        served.serve()
    if part in ("serve", "flow"):  # a person has to act; the rest mends itself
        served.wait_for(run, *FINAL, seconds=200)
        served.wait(lambda: set(served.states(run)) <= set(FINAL), 90, f"{served.states(run)}")
        run = served.submit(part)  # the same name resumes
    assert served.wait_for(run, *FINAL, seconds=400)["state_type"] == "COMPLETED"
    served.wait(lambda: set(served.states(run)) <= set(FINAL), 60, f"{served.states(run)}")
    assert weights(served, part) == undisturbed
    assert not served.processes_of_run(part)
