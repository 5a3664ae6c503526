"""A schedule: what a deployment keeps of its overrides, and the settings and names of its runs."""

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest
from prefect.client.schemas.objects import CreatedBy, FlowRun
from prefect.server.schemas.schedules import CronSchedule
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Completed,
    Crashed,
    Paused,
    Pending,
    Running,
    Scheduled,
)

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import load_config
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows import scheduled
from infini_llama.flows.deployments import (
    _delete_other_schedules,
    _write_schedules,
    read_deployment,
    read_deployments,
)
from infini_llama.flows.form import SHORT
from infini_llama.flows.naming import run_name
from infini_llama.flows.pretrain import pretrain
from infini_llama.flows.scheduled import Schedule
from infini_llama.flows.starts import Start

OVERRIDES = [
    "runtime.name=nightly-{date}",
    "train.num_epochs=2",
    "data.tokenizer.vocab_size=300",
]
FILE = """\
data: {source: python-stdlib}
deployment:
  schedules:
    - {name: nightly, cron: "0 2 * * *", overrides: ["runtime.name=nightly-{date}", "train.num_epochs=2", data.tokenizer.vocab_size=300]}
    - {name: plain, cron: "0 3 * * *"}
"""


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    yield
    time.tzset()  # once monkeypatch has restored TZ


@pytest.fixture
def file(tmp_path):
    (tmp_path / "small.yaml").write_text(FILE)
    return tmp_path / "small.yaml"


@pytest.mark.parametrize(
    ("schedule", "overrides"), [("nightly", OVERRIDES), ("plain", []), (None, [])]
)
def test_a_run_of_a_schedule_has_its_overrides(file, monkeypatch, schedule, overrides):
    deployment = read_deployment(str(file))
    assert set(deployment.schedules) == {"nightly"}
    monkeypatch.setattr(
        scheduled, "_schedule", lambda: schedule and Schedule(schedule, "UTC")
    )
    without = {"deployment"}
    config = scheduled.with_schedule(deployment.config, deployment.schedules)
    assert config.model_dump(exclude=without) == load_config(
        file, overrides
    ).model_dump(exclude=without)


def test_a_run_of_a_schedule_has_its_overrides_beside_the_values_of_the_form(
    file, monkeypatch
):
    """The deployment's form stores each value of its first section, also those that are unchanged."""

    class Claimed(Exception):
        """The end of the flow, with the configuration of its run."""

    def claim(_: Start, config: PipelineConfig) -> PipelineConfig:
        raise Claimed(config)

    deployment = read_deployment(str(file))
    stored = deployment.config.model_dump(mode="json", exclude={"deployment"})
    changes = {name: stored[section][key] for name, (section, key) in SHORT.items()}
    changes["learning_rate"] = 0.01
    monkeypatch.setattr(scheduled, "_schedule", lambda: Schedule("nightly", "UTC"))
    monkeypatch.setattr(Start, "claim", claim)
    with pytest.raises(Claimed) as claimed:
        pretrain.fn(deployment.config, changes, deployment.schedules)
    (config,) = claimed.value.args
    assert config.runtime.name == "nightly-{date}"
    assert (config.train.num_epochs, config.train.max_steps) == (2.0, None)
    assert config.train.learning_rate == 0.01


@pytest.mark.parametrize(
    "cron", ["30 2 * * *", "30 1 * * *", "15 0 * * *", "45 23 * * *"]
)
@pytest.mark.parametrize(
    ("first", "days"), [("2027-03-26", 5), ("2027-10-29", 5)]
)  # 28 March, 31 October: the clocks change
@pytest.mark.parametrize("machine", ["UTC", "Asia/Tokyo", "America/Los_Angeles"])
def test_a_daily_schedule_gives_each_date_of_its_time_zone_to_one_run(
    monkeypatch, cron, first, days, machine
):
    start = datetime.fromisoformat(first).replace(tzinfo=ZoneInfo("Europe/Berlin"))
    schedule = CronSchedule(cron=cron, timezone="Europe/Berlin")
    dates = asyncio.run(
        schedule.get_dates(start=start, end=start + timedelta(days=days))
    )
    monkeypatch.setattr(
        scheduled, "_schedule", lambda: Schedule("nightly", "Europe/Berlin")
    )
    monkeypatch.setenv("TZ", machine)
    time.tzset()
    names = []
    for date in dates:
        monkeypatch.setattr(
            scheduled,
            "flow_run",
            SimpleNamespace(scheduled_start_time=date.in_timezone("UTC")),
        )
        names.append(run_name("nightly-{date}", scheduled.due("nightly-{date}")))
    assert names == [
        f"nightly-{(start + timedelta(days=day)).date()}" for day in range(days)
    ]


def test_a_run_that_a_person_started_is_named_by_this_machine_s_clock(monkeypatch):
    monkeypatch.setattr(scheduled, "_schedule", lambda: None)
    monkeypatch.setattr(
        scheduled,
        "flow_run",
        SimpleNamespace(scheduled_start_time=datetime(2027, 3, 27, 23, 30, tzinfo=UTC)),
    )
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    assert (
        run_name("{date}-{time}", scheduled.due("{date}-{time}")) == "2027-03-28-083000"
    )


def test_a_run_of_a_deleted_schedule_fails_in_the_flow(file, monkeypatch):
    deployment = read_deployment(str(file))

    def deleted() -> Schedule:
        raise ConfigError("the schedule that created this run was deleted")

    monkeypatch.setattr(scheduled, "_schedule", deleted)
    with pytest.raises(ConfigError, match="was deleted"):
        scheduled.with_schedule(deployment.config, deployment.schedules)


@pytest.mark.parametrize(
    ("states", "is_skipped"),
    [
        ([Pending(), Running()], True),
        ([Pending(), Running(), Paused(), Scheduled(), Pending(), Running()], False),
        (
            [Pending(), Running(), Crashed(), AwaitingRetry(), Pending(), Running()],
            False,
        ),
        ([Pending(), Paused(), Scheduled(), Pending(), Running()], False),
        (
            [Scheduled(), Cancelled(), AwaitingRetry(), Pending(), Running()],
            False,
        ),
    ],
)
def test_a_late_run_is_skipped_unless_a_person_has_started_it_again(
    monkeypatch, states, is_skipped
):
    """By Resume or Retry; Prefect's number of runs does not count what Resume starts."""
    run, begun, waiting, newest = (
        FlowRun(
            flow_id=uuid4(),
            deployment_id=uuid4(),
            run_count=1,
            state=state,
            expected_start_time=datetime(2027, 1, day, tzinfo=UTC),
            created_by=CreatedBy(id=UUID(int=1), type="SCHEDULE"),
        )
        for day, state in enumerate((Running(), Running(), Scheduled(), Completed()), 1)
    )
    client = MagicMock(
        read_flow_run=Mock(return_value=run),
        read_flow_run_states=Mock(return_value=states),
        read_flow_runs=Mock(return_value=[newest, waiting, begun]),
    )
    client.__enter__.return_value = client
    monkeypatch.setattr(scheduled, "get_client", lambda **_: client)
    monkeypatch.setattr(scheduled, "flow_run", SimpleNamespace(id=str(run.id)))
    monkeypatch.setattr(scheduled, "deployment", SimpleNamespace(id="a"))
    assert (scheduled.superseded() is not None) == is_skipped
    cancelled = [call.args[0] for call in client.set_flow_run_state.call_args_list]
    assert cancelled == ([waiting.id] if is_skipped else [])


def test_schedules_that_the_file_lacks_are_deleted_also_those_without_a_name(file):
    """As the UI makes them."""
    config = read_deployment(str(file)).config.deployment
    kept = [
        SimpleNamespace(
            id=schedule.name, slug=schedule.name, active=True, schedule=None
        )
        for schedule in config.schedules
    ]
    others = [
        SimpleNamespace(id=name, slug=slug)
        for name, slug in (("a", None), ("b", None), ("c", "old"))
    ]
    client = Mock(read_deployment_schedules=Mock(return_value=[*kept, *others]))
    _delete_other_schedules(client, uuid4(), config.schedules)
    _write_schedules(client, uuid4(), config.schedules, keep_active=True)
    assert [
        call.args[1] for call in client.delete_deployment_schedule.call_args_list
    ] == [
        "a",
        "b",
        "c",
    ]
    assert [
        call.args[1] for call in client.update_deployment_schedule.call_args_list
    ] == [
        "nightly",
        "plain",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"0 2 * * *"', '"99 2 * * *"'),
        ('"0 2 * * *"', '"0 2 31 2 *"'),
        ("num_epochs=2", "nonsense=2"),
        ("num_epochs=2", "num_epochs=0"),
    ],
)
def test_a_wrong_schedule_is_refused_before_any_server_is_asked(file, old, new):
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError):
        read_deployment(str(file))


@pytest.mark.parametrize("cron", ["0 0 29 2 *", "*/5 * * * MON-FRI"])
def test_a_rare_or_busy_schedule_is_accepted(file, cron):
    file.write_text(FILE.replace("0 2 * * *", cron))
    assert read_deployment(str(file)).config.deployment.schedules[0].cron == cron


def test_two_files_of_one_name_are_refused(file, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "small.yml").write_text(FILE)
    with pytest.raises(ConfigError, match="pretrain/small"):
        read_deployments([str(file), str(tmp_path / "other" / "small.yml")])
    with pytest.raises(ConfigError, match="pretrain/small"):
        read_deployments([str(file), str(file)])


@pytest.mark.parametrize("name", ["50%", "a&b", "a<b>", "a?b", "a#b", "a.py"])
def test_a_file_whose_name_no_deployment_can_have_is_refused(file, name):
    with pytest.raises(ConfigError, match="rename"):
        read_deployments([str(file.rename(file.with_name(f"{name}.yaml")))])
