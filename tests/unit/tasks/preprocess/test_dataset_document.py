"""The document of a dataset: what its page says, in words."""

import pytest

from infini_llama.tasks.document import markdown
from infini_llama.tasks.preprocess.summary import dataset_document, describe
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.manifest import LeftOut
from infini_llama.tasks.verify_data.checks import verify


@pytest.fixture
def parts(built):
    home, reference = built
    ref = DatasetRef.from_json(reference)
    return describe(home / ref.path), ref, verify(ref, home, "quick", 10**9)


@pytest.fixture
def text(parts) -> str:
    dataset, reference, report = parts
    return markdown(dataset_document(dataset, report, reference))


def test_the_description_has_source_counts_lengths_checks_and_text(text, parts):
    dataset, reference, _ = parts
    for words in (
        "\n\nfiles, built ",
        "| license | not stated |",
        f"| tokens | {reference.train.tokens:,} | {reference.validation.tokens:,} |",
        ", all checks passed",
        "## Tokens per document",
        f"`{dataset.path}`",
        dataset.samples[0].strip()[:40],
    ):
        assert words in text, words


def test_nothing_in_its_tables_is_raw_python(text):
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows and not [
        row for row in rows if set("{}[]") & set(row) or "None" in row or "_" in row.replace("`", "").split("/")[0]
    ]


def test_skipped_documents_are_counted_by_reason(parts):
    dataset, reference, report = parts
    left_out = LeftOut(records=1234, empty=3, duplicates=2, bad=("a.json: no text",))
    shown = markdown(dataset_document(dataset.model_copy(update={"left_out": left_out}), report, reference))
    assert "Of 1,234 records read" in shown and "| empty | 3 |" in shown and "- a.json: no text" in shown
    assert "exact duplicates (kept" in shown and "too short" not in shown
    assert "Skipped" not in markdown(dataset_document(dataset.model_copy(update={"left_out": LeftOut(records=5)})))
