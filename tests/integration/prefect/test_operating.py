"""Daily operation: the form, the page of a run, secrets by reference, notifications, and the retry policy that the engine must allow."""

import contextlib
import http.server
import json
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml

from support.laboratory import inject

ROOT = Path(__file__).parents[3]
SECRET = "hunter2"
# The run's name, the first key of the form.
FIELD = "document.querySelector('textarea')"
SAVE_BLOCK = "import sys; from prefect.blocks.system import Secret; Secret(value=sys.argv[1]).save('words', overwrite=True)"
HAS_SECRET = """
def change(module):
    assert os.environ["WORDS"] == "2retnuh"[::-1]
"""
RETRIES = """
import json, time
from types import SimpleNamespace
from prefect import flow
from infini_llama.configs.errors import TrainFailed
from infini_llama.tasks.report.artifact_keys import ArtifactKeys
from infini_llama.tasks.train import task
from infini_llama.tasks.train.retries import Retries

calls = []

def failing(*arguments):
    calls.append(time.monotonic())
    raise TrainFailed("the workers failed", exit_code=70)

task.stage.train = failing
launcher = SimpleNamespace(has_local_workers=False)
config = SimpleNamespace(environment=SimpleNamespace(started_by=launcher))

@flow
def training():
    policy = Retries(2, 1.5, lambda: 0 if len(calls) < 3 else 1)  # a checkpoint between the second and the third failure
    task.with_retries(policy)(config, None, SimpleNamespace(plan=None), "", False, ArtifactKeys("a", "a"))

state = training(return_state=True)
print(json.dumps({"gaps": [b - a for a, b in zip(calls, calls[1:])], "state": state.name}))
"""


@pytest.fixture(scope="module")
def deployed(server, tmp_path_factory):
    """The server with a deployment whose workers have a secret that is named by a block."""
    server.call(sys.executable, "-c", SAVE_BLOCK, SECRET)
    path = inject(
        tmp_path_factory.mktemp("path"),
        "infini_llama.tasks.train.worker.trainer",
        HAS_SECRET,
    ).partition("=")[2]
    settings = yaml.safe_load(server.config.read_text())
    settings["environment"]["env"] = {
        "PYTHONPATH": path,
        "WORDS": "{{ prefect.blocks.secret.words }}",
    }
    settings["deployment"]["schedules"] = []
    server.config.write_text(yaml.safe_dump(settings))
    server.ours("deploy", str(server.config))
    return server


def test_the_form_starts_with_what_people_set_and_sends_what_is_filled_in(
    deployed, browser
):
    """The form of the deployment in prefect.yaml, whose sections are folded."""
    file = ROOT / "deploy" / "prefect.yaml"
    deployed.cli(
        "--no-prompt", "deploy", "--all", "--prefect-file", str(file), folder=ROOT
    )
    deployment = httpx.get(
        f"{deployed.api}/deployments/name/pretrain/pretrain", timeout=30
    ).json()["id"]
    browser.open(deployed.page(f"deployments/deployment/{deployment}/run"))
    browser.wait_for("learning_rate (Optional)")
    words = browser.text()
    keys = (
        "name",
        "files",
        "hidden_size",
        "attention",
        "max_steps",
        "learning_rate",
        "device",
    )
    order = [*(f"{key} (Optional)" for key in keys), "As deployed", "Submit"]
    assert sorted(order, key=words.index) == order and "vocab_size" not in words
    tallest = browser.run(
        "Math.max(...[...document.querySelectorAll('*')].map(one => one.scrollHeight))"
    )
    assert tallest < 4 * browser.height
    browser.fill(FIELD, "pressed")
    browser.click("button", "Submit")
    wanted = {"flow_runs": {"deployment_id": {"any_": [deployment]}}}
    deployed.wait(lambda: deployed.runs(**wanted), "no run began")
    (run,) = deployed.runs(**wanted)
    httpx.delete(f"{deployed.api}/flow_runs/{run['id']}", timeout=30).raise_for_status()
    sent = run["parameters"]["changes"]
    assert {name: value for name, value in sent.items() if value is not None} == {
        "name": "pressed"
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": 0}, ["changes.max_steps", "minimum of 1"]),
        ({"attention": "soft"}, ["changes.attention", "infini"]),
        (
            {"environment": {"master_port": 70000}},
            ["changes.environment.master_port", "maximum of 65535"],
        ),
        ({"tran": {}}, ["tran"]),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(deployed, changes, words):
    address = (
        f"{deployed.api}/deployments/{deployed.deployment()['id']}/create_flow_run"
    )
    answer = httpx.post(address, json={"parameters": {"changes": changes}}, timeout=30)
    assert answer.status_code == 409 and all(word in answer.text for word in words), (
        answer.text
    )


def test_the_page_of_a_run_has_milestones_and_tags_but_no_secret(deployed):
    deployed.begin_worker()
    runs = {}
    for name in ("first", "second"):
        changes = {"name": name, "max_steps": 6, "train": {"save_steps": 2}}
        runs[name] = deployed.create_run(parameters={"changes": changes})
        ended = deployed.wait_for(runs[name], "COMPLETED", "FAILED", "CRASHED")
        assert ended["state_type"] == "COMPLETED", ended["state"]
    logs = deployed.post(
        "logs/filter", logs={"flow_run_id": {"any_": [runs["first"]]}}, limit=200
    )
    text = "\n".join(line["message"] for line in logs)
    assert all(
        words in text
        for words in (
            "attempt 1 starts",
            "step 4  validation",
            "step 6  validation",
            "committed at step 6",
            "finished",
        )
    ), text

    versions = deployed.post(
        "artifacts/filter", artifacts={"key": {"any_": ["training-small"]}}
    )
    assert [any(name in one["description"] for one in versions) for name in runs] == [
        True,
        True,
    ]
    tasks = deployed.post(
        "task_runs/filter", task_runs={"flow_run_id": {"any_": [runs["second"]]}}
    )
    assert {"verify-data-second", "patch-environment-second", "train-second"} <= {
        one["name"] for one in tasks
    }
    run = deployed.get(runs["second"])
    assert run["name"] == "second" and {
        "infini-llama",
        "deployment:small",
        "attention:softmax",
        "data:files",
    } <= set(run["tags"])
    server_files = deployed.home / "prefect-home"
    written = [
        path
        for path in deployed.home.rglob("*")
        if path.is_file() and server_files not in path.parents
    ]
    assert not [
        path
        for path in written
        if SECRET.encode() in path.read_bytes()
        and not path.name.startswith("prefect.db")
    ]
    assert SECRET not in json.dumps(run)


def test_a_notification_is_sent_for_ends(deployed):
    received: list[dict] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as hook:
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        for _ in range(2):  # again changes nothing
            deployed.call(
                sys.executable,
                str(ROOT / "deploy" / "notifications.py"),
                f"http://127.0.0.1:{hook.server_port}/",
            )
        known = [
            one
            for one in deployed.post("automations/filter")
            if one["name"] == "infini-llama-notifications"
        ]
        assert len(known) == 1
        time.sleep(5)  # the server's trigger service reads the automation
        for state in ("COMPLETED", "FAILED", "CRASHED"):
            # Which no worker takes up.
            run = deployed.create_run(state={"type": "PENDING"})
            state = {"type": state, "message": 'with "quotes"'}
            httpx.post(
                f"{deployed.api}/flow_runs/{run}/set_state",
                json={"state": state, "force": True},
                timeout=30,
            )
        with contextlib.suppress(AssertionError):
            deployed.wait(lambda: len(received) >= 3, "no POST")
        hook.shutdown()
    texts = sorted(one["text"].split(": ", 1)[1] for one in received)
    assert texts == [
        f'{name}. with "quotes"' for name in ("Completed", "Crashed", "Failed")
    ]


@pytest.mark.parametrize("server", ["sqlite", "postgres"], indirect=True)
def test_the_engine_consults_the_retry_policy_after_each_failure(server):
    """A thousand retries whose delay changes and whose end is decided by a condition: not in Prefect's documentation."""
    found = json.loads(server.call(sys.executable, "-c", RETRIES).splitlines()[-1])
    assert found["state"] == "Failed"
    assert len(found["gaps"]) == 4, "two retries at each of two checkpoints"
    assert all(
        gap >= delay
        for gap, delay in zip(found["gaps"], (1.5, 3.0, 1.5, 3.0), strict=True)
    ), found
    assert (
        found["gaps"][2] < found["gaps"][1] and found["gaps"][2] < found["gaps"][3]
    ), "a new checkpoint renews the delay"
