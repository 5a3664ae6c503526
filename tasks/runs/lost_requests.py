"""Requests to stop that Python loses: they arrive, and the process goes on."""

import _thread
import signal
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from infini_llama.tasks.runs.signals import ONE_REQUEST_SECONDS

# Nothing else uses it, and without a handler it is ignored.
WAKING_SIGNAL = signal.SIGURG
WAKING_SECONDS = 0.3
WAKING_TIMES = 5
# Set once a request to stop has reached the main thread in the innermost block.
stop_requested = threading.Event()


@contextmanager
def no_request_lost(*kinds: type[BaseException]) -> Generator[None]:
    """In this block, a request to stop has its effect wherever it finds the main thread.

    Outside the main thread, this does nothing.

    Args:
        kinds: what signal handlers raise: KeyboardInterrupt for SIGINT, any other for SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _woken_by_signals(), _sent_again_if_ignored(kinds):
        yield


@contextmanager
def _woken_by_signals() -> Generator[None]:
    """Wake the main thread after each signal.

    Python calls a signal handler between two instructions. A signal that arrives right before a
    call that waits, such as the sleep before a retry, is handled when that has ended. Another
    signal interrupts the call.
    """
    main = threading.get_ident()
    has_ended = threading.Event()
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def wake() -> None:
        while number := receiver.recv(1):
            if number[0] == WAKING_SIGNAL:
                continue
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                stop_requested.set()
            for _ in range(WAKING_TIMES):
                if not has_ended.wait(WAKING_SECONDS):
                    signal.pthread_kill(main, WAKING_SIGNAL)

    stop_requested.clear()
    handler = signal.signal(WAKING_SIGNAL, _do_nothing)
    waker = threading.Thread(target=wake, name="waker", daemon=True)
    waker.start()
    # From here on, Python writes the number of each signal that has a handler.
    former = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        has_ended.set()
        sender.shutdown(socket.SHUT_RDWR)
        waker.join()
        sender.close()
        receiver.close()
        signal.signal(WAKING_SIGNAL, handler)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


@contextmanager
def _sent_again_if_ignored(kinds: tuple[type[BaseException], ...]) -> Generator[None]:
    """Send the signal again whose handler's exception Python has ignored.

    In the callback of a weak reference and in `__del__`, an exception is only printed. A little
    later, the main thread is elsewhere.
    """
    main = threading.get_ident()
    report = sys.unraisablehook
    has_ended = threading.Event()

    def send_again(number: int) -> None:
        # Until then, `debounced` passes over it as the same request.
        if not has_ended.wait(2 * ONE_REQUEST_SECONDS):
            signal.pthread_kill(main, number)

    def send_again_or_report(ignored: "sys.UnraisableHookArgs") -> None:
        if not isinstance(ignored.exc_value, kinds):
            report(ignored)
            return
        is_interrupt = isinstance(ignored.exc_value, KeyboardInterrupt)
        number = signal.SIGINT if is_interrupt else signal.SIGTERM
        # threading.Thread takes locks, which the interrupted code may hold.
        _thread.start_new_thread(send_again, (number,))

    sys.unraisablehook = send_again_or_report
    try:
        yield
    finally:
        has_ended.set()
        sys.unraisablehook = report
