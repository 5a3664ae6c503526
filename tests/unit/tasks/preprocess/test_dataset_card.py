"""The dataset's card: what its page says, in words."""

import pytest

from infini_llama.tasks.preprocess.card import card
from infini_llama.tasks.preprocess.summary import describe
from infini_llama.tasks.verify_data.checks import verify


@pytest.fixture
def text(built) -> str:
    home, reference = built
    return card(describe(home / reference["path"]), reference, verify(reference, str(home), "quick", 10**9))


def test_it_tells_source_counts_lengths_checks_and_text(text, built):
    home, reference = built
    for words in (
        "| source | files |",
        "| licence | not stated |",
        f"| train | {reference['train']['documents']:,} | {reference['train']['tokens']:,} |",
        "| whole: ",
        "### Tokens of a document",
        f"`{home / reference['path']}`",
        describe(home / reference["path"])["samples"][0].strip()[:40],
    ):
        assert words in text, words


def test_nothing_in_its_tables_is_raw_python(text):
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows and not [
        row for row in rows if set("{}[]") & set(row) or "None" in row or "_" in row.replace("`", "").split("/")[0]
    ]


def test_what_was_left_out_is_counted_with_its_reason(built):
    home, reference = built
    dataset, report = describe(home / reference["path"]), verify(reference, str(home), "quick", 10**9)
    left_out = {
        "records": 1234,
        "empty": 3,
        "too_short": 0,
        "duplicates": 2,
        "bad": ["a.json: no text"],
        "duplicates_dropped": False,
    }
    shown = card(dataset | {"left_out": left_out}, reference, report)
    assert "Of 1,234 records read" in shown and "| empty | 3 |" in shown and "- a.json: no text" in shown
    assert "exact duplicates (kept" in shown and "too short" not in shown
    assert "Left out" not in card(dataset | {"left_out": {"records": 5, "empty": 0}}, reference, report)
