import os
import signal
import sys
import threading
import time

import pytest

from infini_llama.tasks.runs.lost_requests import no_request_lost
from infini_llama.tasks.runs.signals import debounced


class Asked(BaseException):
    pass


class Asks:
    """Requests a stop while it is freed, where Python ignores exceptions."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self):
        os.kill(os.getpid(), self.number)
        time.sleep(0.01)


class Fails:
    def __del__(self):
        raise ValueError


@pytest.fixture(autouse=True)
def asked_by_sigterm():
    handler = signal.signal(signal.SIGTERM, debounced(Asked))
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGTERM, Asked), (signal.SIGINT, KeyboardInterrupt)],
)
def test_an_ignored_request_is_sent_again(number, kind):
    with pytest.raises(kind), no_request_lost(Asked, KeyboardInterrupt):
        Asks(number)
        time.sleep(60)


def test_a_waiting_main_thread_hears_a_signal_that_has_not_interrupted_it():
    """The signal arrives in another thread; Python's handlers run in the main thread alone."""
    released = threading.Event()

    def ask():
        time.sleep(0.5)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        time.sleep(30)
        released.set()

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(Asked), no_request_lost(Asked):
        released.wait()
    assert not released.is_set()


def test_after_the_block_nothing_is_sent_and_all_is_as_before(monkeypatch):
    monkeypatch.setattr(
        "infini_llama.tasks.runs.lost_requests.ONE_REQUEST_SECONDS", 0.05
    )
    hook = sys.unraisablehook
    handler = signal.getsignal(signal.SIGURG)
    threads = threading.active_count()
    with no_request_lost(Asked):
        Asks(signal.SIGTERM)
    assert sys.unraisablehook is hook
    assert signal.getsignal(signal.SIGURG) is handler
    assert signal.set_wakeup_fd(-1) == -1
    time.sleep(0.3)
    assert threading.active_count() == threads


def test_blocks_can_be_nested():
    with pytest.raises(Asked), no_request_lost(Asked):
        with no_request_lost(KeyError):
            pass
        Asks(signal.SIGTERM)
        time.sleep(60)


def test_other_ignored_exceptions_are_reported_as_before(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    with no_request_lost(Asked):
        Fails()
    Fails()
    assert [ignored.exc_type for ignored in reported] == [ValueError, ValueError]


def test_another_thread_can_run_the_block():
    ran = []

    def run():
        with no_request_lost(Asked):
            ran.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ran
