"""How a configuration is offered on a server: its own section, which is no part of a run and of the form of one."""

from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import DeploymentConfig, PipelineConfig, ScheduleConfig

GOOD = {"data": {"source": "python-stdlib"}}
NIGHTLY = {"name": "nightly", "cron": "0 2 * * *", "timezone": "Europe/Berlin"}


def with_schedules(*schedules: dict, **more: object) -> PipelineConfig:
    return parse_config(GOOD | {"deployment": {"schedules": list(schedules), **more}})


def test_schedules_have_parameters_of_their_own():
    weekly = NIGHTLY | {
        "name": "weekly",
        "cron": "0 3 * * 0",
        "overrides": ["train.max_steps=5000"],
        "active": False,
    }
    offered = with_schedules(NIGHTLY, weekly, concurrency_limit=1).deployment
    assert [schedule.name for schedule in offered.schedules] == ["nightly", "weekly"]
    assert (
        offered.schedules[1].overrides == ["train.max_steps=5000"]
        and not offered.schedules[1].active
    )
    assert (offered.concurrency_limit, offered.work_pool) == (1, "infini-llama")


def test_the_form_of_a_run_has_every_section_except_deployment():
    schema = PipelineConfig.model_json_schema()
    assert set(schema["properties"]) == set(PipelineConfig.model_fields) - {"deployment"}
    assert not any(
        "deployment" in name.lower() or "schedule" in name.lower() for name in schema["$defs"]
    )


def test_every_key_has_a_sentence_here_too():
    for section in (DeploymentConfig, ScheduleConfig):
        for name, field in section.model_fields.items():
            assert (field.description or "").endswith("."), name


def test_a_run_may_be_named_after_its_date():
    assert (
        parse_config(GOOD | {"runtime": {"name": "nightly-{date}"}}).runtime.name
        == "nightly-{date}"
    )
