"""A setting that a rule decides."""

from infini_llama.tasks.records.record import Record


class Decision(Record):
    """A setting that the configuration leaves open, its value, and the reason for it."""

    setting: str
    value: str
    reason: str
