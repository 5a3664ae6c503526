"""A dataset's page: what is drawn is what the dataset holds."""

import numpy as np
import pytest

from infini_llama.tasks.records.dataset import VerifyReport
from infini_llama.tasks.report.dataset import _widths, measured_dataset, token_counts
from infini_llama.tasks.report.page import page as as_page
from infini_llama.tasks.storage.artifacts import Damaged, read_dataset
from support.stages import preprocess, verify


def test_a_dataset_as_a_page(built, read_page):
    home, reference = built
    page = read_page(as_page(measured_dataset(home / reference["path"])))
    documents = reference["train"]["documents"] + reference["validation"]["documents"]
    for words in (
        f"documents {documents:,}",
        "Tokens per document",
        "not stated",
        "Of ",
    ):
        assert words in page.text, words
    assert page.elements.count("svg") == 3
    assert page.elements.count("pre") == 3  # rows as text


def test_findings_of_verify_are_on_the_page(built, read_page):
    home, reference = built
    report = verify(reference, str(home), "deep", 0)
    page = read_page(as_page(measured_dataset(home / reference["path"], VerifyReport.from_json(report))))
    for words in ("Checks", "all checks passed", "no training document is in the validation text"):
        assert words in page.text, words
    assert "all checks passed" not in read_page(as_page(measured_dataset(home / reference["path"]))).text


def test_packed_rows_are_drawn_by_how_full_they_are(built, data, read_page):
    home, _ = built
    reference = preprocess(data(packing="best_fit"), str(home))
    page = read_page(as_page(measured_dataset(home / reference["path"])))
    assert page.elements.count("svg") == 4
    assert f"Fraction of a sequence that is targets ({reference['chunks']})" in page.text


def test_tokens_are_counted(built, monkeypatch):
    home, reference = built
    path = home / reference["path"]
    content = read_dataset(path).content
    counts = token_counts(path, content)
    assert counts.sum() == reference["train"]["tokens"] and len(counts) == reference["vocab_size"]
    assert counts[content.eos_id] == reference["train"]["documents"]
    shares = counts[counts > 0] / counts.sum()
    assert -(shares * np.log2(shares)).sum() == pytest.approx(reference["train"]["unigram_entropy_bits"], abs=0.01)
    monkeypatch.setattr("infini_llama.tasks.report.dataset.MOST_TOKENS", 100)
    assert token_counts(path, content).sum() == 100


def test_a_folder_that_is_not_a_dataset(tmp_path):
    with pytest.raises(Damaged):
        measured_dataset(tmp_path)


def test_one_long_token_keeps_the_table_readable():
    counts, token_bytes = np.array([6000, 3900, 95, 5]), np.array([1, 2, 3, 256])
    curve = _widths(counts, token_bytes)
    assert curve.y == pytest.approx([0, 0.6, 0.39, 0.01]) and len(curve.x) == 5
