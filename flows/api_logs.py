"""Sends the stages' log lines to Prefect's run pages: about one per second, and every warning. The full logs are in the run's folder."""

import contextlib
import logging
import time
from collections.abc import Iterator

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler

SECONDS_BETWEEN = 1.0  # ten thousand lines delayed the end of a process by most of a minute


class ThrottledAPILogHandler(APILogHandler):
    """Passes at most one ordinary line in `SECONDS_BETWEEN`."""

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.next_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if record.levelno < logging.WARNING and now < self.next_at:
            return
        if FlowRunContext.get() is None:  # another thread, of no run
            return
        if record.levelno < logging.WARNING:
            self.next_at = now + SECONDS_BETWEEN
        super().emit(record)


@contextlib.contextmanager
def api_logs() -> Iterator[None]:
    """Inside, what the stages log is also sent to the Prefect API."""
    logger, handler = logging.getLogger("infini_llama"), ThrottledAPILogHandler()
    level = logger.level
    if not logger.isEnabledFor(logging.INFO):  # a Prefect worker, where no command has set the level
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
