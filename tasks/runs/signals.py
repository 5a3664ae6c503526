"""Requests to stop, which reach a process as signals."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

# Sent by schedulers before a time limit.
TIME_LIMIT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
# Requests to stop, beside Ctrl-C.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, *TIME_LIMIT_SIGNALS)
# A scheduler signals every process of a job, and the job's script passes its own signal on: that is
# one request.
ONE_REQUEST_SECONDS = 1.0


def debounced(kind: type[BaseException]) -> Callable[[int, FrameType | None], None]:
    """A signal handler that raises `kind`.

    It passes over what follows within a second, so that nothing breaks off the answer.
    """
    last = -math.inf

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > ONE_REQUEST_SECONDS:
            last = now
            raise kind

    return handler


def hangup_as_termination() -> None:
    """Make SIGHUP whatever SIGTERM is, now or later; `nohup` is left alone.

    A closed terminal and a lost connection send SIGHUP. Output that went to the closed terminal
    goes nowhere from then on: writing there is an error, which would hide the exit code.
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


def time_limits_as_termination() -> None:
    """Make each of `TIME_LIMIT_SIGNALS` whatever SIGTERM is, after a line that names the signal.

    Schedulers send them before a time limit ends. Without a handler, they end a process at once,
    and nothing is saved. For a rank, SIGUSR2 only requests its stacks (`run_rank`).
    """

    def handler(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        # Not a stream, which the interrupted code may be writing to.
        with suppress(OSError):
            os.write(
                2,
                f"infini-llama: received {name}: stopping, as after SIGTERM\n".encode(),
            )
        signal.raise_signal(signal.SIGTERM)

    for number in TIME_LIMIT_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class DeferredSignals:
    """A block in which requests to stop are only noted while they are held.

    The noted ones are handled at `release` and at the block's end. Signals without a handler of
    Python's are left as they are: ignored ones are so for the processes that are started inside,
    too.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.noted: list[int] = []

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def hold(self) -> None:
        """Note signals from here on.

        Outside the main thread, which alone handles them, there are none to note.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number not in self.handlers and callable(signal.getsignal(number)):
                    self.handlers[number] = signal.signal(
                        number, lambda number, _: self.noted.append(number)
                    )

    def release(self) -> None:
        """Handle signals as before, and those that were noted."""
        for number in list(self.handlers):
            signal.signal(number, self.handlers.pop(number))
        while self.noted:
            signal.raise_signal(self.noted.pop(0))
