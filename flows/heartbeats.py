"""Heartbeats of a flow run that a command executes, which the automation for silent runs watches.

They are Prefect's events, from a thread that ends at once: Prefect's own delays the end of a run by up to a second. A run that a
worker executes has Prefect's own.
"""

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator

from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.settings import get_current_settings

from infini_llama.flows.settings import HEARTBEAT

log = logging.getLogger("infini_llama.prefect")


@contextlib.contextmanager
def heartbeats(seconds: float = HEARTBEAT) -> Iterator[None]:
    """Inside, the flow run emits a heartbeat at once and then every `seconds`, unless Prefect does."""
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
