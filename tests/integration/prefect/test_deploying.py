"""Deploying: what does not differ is not touched, what was switched on the server stays, and late runs are executed once."""

import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import yaml

from infini_llama.flows.form import SHORT
from support.laboratory import COMMAND

pytestmark = pytest.mark.parametrize(
    "server", ["sqlite", "postgres"], indirect=True, scope="module"
)
ROOT = Path(__file__).parents[3]
MOVED_BY_WORKERS = (
    "status",
    "last_polled",
    "updated",
    "work_queue_id",
    "estimated_start_time_delta",
    "estimated_run_time",
)


def stored(server) -> dict[str, list[dict]]:
    """What the database holds of deployments, schedules, runs, automations, pools and limits, without what a worker's polling moves."""
    tables = (
        "deployments",
        "flow_runs",
        "automations",
        "work_pools",
        "v2/concurrency_limits",
    )
    content = {table: server.post(f"{table}/filter") for table in tables}
    for table, rows in content.items():
        for row in rows:
            for name in MOVED_BY_WORKERS if table != "automations" else ():
                row.pop(name, None)
        rows.sort(key=lambda row: row["id"])
    return content


def schedules(server) -> dict[str, dict]:
    return {schedule["slug"]: schedule for schedule in server.deployment()["schedules"]}


def switch(server, name: str, active: bool) -> None:
    """As Prefect's command does."""
    schedule = schedules(server)[name]
    address = f"{server.api}/deployments/{server.deployment()['id']}/schedules/{schedule['id']}"
    httpx.patch(address, json={"active": active}, timeout=30).raise_for_status()


def overdue(server, days: int) -> list[str]:
    """Ids of runs of the schedules that should have started in the last days, the oldest first."""
    now = datetime.now(UTC)
    span = {
        "start_time": (now - timedelta(days=days)).isoformat(),
        "end_time": now.isoformat(),
        "max_runs": 50,
    }
    server.post(
        f"deployments/{server.deployment()['id']}/schedule", **span, min_runs=50
    )
    late = server.runs(
        flow_runs={
            "expected_start_time": {"before_": now.isoformat()},
            "state": {"type": {"any_": ["SCHEDULED"]}},
        }
    )
    return [
        run["id"] for run in sorted(late, key=lambda run: run["expected_start_time"])
    ]


def test_deploying_again_and_serving_again_change_nothing(server):
    server.ours("deploy", str(server.config), "--gpus", "2")
    switch(server, "nightly", False)
    server.wait(
        lambda: len(server.runs()) >= 3,
        "the scheduler makes no runs of the weekly schedule",
    )
    before = stored(server)
    server.ours("deploy", str(server.config), "--gpus", "2")
    assert stored(server) == before
    server.begin_worker()
    server.end("serve")
    assert stored(server) == before
    assert "home" not in server.deployment()["parameters"]["config"]["runtime"], (
        "it is that of the machine that runs"
    )


def test_a_waiting_run_survives_deploying_again(server):
    server.ours("deploy", str(server.config))
    late = overdue(server, 8)
    assert late
    server.ours("deploy", str(server.config))
    assert {server.state(run) for run in late} == {"SCHEDULED"}
    for run in late:
        httpx.delete(f"{server.api}/flow_runs/{run}", timeout=30).raise_for_status()


def test_a_changed_file_is_deployed_and_keeps_paused_schedules(server):
    server.ours("deploy", str(server.config))
    switch(server, "nightly", False)
    before = schedules(server)["nightly"]["id"]
    address = f"{server.api}/deployments/{server.deployment()['id']}"
    made_in_ui = {"schedule": {"cron": "0 5 * * *", "timezone": "UTC"}, "active": True}
    for answer in (
        httpx.post(f"{address}/pause_deployment", timeout=30),
        httpx.post(f"{address}/schedules", json=[made_in_ui], timeout=30),
    ):
        answer.raise_for_status()
    settings = yaml.safe_load(server.config.read_text())
    settings["train"]["learning_rate"] = 0.002
    server.config.write_text(yaml.safe_dump(settings))
    server.ours("deploy", str(server.config))
    nightly = schedules(server)["nightly"]
    assert (
        server.deployment()["parameters"]["config"]["train"]["learning_rate"] == 0.002
    )
    assert server.deployment()["parameters"]["schedules"] == {
        "nightly": {"runtime": {"name": "nightly-{date}"}}
    }
    assert not nightly["active"] and nightly["id"] == before
    assert server.deployment()["paused"] and None not in schedules(server)
    httpx.post(f"{address}/resume_deployment", timeout=30).raise_for_status()

    settings["deployment"]["schedules"][0]["cron"] = "0 4 * * *"
    server.config.write_text(yaml.safe_dump(settings))
    server.ours("deploy", str(server.config))
    changed = schedules(server)["nightly"]
    assert (
        changed["id"] == nightly["id"]
        and changed["schedule"]["cron"] == "0 4 * * *"
        and changed["active"]
    )


def test_of_late_runs_the_newest_of_a_schedule_is_executed(server):
    server.ours("deploy", str(server.config))
    switch(server, "weekly", False)
    late = overdue(server, 4)
    assert len(late) >= 3
    server.begin_worker()
    final = {
        server.wait_for(run, "COMPLETED", "CANCELLED", "FAILED", "CRASHED")["id"]: run
        for run in late
    }
    assert [server.state(run) for run in final] == ["CANCELLED"] * (len(late) - 1) + [
        "COMPLETED"
    ]
    assert len(list((server.home / "runs").iterdir())) == 1, (
        "only one of them has begun"
    )
    earlier = overdue(server, 6)  # a worker may begin them after a later one
    assert len(earlier) >= 2
    for run in earlier:
        assert (
            server.wait_for(run, "COMPLETED", "CANCELLED")["state_type"] == "CANCELLED"
        )
    messages = [server.get(run)["state"]["message"] for run in [*late[:-1], *earlier]]
    assert all(
        message.startswith("Skipped: the run of the same schedule")
        for message in messages
    ), messages


def test_the_deployment_of_prefect_yaml_runs(server):
    """What the file says: test_deploy_files.py."""
    server.ours("deploy", str(server.config))  # the work pool
    file = ROOT / "deploy" / "prefect.yaml"
    server.cli(
        "--no-prompt", "deploy", "--all", "--prefect-file", str(file), folder=ROOT
    )
    stored = httpx.get(
        f"{server.api}/deployments/name/pretrain/pretrain", timeout=30
    ).json()
    sections = yaml.safe_load(server.config.read_text())
    del sections["deployment"]
    files = [str(server.home / "text" / "*.txt")]
    short = {
        name: sections.get(part, {}).pop(key, None)
        for name, (part, key) in SHORT.items()
    }
    changes = sections | {
        name: value for name, value in short.items() if value is not None
    }
    changes |= {"name": "by-prefect-yaml", "files": files}
    if "serve" not in server.processes:
        server.begin_worker()
    run = server.create_run(stored["id"], parameters={"changes": changes})
    ended = server.wait_for(run, "COMPLETED", "FAILED", "CRASHED")
    assert ended["state_type"] == "COMPLETED" and ended["name"] == "by-prefect-yaml", (
        ended["state"]
    )
    assert (server.home / "runs/by-prefect-yaml/summary.json").exists()


def test_a_worker_without_a_configuration_executes_what_is_deployed(server):
    if "serve" in server.processes:
        server.end("serve")
    server.ours("deploy", str(server.config))
    server.begin("serve", COMMAND, "serve")
    run = server.create_run(parameters={"changes": {"name": "by-another-worker"}})
    server.wait_for(run, "COMPLETED")
    server.end("serve", signal.SIGTERM)


def test_serve_starts_no_processes_for_a_pool_of_another_type(server):
    server.post("work_pools/", name="pods", type="kubernetes")
    settings = yaml.safe_load(server.config.read_text())
    settings["deployment"] = {"work_pool": "pods"}
    config = server.home / "pods.yaml"
    config.write_text(yaml.safe_dump(settings))
    process = server.begin("of-pods", COMMAND, "serve", str(config))
    assert process.wait(120) == 64
    assert "type kubernetes" in (server.home / "of-pods.log").read_text()
    del server.processes["of-pods"]
