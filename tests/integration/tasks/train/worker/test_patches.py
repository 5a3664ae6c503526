"""A worker applies the patches that its plan names, also where a person starts it."""

import json
import os
import sys

import pytest

from infini_llama.tasks.runs.run_folder import write_attempt_plan
from support.records import make_attempt, make_plan


@pytest.mark.parametrize("patches", [["rendezvous", "adam-weight-decay"], []])
def test_a_worker_started_by_hand_applies_and_reports_the_patches(
    server, tmp_path, patches
):
    write_attempt_plan(
        tmp_path,
        make_attempt(
            tmp_path, plan=make_plan(patches=patches, distributed_backend="none")
        ),
    )
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        name: value for name, value in os.environ.items() if name not in unset
    }
    command = [sys.executable, "-m", "infini_llama.tasks.train.worker", str(tmp_path)]
    code = server.run(command, environment, tmp_path / "printed")
    log = tmp_path / "rank-0.log"
    assert json.loads((tmp_path / "status-0.json").read_text())["state"] == "failed", (
        "there is no backend 'none'"
    )
    assert code == 70
    if patches:
        assert (
            log.read_text().count("applied patch ") == 2
            and "weight_decay=None" in log.read_text()
        )
    else:
        assert "KeyError" in log.read_text()


@pytest.mark.parametrize(("damaged", "code"), [(True, 65), (False, 70)])
def test_a_worker_that_cannot_start_leaves_a_status(server, tmp_path, damaged, code):
    write_attempt_plan(
        tmp_path, make_attempt(tmp_path, plan=make_plan(patches=["no-such-patch"]))
    )
    if damaged:
        (tmp_path / "plan.json").write_text("{}")
    command = [sys.executable, "-m", "infini_llama.tasks.train.worker", str(tmp_path)]
    ended = server.run(command, os.environ | {"RANK": "1"}, tmp_path / "printed")
    status = json.loads((tmp_path / "status-1.json").read_text())
    assert (status["state"], status["code"], ended) == ("failed", code, code)
    assert (
        status["error"]["traceback"]
        and "Traceback" in (tmp_path / "rank-1.log").read_text()
    )
