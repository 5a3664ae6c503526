"""Requests to stop, which reach a process as signals."""

import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

# A scheduler signals every process of a job, and the job's script passes its own signal on: that is one request.
ONE_REQUEST_SECONDS = 1.0


def debounced(kind: type[BaseException]) -> Callable[[int, FrameType | None], None]:
    """A signal handler that raises `kind`, and passes over what follows within a second, so that nothing breaks off the answer."""
    last = -math.inf

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > ONE_REQUEST_SECONDS:
            last = now
            raise kind

    return handler


def hangup_as_termination() -> None:
    """Makes SIGHUP (a closed terminal, a lost connection) whatever SIGTERM is, now or later; `nohup` is left alone.

    Output that went to the closed terminal goes nowhere from then on: writing there is an error, which would hide the exit code.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handler(number: int, frame: FrameType | None) -> None:
        for descriptor in terminals:
            if not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGHUP, handler)
