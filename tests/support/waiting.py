"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], seconds: float = 120.0, what: str = ""
) -> object:
    """Look every 10 ms until `condition` is true, and return its value; an AssertionError where it takes too long."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, what or f"waited {seconds:g} s in vain"
        time.sleep(0.01)
    return value
