"""kill -9 of each process of `serve` while a run trains: the weights of an undisturbed run, and nothing that only says Running."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.laboratory import CONFIG

from .conftest import FINAL, PARTS, Served, served_at


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    home = Path(os.path.realpath(tmp_path_factory.mktemp("served")))
    train = CONFIG["train"] | {"max_steps": 120, "save_steps": 20, "eval_steps": 60}
    with served_at(home, CONFIG | {"train": train}) as house:
        yield house


def weights(house: Served, name: str) -> str:
    return json.loads((house.home / "runs" / name / "summary.json").read_text())["weights_sha256"]


@pytest.fixture(scope="module")
def undisturbed(served) -> str:
    run = served.submit("undisturbed")
    assert served.wait_for(run, *FINAL)["state_type"] == "COMPLETED"
    return weights(served, "undisturbed")


@pytest.mark.parametrize("part", PARTS)
def test_a_killed_process_costs_nothing(served, undisturbed, part):
    run = served.submit(part)
    served.wait_for_step(part, 20)
    served.kill(part)
    if part == "serve":
        served.processes.pop("serve").wait(60)
        served.serve()
    if part in ("serve", "flow"):  # a person has to act; the rest mends itself
        served.wait_for(run, *FINAL)
        served.wait(lambda: set(served.states(run)) <= set(FINAL), f"{served.states(run)}")
        run = served.submit(part)  # the same name resumes
    assert served.wait_for(run, *FINAL)["state_type"] == "COMPLETED"
    served.wait(lambda: set(served.states(run)) <= set(FINAL), f"{served.states(run)}")
    assert weights(served, part) == undisturbed
    assert not served.processes_of_run(part)
