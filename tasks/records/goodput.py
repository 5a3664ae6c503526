"""Where a run's time went."""

from infini_llama.tasks.records.record import Record


class StartTime(Record):
    """When an attempt started. wall: seconds since 1970; monotonic: by the clock of `machine`, unless an older version wrote it."""

    wall: float
    monotonic: float = 0.0
    machine: str = ""


class Goodput(Record):
    """Seconds of each part of a run's wall time, over all its attempts.

    Attributes:
        lost_work: steps that a later attempt repeated, and the time between the last complete step of a failed attempt and its end.
        down: between attempts.
        wall: since the first attempt started.
        share: `training` divided by `wall`.
    """

    start_up: float = 0.0
    compile: float = 0.0
    data_wait: float = 0.0
    training: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0
    ending: float = 0.0
    lost_work: float = 0.0
    down: float = 0.0
    wall: float = 0.0
    share: float = 0.0

    def parts(self) -> dict[str, float]:
        """Seconds by the name of the part, without `wall` and `share`."""
        return self.model_dump(exclude={"wall", "share"})
