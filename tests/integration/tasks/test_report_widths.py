"""The report of a run, as a browser lays it out on a phone and on a desk, light and dark."""

import pytest

from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.report.run import write_report
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt
from support.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="lays the page out: needs Chromium"
)
BEYOND = """[...document.querySelectorAll('td, th, svg, pre')].filter(one => one.offsetParent !== null &&
  (one.getBoundingClientRect().right > innerWidth + 1 || one.getBoundingClientRect().left < -1)).map(one => one.outerHTML)"""


@pytest.fixture
def report(make_run):
    run = make_run(steps=40, finished=False)
    message = f"rank 0: RuntimeError: the connection was closed (log: {run}/logs/attempt-03/rank-0.log)"
    append_attempt(
        RunFolder(run),
        AttemptRecord(
            attempt=3,
            kind="failed",
            code=70,
            from_step=20,
            checkpoint_step=40,
            seconds=3725.0,
            message=message,
        ),
    )
    return write_report(run)[1]


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_nothing_leaves_the_view(report, width, scheme):
    with Browser(width, scheme=scheme) as browser:
        browser.open(report.as_uri())
        browser.wait_for("Attempts")
        assert browser.run(BEYOND) == []
        assert browser.run("document.documentElement.scrollWidth") <= width
        ground = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (
            ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
        )
