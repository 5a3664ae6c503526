"""environment.json of a run: what its workers run on, and what later attempts keep."""

from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan, PinnedSettings
from infini_llama.tasks.records.record import Record


class PatchSummary(Record):
    """A patch that the run's workers apply. reference: where the fault is described upstream."""

    name: str
    fault: str
    reference: str


class EnvironmentRecord(Record):
    """Written as environment.json by the training stage, once it has locked the run.

    Attributes:
        pinned_at: ISO 8601, of the first attempt.
        plan: of the last attempt; values of `env` are masked.
    """

    pinned: PinnedSettings
    pinned_at: str
    plan: EnvironmentPlan
    patches: tuple[PatchSummary, ...] = ()
    facts: MachineFacts


class PatchedEnvironment(Record):
    """The result of patch-environment. plan: with the real values of `env`; record: to be written by the training stage."""

    plan: EnvironmentPlan
    record: EnvironmentRecord
