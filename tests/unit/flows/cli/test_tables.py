"""Tables for people: no record of a program shows through, and they fit the terminal."""

import os
import re
import sys

import pytest

from infini_llama.flows.cli import tables as inspection


@pytest.fixture
def dataset():
    lengths = {"shortest": 3, "p5": 5, "median": 20, "p95": 80, "longest": 99}
    facts = {"documents": 9, "tokens": 900, "document_tokens": lengths}
    packing = {"efficiency": 0.99991, "cut_documents": 4, "lost_tokens": 7, "targets": 800}
    table = {"strategy": "best_fit", "sequence_length": 16, "rows": {"train": 50}, "packing": {"train": packing}}
    left_out = {"records": 10, "empty": 1, "bad": []}
    splits = {"train": facts, "validation": facts}
    return {"path": "/d", "splits": splits, "chunks": {"abc": table}, "left_out": left_out, "samples": ["one\ntext"]}


def test_a_dataset_is_told_in_words(dataset):
    text = inspection.dataset_text(dataset)
    assert not re.search(r"\w=", text), "a record of the program"
    (row,) = [line.split() for line in text.splitlines() if " abc " in line]
    assert row == ["abc", "best_fit", "16", "train", "50", "99.99%", "4", "7", "800"]
    assert "documents cut" in text and "tokens in no row" in text and text.endswith("one\ntext")


def test_a_table_is_no_wider_than_the_terminal(dataset, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    text = inspection.dataset_text(dataset)
    assert max(map(len, text.splitlines())) <= 70 and "longest" in text
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((400, 50)))
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, inspection.dataset_text(dataset).splitlines())) <= inspection.WIDTH
