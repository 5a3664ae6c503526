"""The section `deployment`: how a configuration is offered on a Prefect server.

It is read by `serve` and `deploy`, and is no part of a run.
"""

from __future__ import annotations

from typing import Annotated
from zoneinfo import available_timezones

from pydantic import Field, field_validator, model_validator

from infini_llama.configs.schema.section import Section

SLUG = r"^[a-z0-9][a-z0-9-]{0,99}$"
FIVE_FIELDS = r"^\s*\S+(\s+\S+){4}\s*$"


class ScheduleConfig(Section):
    """When runs start automatically, and which keys they override."""

    name: Annotated[str, Field(pattern=SLUG)] = Field(
        description="Name of the schedule. Deploying again updates the schedule of this name."
    )
    cron: Annotated[str, Field(pattern=FIVE_FIELDS)] = Field(
        description="Minute, hour, day of month, month and day of week, for example '0 2 * * *'."
    )
    timezone: str = Field(
        default="UTC",
        description="Time zone of the cron expression, for example Asia/Tokyo.",
    )
    active: bool = Field(
        default=True, description="Whether the schedule is active when it is deployed."
    )
    overrides: list[str] = Field(
        default_factory=list,
        description="Overrides for its runs, as key=value, for example "
        "'runtime.name=nightly-{date}'.",
    )

    @field_validator("timezone")
    @classmethod
    def _known(cls, timezone: str) -> str:
        if timezone not in available_timezones():
            raise ValueError(
                f"timezone={timezone} is not known; give a name such as Europe/Berlin, or UTC"
            )
        return timezone


class DeploymentConfig(Section):
    """How the configuration is deployed on a Prefect server."""

    work_pool: Annotated[str, Field(pattern=SLUG)] = Field(
        default="infini-llama", description="Work pool of the deployment."
    )
    concurrency_limit: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Maximum number of concurrent runs of the deployment; a run above it waits. "
        "null: no limit.",
    )
    schedules: list[ScheduleConfig] = Field(
        default_factory=list[ScheduleConfig],
        description="Schedules that start runs automatically.",
    )

    @model_validator(mode="after")
    def _schedules_differ(self) -> DeploymentConfig:
        names = [schedule.name for schedule in self.schedules]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(
                f"schedules has the name {', '.join(sorted(twice))} twice; names must be unique"
            )
        return self
