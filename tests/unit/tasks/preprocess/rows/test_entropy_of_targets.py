"""The unigram entropy that stands beside a validation loss is that of the same tokens."""

from collections import Counter

import numpy as np
import pytest

from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.report.curves import loss_chart
from infini_llama.tasks.report.run import data_card
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.artifacts import (
    ROW_TABLES,
    read_dataset,
    read_row_table,
)
from support.texts import write_lines
from support.trained_runs import trained_run

MARK = "? It is"
LABELS = {"all": {}, "answer": {"loss_on": "answer", "answer_after": MARK}}
PACKING = [{"packing": name} for name in ("concat", "padded", "best_fit")]
PACKING += [{"packing": "window", "stride": 5}]


@pytest.fixture
def texts(tmp_path) -> str:
    """Documents of long prompts that all begin alike, and answers of one digit."""
    random = np.random.default_rng(0)
    words = ["green", "sky", "river", "7 1 4"]
    lines = [
        f"Question: {' '.join(random.choice(words, size=9))}{MARK} {number % 10}"
        for number in range(80)
    ]
    return write_lines(tmp_path / "texts.jsonl", lines)


def bits_of_labels(reader: TokenReader) -> float:
    """Entropy of the labels that count in all rows, row by row."""
    counts = Counter[int]()
    for row in np.arange(len(reader)):
        labels = reader.gather(row[None])[0, 1:]
        mask = reader.targets(row[None])
        counts.update(labels.tolist() if mask is None else labels[mask[0]].tolist())
    return bits_of(np.array(list(counts.elements())))


def bits_of(tokens: np.ndarray) -> float:
    """Entropy of the frequencies of tokens."""
    _, counts = np.unique(tokens, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("packing", PACKING, ids=lambda packing: packing["packing"])
def test_the_entropy_is_that_of_the_targets_of_the_validation_rows(
    data, texts, tmp_path, packing, labels
):
    settings = data(files=[texts], **packing, **LABELS[labels])
    reference = preprocess(settings, tmp_path)
    folder = tmp_path / reference.path
    table = read_row_table(folder / ROW_TABLES / reference.row_table)
    reader = TokenReader(folder, reference.row_table, "validation")
    expected = bits_of_labels(reader)
    assert table.meta.unigram_entropy_bits == pytest.approx(expected, rel=1e-9)
    assert table.meta.packing is not None
    for split in ("train", "validation"):
        rows = TokenReader(folder, reference.row_table, split)
        targets = rows.count_targets(np.arange(len(rows)))
        assert table.meta.packing[split].targets == targets
    stream = reader.stream
    tokens = np.concatenate([map_shard(path)[1] for path in stream.paths])
    that_count = tokens[stream.targets(0, len(tokens))]
    content = read_dataset(folder).content.validation
    assert content.unigram_entropy_bits == pytest.approx(bits_of(that_count), rel=1e-9)
    if labels == "answer":
        assert expected < bits_of(tokens) - 0.2


@pytest.mark.usefixtures("ranks")
def test_a_run_shows_the_entropy_of_its_validation_targets(data, texts, tmp_path):
    settings = data(files=[texts], packing="padded", **LABELS["answer"])
    reference = preprocess(settings, tmp_path)
    folder, _ = trained_run(tmp_path, reference, settings)
    run = RunReader(folder)
    assert run.dataset is not None
    bits = run.dataset.rows.meta.unigram_entropy_bits
    assert bits is not None
    (level,) = [
        curve for curve in loss_chart(run).curves if curve.label == "unigram entropy"
    ]
    assert level.y == [bits * np.log(2)] * 2
    card = data_card(run)
    assert (
        card["unigram entropy"]
        == f"{bits * np.log(2):.3f} nats per target (validation)"
    )
