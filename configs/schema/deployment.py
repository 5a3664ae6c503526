"""How a configuration is offered on a Prefect server: read by `serve` and `deploy`, no part of a run."""

from __future__ import annotations

from typing import Annotated, Literal
from zoneinfo import available_timezones

from pydantic import Field, field_validator, model_validator

from infini_llama.configs.schema.section import Section

SLUG = r"^[a-z0-9][a-z0-9-]{0,99}$"
FIVE_FIELDS = r"^\s*\S+(\s+\S+){4}\s*$"


class ScheduleConfig(Section):
    """When runs start automatically, and which keys they override."""

    name: Annotated[str, Field(pattern=SLUG)] = Field(
        title="Name", description="Name of the schedule. Deploying again updates the schedule of this name."
    )
    cron: Annotated[str, Field(pattern=FIVE_FIELDS)] = Field(
        title="Cron", description="Minute, hour, day of month, month and day of week, for example '0 2 * * *'."
    )
    timezone: str = Field(
        default="UTC", title="Time zone", description="Time zone of the cron expression, for example Asia/Tokyo."
    )
    active: bool = Field(
        default=True, title="Active", description="Whether the schedule is active when it is deployed."
    )
    overrides: list[str] = Field(
        default_factory=list,
        title="Overrides",
        description="Overrides for its runs, as key=value, for example 'runtime.name=nightly-{date}'.",
    )

    @field_validator("timezone")
    @classmethod
    def _known(cls, timezone: str) -> str:
        if timezone not in available_timezones():
            raise ValueError(f"timezone={timezone} is not known; give a name such as Europe/Berlin, or UTC")
        return timezone


class DeploymentConfig(Section):
    """How the configuration is deployed on a Prefect server."""

    name: Annotated[str, Field(pattern=SLUG)] | None = Field(
        default=None,
        title="Deployment",
        description="Name of the deployment on the server. Default: the name of the file.",
    )
    work_pool: Annotated[str, Field(pattern=SLUG)] = Field(
        default="infini-llama", title="Work pool", description="Work pool of the deployment."
    )
    concurrency_limit: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Concurrency limit",
        description="Maximum number of concurrent runs of the deployment. null: no limit.",
    )
    on_collision: Literal["enqueue", "cancel_new"] = Field(
        default="enqueue",
        title="Above the limit",
        description="What happens to a run that exceeds the limit. enqueue: it waits. cancel_new: it is cancelled.",
    )
    late_runs: Literal["newest", "all"] = Field(
        default="newest",
        title="Late runs",
        description="Scheduled runs that are due when a worker returns after an outage. newest: the newest run of each schedule is "
        "executed and the earlier ones are cancelled. all: every run is executed.",
    )
    schedules: list[ScheduleConfig] = Field(
        default_factory=list[ScheduleConfig], title="Schedules", description="Schedules that start runs automatically."
    )

    @model_validator(mode="after")
    def _schedules_differ(self) -> DeploymentConfig:
        names = [schedule.name for schedule in self.schedules]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"schedules has the name {', '.join(sorted(twice))} twice; names must be unique")
        return self
