"""What starts the workers of an attempt and watches over them: torchrun on this machine, or a job of a cluster."""

from typing import Protocol


class Launched(Protocol):
    """The workers of one attempt, from their start to their end."""

    def poll(self) -> int | None:
        """The exit code once all has ended, negative for a signal; None while it runs."""
        ...

    def ask_to_stop(self, grace_period: float) -> None:
        """Lets every rank save at its next step boundary and waits for the end; after `grace_period` seconds everything is killed."""
        ...

    def end(self) -> None:
        """Kills what still runs, and returns once no rank is left."""
        ...
