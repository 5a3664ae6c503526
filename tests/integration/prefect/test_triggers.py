"""Runs started by the form's Submit, by Prefect's command, by our own, and by cron; what their page says; what is refused."""

import json

import httpx

FIELD = "[...document.querySelectorAll('textarea,input')].find(one => one.value === 'small')"


def test_submit_in_a_browser_runs_and_logs_its_milestones(house, browser):
    deployment = house.deployment()
    browser.open(house.page(f"deployments/deployment/{deployment['id']}/run"))
    browser.wait_for("learning_rate")
    browser.fill(FIELD, "pressed")
    browser.click("button", "Submit")
    house.wait(
        lambda: house.runs(flow_runs={"name": {"any_": ["pressed"]}}),
        "no run of that name began",
    )
    (run,) = house.runs(flow_runs={"name": {"any_": ["pressed"]}})
    assert (
        house.wait_for(run["id"], "COMPLETED", "FAILED", "CRASHED")["state_type"]
        == "COMPLETED"
    )
    cards = house.artifacts(run["id"])
    assert set(cards) == {
        "dataset-small",
        "environment-small",
        "progress-small",
        "training-small",
    }
    assert cards["progress-small"]["data"] == 100
    browser.open(house.page(f"artifacts/artifact/{cards['training-small']['id']}"))
    browser.wait_for("Samples")
    assert (
        browser.run("document.querySelector('img[src^=data]').naturalWidth") == 960
    ), "the curve is shown"


def test_a_rule_between_keys_fails_the_run_with_its_sentence(house):
    changes = {"name": "both", "global_batch_size": 7}
    run = house.create_run(parameters={"changes": changes})
    ended = house.wait_for(run, "FAILED", "CRASHED", "COMPLETED")
    assert (
        ended["state_type"] == "FAILED"
        and "train.global_batch_size=7" in ended["state"]["message"]
    )


def test_prefects_own_command_runs_it(house):
    changes = {"runtime": {"name": "commanded"}, "train": {"seed": 7}}  # as in a file
    house.cli(
        "deployment", "run", "pretrain/small", "-p", f"changes={json.dumps(changes)}"
    )
    (run,) = house.runs(
        flow_runs={"deployment_id": {"any_": [house.deployment()["id"]]}},
        sort="START_TIME_DESC",
        limit=1,
    )
    assert (
        house.wait_for(run["id"], "COMPLETED", "FAILED", "CRASHED")["state_type"]
        == "COMPLETED"
    )
    assert house.get(run["id"])["name"] == "commanded"
    assert "seed: 7" in (house.home / "runs/commanded/config.yaml").read_text()


def test_cron_runs_it_under_a_name_and_settings_of_its_own(house):
    deployment = house.deployment()
    (minute,) = [
        one for one in deployment["schedules"] if one["slug"] == "every-minute"
    ]
    address = f"{house.api}/deployments/{deployment['id']}/schedules/{minute['id']}"
    # Prefect 3.8 forgets a schedule's parameters where they are not sent along: as `prefect deployment schedule resume` does.
    httpx.patch(address, json={"active": True}, timeout=30).raise_for_status()

    def by_cron() -> list[dict]:
        return house.runs(
            flow_runs={
                "name": {"like_": "by-cron-"},
                "state": {"type": {"any_": ["COMPLETED"]}},
            }
        )

    try:
        house.wait(by_cron, "no run by cron was completed")
    finally:
        httpx.patch(address, json={"active": False}, timeout=30).raise_for_status()
    run = by_cron()[0]
    assert run["auto_scheduled"]
    assert (
        json.loads((house.home / "runs" / run["name"] / "summary.json").read_text())[
            "steps"
        ]
        == 20
    )
