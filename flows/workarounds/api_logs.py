"""The log lines of the stages on a run's page.

Prefect 3.9.1 sends each line before a process ends: ten thousand delay the end by most of a minute.
No issue upstream is known.

A line with a lone surrogate is lost, and those that are sent with it.

Needed with Prefect 3.9.1. Upstream: no issue is known. Test:
`test_a_lone_surrogate_cannot_be_sent`.
"""

import contextlib
import logging
import time
from collections.abc import Iterator

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler

from infini_llama.configs.errors import escaped

PROGRESS_SECONDS = 1.0  # between two lines of progress


class ThrottledAPILogHandler(APILogHandler):
    """Passes at most one progress record per `PROGRESS_SECONDS`, and every other record.

    A progress record has `extra={"progress": …}`.
    """

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.next_at = 0.0

    def format(self, record: logging.LogRecord) -> str:
        # A lone surrogate of a path could not be sent.
        return escaped(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        # In a thread of no run, Prefect would warn.
        if FlowRunContext.get() is None:
            return
        if (
            getattr(record, "progress", None) is not None
            and record.levelno < logging.WARNING
        ):
            now = time.monotonic()
            if now < self.next_at:
                return
            self.next_at = now + PROGRESS_SECONDS
        super().emit(record)


@contextlib.contextmanager
def api_logs() -> Iterator[None]:
    """Inside, what the stages log is also sent to the Prefect API."""
    logger = logging.getLogger("infini_llama")
    handler = ThrottledAPILogHandler()
    level = logger.level
    # In a Prefect worker, no command has set the level.
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
