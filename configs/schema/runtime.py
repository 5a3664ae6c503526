"""The run's name and what happens around it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from infini_llama.configs.schema.section import Section

RUN_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]|\{date\}|\{time\}){0,99}$"


class RuntimeConfig(Section):
    """The run's name and what happens around it."""

    name: Annotated[str, Field(pattern=RUN_NAME)] = Field(
        default="run",
        title="Run name",
        description="Folder under runs/; the same name carries on the same run. {date} and {time} stand for when the run is due, so "
        "that each one is a run of its own.",
    )
    home: Path = Field(
        default_factory=lambda: Path(os.environ.get("INFINI_LLAMA_HOME", "workspace")),
        title="Home",
        description="Folder of datasets and runs; default $INFINI_LLAMA_HOME, else ./workspace.",
    )
    resume: str = Field(
        default="auto",
        title="Resume",
        description="auto: newest good checkpoint, else start; must: refuse to start anew; never: refuse a folder with checkpoints; "
        "best: the best checkpoint; or the path of a checkpoint.",
        min_length=1,
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3,
        title="Retries",
        description="Restarts of failed training without progress; the budget is renewed by every new checkpoint.",
    )
    retry_delay: Annotated[float, Field(ge=0)] = Field(
        default=5.0, title="Retry delay", description="Seconds before the first retry; doubled for each further one."
    )
    max_rollbacks: Annotated[int, Field(ge=0, le=100)] = Field(
        default=2,
        title="Rollbacks",
        description="How often a run that diverges goes back to the last good checkpoint and leaves out the samples since.",
    )
    hang_after: Annotated[float, Field(gt=0)] = Field(
        default=20.0,
        title="Hang after",
        description="Seconds that a worker may be silent beyond twice the longest time its step, evaluation or save has taken; half as "
        "many where its process is stopped.",
    )
    grace_period: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=25.0,
        title="Grace period",
        description="Seconds that workers have to save a checkpoint when the run is asked to stop; more where saves have been seen to "
        "take longer.",
    )
    orchestrator_grace: Annotated[float, Field(gt=5, le=86400)] | None = Field(
        default=None,
        title="Orchestrator's grace",
        description="Seconds between the orchestrator's request to stop and its SIGKILL (Kubernetes' terminationGracePeriodSeconds); a run "
        "that needs longer is refused; null: no limit.",
    )
