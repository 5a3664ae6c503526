"""environment.json of a run: what its workers run on, and what later attempts keep."""

from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, field_validator

from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.record import Record


class PinnedSettings(Record):
    """The settings that determine the bits of a result, beside seed and data. Defaults: what older versions ran with.

    Attributes:
        micro_batch_size, loss_chunk: None: an older version did not record them.
    """

    device: str
    nproc_per_node: int
    nnodes: int = 1
    precision: str
    attention_backend: str
    fuse_projections: str = "off"
    half_weights: str = "off"
    compile: str = "off"
    compile_mode: str = "default"
    micro_batch_size: int | None = None
    loss_chunk: int | None = None
    threads: int
    allocator: str = "system"


class PatchSummary(Record):
    """A patch that the run's workers apply. reference: where the fault is described upstream."""

    name: str
    fault: str
    reference: str


class Trial(Record):
    """One measurement of environment.tune.

    Attributes:
        tried: the settings; error: why there is no measurement.
        seconds: per forward and backward pass of an attention function; difference: from exact attention.
        first, step: seconds of the first step and of a later one; tokens_per_second: of all workers together.
    """

    tried: str
    error: str | None = None
    seconds: float | None = None
    difference: float | None = None
    tokens_per_second: float | None = None
    first: float | None = None
    step: float | None = None


class TuneResult(Record):
    """What environment.tune chose. seconds: spent; budget: allowed; cached: measured by an earlier run."""

    settings: dict[str, str | int]
    reasons: dict[str, str]
    trials: tuple[Trial, ...]
    seconds: float
    budget: float = 0.0
    cached: bool = False


class EnvironmentRecord(Record):
    """Written as environment.json by the training stage, once it has locked the run.

    Attributes:
        pinned_at: ISO 8601, of the first attempt.
        plan: of the last attempt; values of `env` are masked. None: of an older version.
        tuned: of the first attempt, under environment.tune.
    """

    pinned: PinnedSettings
    pinned_at: str
    plan: EnvironmentPlan | None = None
    patches: tuple[PatchSummary, ...] = ()
    tuned: TuneResult | None = None
    facts: MachineFacts

    @field_validator("plan", mode="wrap")
    @classmethod
    def _drop_older_plan(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> EnvironmentPlan | None:
        """The plan is only shown; what later attempts follow is `pinned`."""
        try:
            return validate(value)
        except ValidationError:
            return None


class PatchedEnvironment(Record):
    """The result of patch-environment. plan: with the real values of `env`; record: to be written by the training stage."""

    plan: EnvironmentPlan
    record: EnvironmentRecord
