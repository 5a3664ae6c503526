"""What a flow run sends to Prefect while it is executed: the stages' log lines, and heartbeats."""

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Iterator

from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.logging.handlers import APILogHandler
from prefect.settings import get_current_settings

from infini_llama.flows.settings import HEARTBEAT

log = logging.getLogger("infini_llama.prefect")
SECONDS_BETWEEN = (
    1.0  # between two lines of progress: ten thousand lines delayed the end of a process by most of a minute
)


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


@contextlib.contextmanager
def heartbeats(seconds: float = HEARTBEAT) -> Iterator[None]:
    """Inside, the flow run emits a heartbeat at once and then every `seconds`, unless Prefect does.

    They are Prefect's events, which the automation for silent runs watches, from a thread that ends at once: Prefect's own
    delays the end of a run by up to a second. A run that a worker executes has Prefect's own.
    """
    context = FlowRunContext.get()
    if get_current_settings().flows.heartbeat_frequency is not None or context is None or context.flow_run is None:
        yield
        return
    run = context.flow_run
    resource = {"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": run.name}
    flow = {
        "prefect.resource.id": f"prefect.flow.{run.flow_id}",
        "prefect.resource.role": "flow",
        "prefect.resource.name": context.flow.name if context.flow else "",
    }
    tags = [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in run.tags]
    ended = threading.Event()

    def emit() -> None:
        while True:
            try:
                emit_event("prefect.flow-run.heartbeat", resource=resource, related=[flow, *tags])
            except Exception as fault:  # the run itself needs none
                log.debug("a heartbeat could not be sent: %r", fault)
            if ended.wait(seconds):
                return

    # with the settings of this thread, the address of the server among them
    threading.Thread(target=contextvars.copy_context().run, args=(emit,), daemon=True, name="heartbeats").start()
    try:
        yield
    finally:
        ended.set()
