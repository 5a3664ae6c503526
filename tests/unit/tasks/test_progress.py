"""Progress for somebody else's page: the newest word, now and then, and never in the way."""

import logging
import threading
import time

import pytest

from infini_llama.tasks.progress import Live, Reached
from support.waiting import wait_until

log = logging.getLogger("infini_llama.test_live")


@pytest.fixture(autouse=True)
def level():
    log.setLevel(logging.INFO)


def report(done: int, total: int | None = 100) -> None:
    log.info("step %d", done, extra={"progress": Reached(done, total, "steps")})


def test_many_reports_are_few_calls_and_the_last_one_is_among_them():
    shown = []
    before = log.level
    with Live(
        log.name, lambda percent, words: shown.append((percent, words)), seconds=0.2
    ):
        for done in range(1, 101):
            report(done)
        log.info("no progress")
        report(7, None)
    assert shown[-1] == (100.0, "step 100") and 1 <= len(shown) <= 6, shown
    report(50)
    assert shown[-1] == (100.0, "step 100"), "nobody listens any more"
    assert log.level == before


def test_an_unreachable_page_is_reported_once_and_stops_nothing(caplog):
    def fail(percent: float, words: str) -> None:
        raise ConnectionError("no server")

    with Live(log.name, fail, seconds=0.01) as live:
        for done in range(5):
            report(done)
            wait_until(lambda: live.newest is None)
    assert caplog.text.count("no server") == 1


def test_a_hanging_page_blocks_nothing():
    answer = threading.Event()
    before = time.monotonic()
    with Live(log.name, lambda percent, words: answer.wait(30) and None, seconds=0.05):
        report(1)
    waited = time.monotonic() - before
    answer.set()
    assert waited < 10
