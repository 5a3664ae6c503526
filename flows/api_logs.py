"""Sends the stages' log lines to Prefect's run pages: progress about once per second, and everything else. The full logs are files."""

import contextlib
import logging
import time
from collections.abc import Iterator

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler

SECONDS_BETWEEN = 1.0  # ten thousand lines delayed the end of a process by most of a minute


class ThrottledAPILogHandler(APILogHandler):
    """Passes at most one progress record (`extra={"progress": …}`) in `SECONDS_BETWEEN`, and every other record."""

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.next_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if FlowRunContext.get() is None:  # another thread, of no run
            return
        if getattr(record, "progress", None) is not None and record.levelno < logging.WARNING:
            now = time.monotonic()
            if now < self.next_at:
                return
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
