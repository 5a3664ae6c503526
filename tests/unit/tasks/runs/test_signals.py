import os
import signal

import pytest

from infini_llama.tasks.runs.signals import (
    ONE_REQUEST_SECONDS,
    debounced,
    hangup_as_termination,
)


class Asked(BaseException):
    pass


@pytest.fixture
def default_signals():
    kept = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_signals_within_a_second_are_one_request(default_signals, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("infini_llama.tasks.runs.signals.time.monotonic", lambda: now)
    signal.signal(signal.SIGTERM, debounced(Asked))
    with pytest.raises(Asked):
        os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    now += ONE_REQUEST_SECONDS + 0.1
    with pytest.raises(Asked):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_hangup_is_treated_as_sigterm(default_signals):
    """Also where somebody else, as Prefect does, sets the handler of SIGTERM later."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    hangup_as_termination()
    signal.signal(signal.SIGTERM, debounced(Asked))
    with pytest.raises(Asked):
        os.kill(os.getpid(), signal.SIGHUP)


def test_nohup_is_respected(default_signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hangup_as_termination()
    signal.signal(signal.SIGTERM, debounced(Asked))
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
