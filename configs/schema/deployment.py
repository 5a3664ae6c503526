"""How a configuration is offered on a Prefect server: read by `serve` and `deploy`, no part of a run."""

from __future__ import annotations

from typing import Annotated, Literal
from zoneinfo import available_timezones

from pydantic import Field, field_validator, model_validator

from infini_llama.configs.schema.section import Section

SLUG = r"^[a-z0-9][a-z0-9-]{0,99}$"
FIVE_FIELDS = r"^\s*\S+(\s+\S+){4}\s*$"


class ScheduleConfig(Section):
    """When runs start by themselves, and what they set differently."""

    name: Annotated[str, Field(pattern=SLUG)] = Field(
        title="Name", description="What this schedule is called; deploying again changes the schedule of this name."
    )
    cron: Annotated[str, Field(pattern=FIVE_FIELDS)] = Field(
        title="Cron", description="Minute, hour, day of the month, month and day of the week, for example '0 2 * * *'."
    )
    timezone: str = Field(
        default="UTC", title="Time zone", description="Where those hours are, for example Asia/Tokyo."
    )
    active: bool = Field(default=True, title="Active", description="Whether it is switched on when it is deployed.")
    overrides: list[str] = Field(
        default_factory=list,
        title="Overrides",
        description="What its runs set, as key=value, for example 'runtime.name=nightly-{date}'.",
    )

    @field_validator("timezone")
    @classmethod
    def _known(cls, timezone: str) -> str:
        if timezone not in available_timezones():
            raise ValueError(f"timezone={timezone} is not known; give a name such as Europe/Berlin, or UTC")
        return timezone


class DeploymentConfig(Section):
    """How the configuration is offered on a Prefect server."""

    name: Annotated[str, Field(pattern=SLUG)] | None = Field(
        default=None, title="Deployment", description="Its name on the server; default: the file's name."
    )
    work_pool: Annotated[str, Field(pattern=SLUG)] = Field(
        default="infini-llama", title="Work pool", description="Where its runs wait for a worker."
    )
    concurrency_limit: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Runs at a time",
        description="How many runs of it may be under way at once; null: any number.",
    )
    on_collision: Literal["enqueue", "cancel_new"] = Field(
        default="enqueue",
        title="One run too many",
        description="enqueue: it waits for its turn; cancel_new: it is cancelled, and the next schedule has its turn.",
    )
    schedules: list[ScheduleConfig] = Field(
        default_factory=list, title="Schedules", description="When runs start by themselves."
    )

    @model_validator(mode="after")
    def _schedules_differ(self) -> DeploymentConfig:
        names = [schedule.name for schedule in self.schedules]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"schedules has the name {', '.join(sorted(twice))} twice; each needs a name of its own")
        return self
