"""Tables for people: no record of a program shows through, and they fit the terminal."""

import os
import re
import sys
from pathlib import Path

import pytest

from infini_llama.flows.cli.tables import (
    WIDTH,
    evaluation_text,
    reference_text,
    terminal,
)
from infini_llama.tasks.document import markdown
from infini_llama.tasks.records.dataset import DatasetSummary, SplitStats
from infini_llama.tasks.records.evaluation import Perplexity, TextLoss
from infini_llama.tasks.report.dataset import dataset_document
from support.records import make_dataset


@pytest.fixture
def dataset() -> DatasetSummary:
    lengths = {"shortest": 3, "p5": 5, "median": 20, "p95": 80, "longest": 99}
    split = {
        "documents": 9,
        "tokens": 900,
        "bytes": 1800,
        "bytes_per_token": 2.0,
        "shards": 1,
    }
    split |= {"unigram_entropy_bits": 4.0, "document_tokens": lengths}
    costs = {
        "efficiency": 0.99991,
        "cut_documents": 4,
        "lost_tokens": 7,
        "targets": 800,
    }
    table = {
        "strategy": "best_fit",
        "sequence_length": 16,
        "rows": {"train": 50, "validation": 5},
    }
    table |= {"packing": {"train": costs, "validation": costs}}
    fields = dict.fromkeys(("digest", "created", "source", "license", "dtype"), "same")
    fields |= {
        "path": "/d",
        "vocab_size": 61,
        "bytes_on_disk": 7,
        "splits": {"train": split, "validation": split},
    }
    fields |= {
        "row_tables": {"abc": table},
        "left_out": {"records": 10, "empty": 1, "bad": []},
        "samples": ["one\ntext"],
    }
    fields |= {"inexpressible": {}}
    return DatasetSummary.model_validate(fields)


def dataset_text(dataset: DatasetSummary) -> str:
    return terminal(markdown(dataset_document(dataset)))


def test_inspect_describes_a_dataset(dataset):
    text = dataset_text(dataset)
    assert not re.search(r"\w=", text), "a record of the program"
    rows = [line.split() for line in text[text.index("\nRows\n") :].splitlines()]
    for row in (
        ["row", "table", "abc"],
        ["strategy", "best_fit"],
        ["rows", "50", "5"],
        ["filled", "99.99%", "99.99%"],
    ):
        assert row in rows
    assert (
        "documents cut" in text
        and "tokens in no row" in text
        and "\none\ntext\n" in text
    )


def test_entropies_have_the_unit_of_the_loss(dataset):
    split = SplitStats(
        documents=9, tokens=900, bytes=1800, unigram_entropy_bits=4.0, rows=50
    )
    reference = make_dataset(train=split, validation=split)
    for text in (dataset_text(dataset), reference_text(reference, Path("/home"))):
        assert "2.773" in text and "nats per token" in text and "bits" not in text, (
            "4 bits are 2.773 nats"
        )
        assert not re.search(r"[a-z]_[a-z]", text.replace("best_fit", "")), (
            "a field's name"
        )


def test_a_table_is_no_wider_than_the_terminal(dataset, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    text = dataset_text(dataset)
    assert max(map(len, text.splitlines())) <= 70 and "longest" in text
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((400, 50)))
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, dataset_text(dataset).splitlines())) <= WIDTH


def test_the_last_part_of_a_sequence_ends_with_it():
    loss = TextLoss(
        loss=3.0,
        perplexity=20.0,
        bits_per_byte=1.0,
        tokens=100,
        bytes=400,
        loss_by_part=(3.5, 2.5, 3.0),
        bits_per_byte_by_part=(1.5, 0.5, 1.0),
        part=40,
        length=100,
    )
    measured = Perplexity(
        run="a",
        checkpoint="step-00000001",
        step=1,
        device="cpu",
        text="validation",
        stream=False,
        model=loss,
    )
    places = re.findall(r"^ *(\d+-\d+) ", evaluation_text(measured), re.MULTILINE)
    assert places == ["1-40", "41-80", "81-100"]
