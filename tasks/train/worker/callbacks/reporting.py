"""Reporters in threads of their own: training waits for none of them longer than a limit."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Full, Queue
from typing import Protocol

from infini_llama.tasks.best_effort import best_effort

MOST_WAITING = 1000  # reports that wait for one reporter
START_SECONDS = 100.0  # W&B itself waits 90 s for its server
SYNC_SECONDS = 5.0
CLOSE_SECONDS = 30.0
REPORTING = (
    "Correct train.report_to before the next attempt, or remove what fails; "
    "metrics.jsonl has every number."
)
log = logging.getLogger("infini_llama.worker")


class Reporter(Protocol):
    """Draws curves; names are group/name, as in train/loss."""

    def scalars(self, values: dict[str, float], step: int) -> None: ...

    def texts(self, name: str, texts: list[str], step: int) -> None: ...

    def sync(self) -> None: ...

    def close(self, final: dict[str, float]) -> None: ...


Report = Callable[[Reporter], None]


class ReporterThread:
    """A reporter that a daemon thread calls, with a bounded queue.

    What it draws is only for people: one that fails is not called again in this attempt, and
    reports to one that is too slow are dropped.

    Args:
        name: of the reporter, in warnings.
        create: makes the reporter, in the thread.
        longest_wait: seconds that training may wait for it at most.

    Attributes:
        is_late: it was too slow once, of which there was a warning.
    """

    def __init__(
        self, name: str, create: Callable[[], Reporter], longest_wait: float
    ) -> None:
        self.name = name
        self.longest_wait = longest_wait
        self.is_late = False
        # Reports, each with what is set once the reporter was called.
        self.waiting: Queue[tuple[Report, threading.Event]] = Queue(MOST_WAITING)
        self.start: Future[None] = Future()
        threading.Thread(
            target=self._serve, args=(create,), name=name, daemon=True
        ).start()

    def has_started(self) -> bool:
        """Wait for the reporter; False, with a warning, if that takes too long.

        Raises:
            Exception: why it could not be made.
        """
        seconds = min(START_SECONDS, self.longest_wait)
        try:
            self.start.result(seconds)
        except TimeoutError:
            if self.start.done():  # its own
                raise
            self._warn(f"it has not started within {seconds:g} s and is not used")
            return False
        return True

    def put(self, report: Report) -> threading.Event:
        """Have the reporter called, after the reports before; the event is set once it was."""
        is_done = threading.Event()
        try:
            self.waiting.put_nowait((report, is_done))
        except Full:
            is_done.set()
            self._warn(
                f"{MOST_WAITING} reports wait for it, and further ones are dropped"
            )
        return is_done

    def wait(self, is_done: threading.Event, until: float) -> None:
        """Wait for a report until a moment of the monotonic clock; warn if it comes first."""
        if not is_done.wait(max(0.0, until - time.monotonic())):
            self._warn(
                "it does not respond, so the run continues without waiting for it"
            )

    def _warn(self, fault: str) -> None:
        if not self.is_late:
            self.is_late = True
            log.warning("reporting to %s: %s. %s", self.name, fault, REPORTING)

    def _serve(self, create: Callable[[], Reporter]) -> None:
        try:
            reporter = create()
        except BaseException as fault:
            self.start.set_exception(fault)
            return
        self.start.set_result(None)
        is_used = True
        while True:
            report, is_done = self.waiting.get()
            if is_used:
                is_used = self._has_taken(reporter, report)
            is_done.set()

    def _has_taken(self, reporter: Reporter, report: Report) -> bool:
        """Whether the report did not fail."""
        with best_effort(f"reporting to {self.name}", REPORTING):
            report(reporter)
            return True
        return False


def put_and_wait(
    reporters: list[ReporterThread], report: Report, seconds: float
) -> None:
    """Have every reporter called, and wait for all of them together."""
    until = time.monotonic() + seconds
    events = [reporter.put(report) for reporter in reporters]
    for reporter, is_done in zip(reporters, events, strict=True):
        reporter.wait(is_done, min(until, time.monotonic() + reporter.longest_wait))
