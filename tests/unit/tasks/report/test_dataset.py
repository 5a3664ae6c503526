"""A dataset's record, document and page: what is shown is what the dataset holds."""

import shutil

import numpy as np
import pytest

from infini_llama.configs.reading import changed
from infini_llama.tasks.document import markdown
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.records.dataset import DatasetSummary
from infini_llama.tasks.records.manifest import LeftOut, SourceRows
from infini_llama.tasks.report.dataset import (
    _widths,
    dataset_document,
    describe,
    measured_dataset,
    training_counts,
)
from infini_llama.tasks.report.page import page as as_page
from infini_llama.tasks.storage.artifacts import Damaged, move_aside, read_dataset
from infini_llama.tasks.verify_data.checks import verify


def test_counts_lengths_tables_and_text_are_shown(built, dataset, data):
    home, reference = built
    preprocess(data(sequence_length=20), home)
    summary = describe(dataset)
    assert DatasetSummary.model_validate(summary.to_json()) == summary
    for split in ("train", "validation"):
        shown, stated = summary.splits[split], getattr(reference, split)
        lengths = shown.document_tokens
        assert (shown.documents, shown.tokens) == (stated.documents, stated.tokens)
        assert (
            1
            < lengths.shortest
            <= lengths.p5
            <= lengths.median
            <= lengths.p95
            <= lengths.longest
        )
        assert shown.bytes_per_token == pytest.approx(shown.bytes / shown.tokens)
    assert sorted(table.sequence_length for table in summary.row_tables.values()) == [
        16,
        20,
    ]
    assert len(summary.samples) == 3 and all(summary.samples)
    assert (summary.license, summary.vocab_size, summary.dtype) == (
        "not stated",
        300,
        "uint16",
    )


def test_samples_are_rows_as_text(dataset, corpus):
    texts = "<|endoftext|>".join(
        path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.txt"))
    )
    first = describe(dataset).samples[0]
    assert len(first) > 5 and first in texts


def test_only_complete_tables_of_a_complete_dataset_are_described(
    built, dataset, row_table, data
):
    home, reference = built
    other = preprocess(data(sequence_length=20), home).row_table
    (dataset / "chunks" / other / "train.rows.npy").unlink()
    move_aside(dataset / "chunks" / other)
    shutil.copytree(row_table, dataset / "chunks" / f".{other}.1-ab.tmp")
    assert list(describe(dataset).row_tables) == [reference.row_table]
    (dataset / "manifest.json").unlink()
    with pytest.raises(Damaged, match="manifest"):
        describe(dataset)


@pytest.fixture
def parts(built, dataset):
    home, reference = built
    return describe(dataset), reference, verify(reference, home, "quick")


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
        row
        for row in rows
        if set("{}[]") & set(row)
        or "None" in row
        or "_" in row.replace("`", "").split("/")[0]
    ]


def test_rows_of_several_sources_are_in_the_table_of_rows(parts):
    dataset, _, _ = parts
    rows = SourceRows(name="prose", rows=5), SourceRows(name="code", rows=1234)
    tables = {
        name: changed(of, sources={"train": rows, "validation": rows[:1]})
        for name, of in dataset.row_tables.items()
    }
    shown = markdown(dataset_document(changed(dataset, row_tables=tables)))
    assert (
        "| of prose | 5 | 5 |" in shown
        and "| of code | 1,234 |" in shown
        and "name=" not in shown
    )


def test_skipped_documents_are_counted_by_reason(parts):
    dataset, reference, report = parts
    left_out = LeftOut(records=1234, empty=3, duplicates=2, bad=("a.json: no text",))
    read = changed(reference, text=changed(reference.text, left_out=left_out))
    shown = markdown(dataset_document(dataset, report, read))
    assert (
        "Of 1,234 records read" in shown
        and "| empty | 3 |" in shown
        and "- a.json: no text" in shown
    )
    assert "exact duplicates (kept" in shown and "too short" not in shown
    assert "Skipped" not in markdown(
        dataset_document(dataset.model_copy(update={"left_out": LeftOut(records=5)}))
    )


def test_a_dataset_as_a_page(built, dataset, read_page):
    home, reference = built
    page = read_page(
        as_page(measured_dataset(dataset, verify(reference, home, "deep")))
    )
    documents = reference.train.documents + reference.validation.documents
    for words in (
        f"documents {documents:,}",
        "Tokens per document",
        "not stated",
        "Of ",
        "all checks passed",
        "no training document is in the validation text",
    ):
        assert words in page.text, words
    assert page.elements.count("svg") == 3
    assert page.elements.count("pre") == 3  # rows as text


def test_packed_rows_are_drawn_by_how_full_they_are(built, data, read_page):
    home, _ = built
    reference = preprocess(data(packing="best_fit"), home)
    page = read_page(as_page(measured_dataset(home / reference.path)))
    assert page.elements.count("svg") == 4 and "all checks passed" not in page.text
    assert (
        f"Fraction of a sequence that is no padding ({reference.row_table})"
        in page.text
    )


def test_tokens_are_counted(built, dataset, monkeypatch):
    _, reference = built
    content = read_dataset(dataset).content
    counts = training_counts(dataset, content)
    assert (
        counts.sum() == reference.train.tokens and len(counts) == reference.vocab_size
    )
    assert counts[content.eos_id] == reference.train.documents
    shares = counts[counts > 0] / counts.sum()
    assert -(shares * np.log2(shares)).sum() == pytest.approx(
        reference.train.unigram_entropy_bits, abs=0.01
    )
    monkeypatch.setattr("infini_llama.tasks.report.dataset.MOST_TOKENS", 100)
    assert training_counts(dataset, content).sum() == 100


def test_one_long_token_keeps_the_table_readable():
    counts, token_bytes = np.array([6000, 3900, 95, 5]), np.array([1, 2, 3, 256])
    curve = _widths(counts, token_bytes)
    assert curve.y == pytest.approx([0, 0.6, 0.39, 0.01]) and len(curve.x) == 5
