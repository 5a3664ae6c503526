import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_llama.tasks.preprocess.rows.chunking import row_count, row_starts
from infini_llama.tasks.preprocess.rows.packing import PACKED
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.verify_data.history import history, run_lengths
from support.stages import preprocess


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), length=st.integers(2, 30), stride=st.integers(0, 30)
)
def test_runs_are_those_of_documents_counted_token_by_token(lengths, length, stride):
    tokens, document = sum(lengths), np.repeat(np.arange(len(lengths)), lengths)
    overlapping = 0 < stride <= length < tokens
    starts = row_starts(row_count(tokens, length, stride if overlapping else None), stride if overlapping else length)
    expected = [
        run
        for start in starts.tolist()
        for run in np.unique(document[start : start + length], return_counts=True)[1].tolist()
    ]
    assert run_lengths(starts, length, np.cumsum(lengths) - lengths).tolist() == expected


@pytest.mark.parametrize("strategy", ["concat", *PACKED])
def test_shares_are_those_of_the_places_of_inputs_in_their_documents(data, tmp_path, strategy):
    reference = preprocess(data(packing=strategy), str(tmp_path))
    folder = tmp_path / reference["path"]
    reader = TokenReader(folder, reference["chunks"], "train")
    rows = np.arange(len(reader))
    documents, targets = reader.documents(rows), reader.targets(rows)
    inputs = np.ones((len(reader), 16), bool) if targets is None else targets
    shards = read_dataset(folder).content.train.shards
    for n, share in history(folder, reference["chunks"], "train", shards).items():
        behind = np.array([[(row[:at] == row[at]).sum() >= n for at in range(16)] for row in documents])
        assert share == pytest.approx((behind & inputs).sum() / inputs.sum())
