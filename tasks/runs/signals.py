"""Requests to stop, which reach a process as signals."""

import math
import time
from collections.abc import Callable
from types import FrameType

# A scheduler signals every process of a job, and the job's script passes its own signal on: that is one request.
ONE_REQUEST_SECONDS = 1.0


def raises_once(kind: type[BaseException]) -> Callable[[int, FrameType | None], None]:
    """A signal handler that raises `kind`, and passes over what follows within a second, so that nothing breaks off the answer."""
    last = -math.inf

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > ONE_REQUEST_SECONDS:
            last = now
            raise kind

    return handler
