"""Each module that works around Prefect names the pinned version, the upstream issue and its test."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "flows" / "workarounds"
NOTE = re.compile(r"Needed with Prefect (\S+)\. Upstream: (.+?) Test: `(\w+)`")
PINNED = re.search(
    r"^prefect==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
)
TESTS = (ROOT / "tests" / "integration" / "flows" / "test_workarounds.py").read_text()


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("[!_]*.py")), ids=lambda path: path.name
)
def test_each_workaround_has_its_version_issue_and_test(path):
    text = " ".join(path.read_text().split())
    notes = NOTE.findall(text)
    assert notes and len(notes) == text.count("Needed with Prefect")
    for version, upstream, test in notes:
        assert PINNED and version == PINNED[1], (
            "try its test with this version of Prefect"
        )
        assert "PrefectHQ/prefect#" in upstream or "no issue is known" in upstream
        assert f"def {test}(" in TESTS


def test_the_version_of_prefect_in_comments_is_the_pinned_one():
    paths = (*(ROOT / "flows").rglob("*.py"), *(ROOT / "tasks").glob("*/task.py"))
    texts = [path.read_text() for path in paths]
    versions = re.findall(r"Prefect\s+(?:#\s+)?(\d+\.\d+\.\d+)", "\n".join(texts))
    assert PINNED and len(versions) > 20 and set(versions) == {PINNED[1]}
