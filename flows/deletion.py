"""The end of a run whose flow run is deleted on the server.

Its slot of a limit is free at once, another run may start beside it, and nothing on the server can
stop it any more.
"""

import contextlib
import contextvars
import logging
import os
import signal
import threading
from collections.abc import Iterator
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

POLL_SECONDS = 10.0
# Answers in a row: a single one may be of a proxy, or of a server that starts.
MISSING = 2
log = logging.getLogger("infini_llama.prefect")


@contextlib.contextmanager
def stopped_if_deleted(run: UUID) -> Iterator[None]:
    """Inside, this process is stopped as a cancellation does it once its flow run is deleted.

    That is a SIGTERM, which Prefect handles in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = threading.Event()
    # With Prefect's settings, which name the server.
    variables = contextvars.copy_context()
    arguments = (_watch, run, ended)
    threading.Thread(target=variables.run, args=arguments, name="deletion", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(run: UUID, ended: threading.Event) -> None:
    missing = 0
    while not ended.wait(POLL_SECONDS):
        missing = missing + 1 if _is_deleted(run) else 0
        if missing == MISSING and not ended.is_set():
            log.warning(
                "the flow run %s was deleted on the server; the run is stopped as by a "
                "cancellation. The same command resumes it.",
                run,
            )
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _is_deleted(run: UUID) -> bool:
    try:
        with get_client(sync_client=True) as client:
            client.read_flow_run(run)
    except ObjectNotFound:
        return True
    except Exception as fault:  # the server is down, and training goes on
        log.debug("the flow run cannot be read (%r)", fault)
    return False
