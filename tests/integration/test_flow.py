"""The same through Prefect: retries inside one flow run, a killed flow, and a second run that does nothing again."""

import json
import os
import random
import sqlite3
import subprocess
import sys

import pytest

from support.laboratory import ONE_FAULT, SOFTMAX_2, inject, kill

SECRET = "hunter2"
# Every rank has the secret.
FAULT = ONE_FAULT.format(before='assert os.environ["DBPASSWORD"] == "2retnuh"[::-1]')

SUBFLOW = """
import json, sys
from pathlib import Path
from infini_llama.flows.server import api_for_run

with api_for_run(Path(sys.argv[1])):
    from prefect import flow
    from prefect.client.orchestration import get_client
    from infini_llama.configs.loading import parse_config
    from infini_llama.flows import pretrain as module

    environment = {"env": {"DBPASSWORD": sys.argv[2], "NCCL_DEBUG": "INFO"}}
    settings = {"data": {"files": ["missing.txt"]}, "environment": environment}
    passed = []

    def note_variables(config, stages, invocation):
        passed.append(config.environment.env)
        raise RuntimeError

    module.run_stages = note_variables

    @flow
    def nightly():
        module.pretrain(parse_config(settings), return_state=True)
        module.pretrain(settings, return_state=True)
        module.pretrain(parse_config(settings), {"environment": environment}, return_state=True)

    nightly()
    with get_client(sync_client=True) as client:
        runs = [run for run in client.read_flow_runs() if run.parent_task_run_id]
    tags = [run.tags for run in runs]
    parameters = [run.parameters for run in runs]
    print(json.dumps({"tags": tags, "parameters": parameters, "passed": passed}))
"""


def task_states(home) -> list[tuple[str, str]]:
    """(task, state) of every task run that Prefect's own database knows, oldest first."""
    with sqlite3.connect(
        f"file:{home}/prefect/prefect.db?mode=ro", uri=True
    ) as database:
        query = "select task_run.name, task_run_state.name from task_run join task_run_state on task_run.state_id = task_run_state.id"
        return [
            (name, state)
            for name, state in database.execute(query + " order by task_run.created")
        ]


def test_a_worker_that_raises_is_retried_from_the_newest_checkpoint(
    lab, calm_softmax_2, tmp_path
):
    fault = inject(tmp_path, "infini_llama.tasks.train.worker.trainer", FAULT)
    started = lab.start(
        "raises",
        *SOFTMAX_2,
        fault,
        f"environment.env.DBPASSWORD={SECRET}",
        direct=False,
    )
    assert started.wait() == 0, started.log.read_text()
    assert not started.processes(), "processes were left behind"
    first, second = lab.attempts("raises")
    assert (first.kind, second.kind, second.from_step) == ("failed", "done", 20)
    assert "the injected fault" in first.message
    assert first.invocation == second.invocation, "one process, one flow run"
    assert started.log.read_text().count("nothing to do") == 1, "preprocess ran once"
    written = [
        path
        for path in lab.home.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert not written, "a secret is in a file; Prefect's database is one of them"
    lab.assert_same("raises", calm_softmax_2)


def test_a_killed_flow_run_again_and_once_more(lab, calm_softmax_2):
    started = lab.start("flow", *SOFTMAX_2, direct=False)
    lab.wait_for_step("flow", random.Random(5).randint(5, 40), started)
    kill(started.process.pid)
    started.wait()
    lab.finish("flow", *SOFTMAX_2, direct=False)  # asserts that nothing is left behind
    assert not started.processes(), "the killed flow's server or workers are left"
    summary = lab.assert_same("flow", calm_softmax_2)

    states = task_states(lab.home)
    assert {state for name, state in states if name.startswith("preprocess")} == {
        "Cached"
    }, states
    before = len(states)
    again = lab.start("flow", *SOFTMAX_2, direct=False)
    assert again.wait() == 0, again.log.read_text()
    assert "finished" in again.log.read_text()
    assert not task_states(lab.home)[before:], (
        "a server was started to record that there was nothing to do"
    )
    assert summary["attempts"] == len(
        list((lab.run_dir("flow") / "logs").glob("attempt-*"))
    ), "training started again"


@pytest.fixture(scope="module")
def subflows(tmp_path_factory) -> dict:
    """What SUBFLOW prints of its subflows."""
    home = tmp_path_factory.mktemp("subflows")
    variables = {
        name: value for name, value in os.environ.items() if "PREFECT_" not in name
    }
    done = subprocess.run(
        [sys.executable, "-c", SUBFLOW, str(home), SECRET],
        env=variables | {"HOME": str(home), "INFINI_LLAMA_HOME": str(home)},
        cwd=home,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_subflow_of_another_flow_has_the_tag_that_automations_match(subflows):
    assert subflows["tags"] == 3 * [["infini-llama"]]


def test_a_call_from_python_stores_no_secret_and_keeps_it(subflows):
    for parameters in subflows["parameters"]:
        assert SECRET not in json.dumps(parameters)
        variables = parameters["config"]["environment"]["env"]
        assert variables == {"NCCL_DEBUG": "INFO"}
    assert subflows["passed"] == 3 * [{"DBPASSWORD": SECRET, "NCCL_DEBUG": "INFO"}]
