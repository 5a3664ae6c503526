"""The run's name, what happens when it fails or is stopped, and where copies of it are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from infini_llama.configs.reading import expanded
from infini_llama.configs.schema.section import PATH, Section, free

RUN_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]|\{date\}|\{time\}){0,99}$"
LONGEST_NAME = 100


def default_home() -> Path:
    """$INFINI_LLAMA_HOME; ./workspace where it is not set, or empty."""
    return expanded(os.environ.get("INFINI_LLAMA_HOME") or "workspace")


class RuntimeConfig(Section):
    """The run's name and how it is operated."""

    name: Annotated[str, Field(pattern=RUN_NAME)] = free(
        default="run",
        description="Name of the run and of its folder in runs/. The same name resumes the same "
        "run. {date} and {time} are replaced by the scheduled start, so that each start is a new "
        "run; a retry, a resume and a requeue are no new start.",
    )
    home: Path = free(
        is_path=True,
        default_factory=default_home,
        description="Folder of datasets and runs. Default: $INFINI_LLAMA_HOME, otherwise "
        "./workspace.",
    )
    resume: str = Field(
        default="auto",
        description="Where to start. auto: the newest valid checkpoint, otherwise step 0. must: "
        "fail if there is no checkpoint. never: fail if there are checkpoints. best: the best "
        "checkpoint. Or the path of a checkpoint.",
        min_length=1,
        json_schema_extra=PATH,
    )
    retries: Annotated[int, Field(ge=0, le=100)] = free(
        default=3,
        description="Maximum number of consecutive retries of failed training. Every new "
        "checkpoint resets the count.",
    )
    retry_delay: Annotated[float, Field(ge=0, le=1_000_000)] = free(
        default=5.0,
        description="Seconds before the first retry, doubled for each further one, up to ten "
        "minutes.",
    )
    max_rollbacks: Annotated[int, Field(ge=0, le=100)] = free(
        default=2,
        description="Maximum number of rollbacks of a diverged run to the last good checkpoint. "
        "The samples since that checkpoint are skipped. If training diverges again from there, an "
        "older checkpoint is used.",
    )
    rollback_to_start: bool = free(
        default=False,
        description="Allow a rollback to the start of the run where no checkpoint is old enough. "
        "Otherwise a run that has checkpoints ends (72).",
    )
    hang_timeout: Annotated[float, Field(gt=0)] = free(
        default=20.0,
        description="A worker is considered hung if its last heartbeat is older than this many "
        "seconds plus twice the longest measured time of its phase. Start-up, compilation, saves, "
        "samples, the end and phases not measured yet have 30 times as long. For a stopped "
        "process, half of this value is used.",
    )
    grace_period: Annotated[float, Field(gt=0, le=3600)] = free(
        default=25.0,
        description="Seconds that workers have to save a checkpoint after a stop signal. Extended "
        "if saves were measured to take longer.",
    )

    @field_validator("home", mode="before")
    @classmethod
    def _is_no_empty_text(cls, home: object) -> object:
        """Refuse what would be the working directory, as a shell makes of an unset variable."""
        if home == "":
            raise ValueError("it is empty; name a folder")
        return home

    @field_validator("name")
    @classmethod
    def _fits_with_date_and_time(cls, name: str) -> str:
        filled = name.replace("{date}", "2026-01-01").replace("{time}", "000000")
        if filled != name:
            filled += "-999"  # of another start of that date and time
        if len(filled) > LONGEST_NAME:
            raise ValueError(
                f"it has more than {LONGEST_NAME} characters once {{date}} and {{time}} are filled "
                "in; shorten it"
            )
        return name


class StorageConfig(Section):
    """The place that datasets and checkpoints are mirrored to."""

    mirror: Annotated[str, Field(min_length=1)] | None = free(
        is_path=True,
        default=None,
        description="A folder or bucket to copy committed datasets and checkpoints to, in the "
        "background, for example /mnt/backup or s3://bucket/project. An empty home folder is "
        "restored from it. Credentials come from the environment. null: none.",
    )
