"""Long documents more often: exact shares, each class whole before it begins anew, seekable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.preprocess.rows.packing import PACKED
from infini_llama.tasks.preprocess.rows.tables import build_table
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.train.resolve import bind
from infini_llama.tasks.train.worker.data import order as order_module
from infini_llama.tasks.train.worker.data.loader import TrainBatches, stages_of
from infini_llama.tasks.train.worker.data.order import lengths_of_rows, mixed_rows, preferring
from support.records import SPLIT, make_dataset, make_plan
from support.stages import preprocess


class Rows(TokenReader):
    """The rows of documents of these lengths, in several sources where there are several lists."""

    def __init__(self, *lengths: list[int], sequence_length: int = 8, strategy: str = "concat") -> None:
        sources = {f"s{number}": np.array(own) for number, own in enumerate(lengths)}
        table = build_table(sources, strategy, sequence_length)
        self.starts, self.pieces = table.arrays["rows"], table.arrays.get("pieces")
        self.sequence_length, self.sources = sequence_length, table.sources
        self.lengths = np.concatenate([*sources.values()])

    def document_offsets(self) -> np.ndarray:
        return np.concatenate(([0], self.lengths.cumsum()))


def one_by_one(reader: Rows) -> list[int]:
    """The same by looking at each input of each row."""
    numbers, found = np.repeat(np.arange(len(reader.lengths)), reader.lengths), []
    for row in range(len(reader)):
        if reader.pieces is None:
            inputs = numbers[reader.starts[row] : reader.starts[row] + reader.sequence_length]
        else:
            pieces = reader.pieces[reader.starts[row] : reader.starts[row + 1]]
            inputs = np.concatenate([numbers[start : start + size - 1] for start, size in pieces])
        names, first, counts = np.unique(inputs, return_index=True, return_counts=True)
        most = names[counts == counts.max()]
        found.append(int(reader.lengths[min(most, key=lambda name: first[names == name][0])]))
    return found


documents = st.lists(st.integers(2, 90), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) > 9)


@given(lengths=documents, strategy=st.sampled_from(["concat", *PACKED]))
@settings(deadline=None, max_examples=60)
def test_a_row_belongs_to_the_document_of_most_of_its_inputs(lengths, strategy):
    reader = Rows(lengths, strategy=strategy)
    assert lengths_of_rows(reader).tolist() == one_by_one(reader)


def test_the_number_of_rows_per_pass_changes_nothing(monkeypatch):
    reader = Rows(np.random.default_rng(0).integers(2, 60, 300).tolist())
    whole = lengths_of_rows(reader)
    monkeypatch.setattr(order_module, "AT_ONCE", 7)
    assert np.array_equal(lengths_of_rows(reader), whole)


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_a_document_twice_as_long_is_seen_so_many_times_as_often(strength):
    reader = Rows([8] * 64 + [16] * 32 + [64] * 8, strategy="padded")
    order, parts = preferring(reader, strength, None)
    seen = np.bincount(order[mixed_rows(0, 60_000, parts, 3)], minlength=len(reader))
    of = {length: seen[lengths_of_rows(reader) == length] for length in (8, 16, 64)}
    assert all(counts.max() - counts.min() <= 1 for counts in of.values()), "a class is gone through wholly"
    assert of[16].mean() / of[8].mean() == pytest.approx(2**strength, rel=1e-2)
    assert of[64].mean() / of[8].mean() == pytest.approx(8**strength, rel=1e-2)


seeds = st.integers(0, 2**63 - 1)
weights = st.sampled_from([None, {"s0": 1.0, "s1": 2.5}])


@given(
    seed=seeds, weights=weights, first=st.integers(0, 5000), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6)
)
@settings(deadline=None, max_examples=25)
def test_any_split_into_batches_gives_the_same_rows(seed, weights, first, cuts):
    reader = Rows([9, 30, 200, 17, 5], [12, 12, 64, 3], strategy="greedy")
    _, parts = preferring(reader, 1.5, weights)
    whole, at, found = mixed_rows(first, sum(cuts), parts, seed), first, []
    for count in cuts:
        found.append(mixed_rows(at, count, parts, seed))
        at += count
    assert np.array_equal(whole, np.concatenate(found)) and whole.min() >= 0 and whole.max() < len(reader)


def test_weights_of_sources_stay_exact():
    reader = Rows([9] * 100, [9] * 100 + [500] * 10, strategy="padded")
    border = reader.sources[0].rows
    weights = {"s0": 3.0, "s1": 1.0}
    of = TrainBatches(stages_of(reader, weights=weights, prefer_long=2.0), 7, 400, 4, 0, 1)
    for step in range(4):
        assert (of.rows(400 * step) < border).sum() == 300
    own = np.concatenate([of.rows(400 * step) for step in range(4)])
    long = lengths_of_rows(reader)[own[own >= border]] == 500
    assert long.mean() > 0.99, "of the second source nearly all, and the first has none"


def test_a_strength_of_zero_changes_nothing():
    reader = Rows([9] * 100)
    assert np.array_equal(
        TrainBatches(stages_of(reader, prefer_long=0.0), 7, 32, 4, 0, 1).rows(64),
        TrainBatches(stages_of(reader), 7, 32, 4, 0, 1).rows(64),
    )


def test_the_rows_of_a_dataset_on_disk(data, tmp_path, small_parts):
    reference = preprocess(data(packing="best_fit"), str(tmp_path))
    reader = TokenReader(tmp_path / reference["path"], reference["chunks"], "train")
    lengths = lengths_of_rows(reader)
    seen = TrainBatches(stages_of(reader, prefer_long=1.0), 7, 4096, 4, 0, 1).rows(0)
    assert len(reader.paths) > 1 and lengths[seen].mean() > 1.1 * lengths.mean()
    assert reader.most_documents() == reader.documents(np.arange(len(reader))).max() + 1
    assert len(set(seen.tolist())) > 0.9 * len(reader)


def test_rows_that_may_not_repeat_cannot_be_preferred(tmp_path):
    train = {"repeat_data": False, "prefer_long_documents": 1}
    runtime = {"home": str(tmp_path), "name": "mine"}
    given = {"data": {"source": "python-stdlib"}, "train": train, "runtime": runtime}
    with pytest.raises(ConfigError, match=r"train\.prefer_long_documents=1"):
        bind(PipelineConfig.model_validate(given), make_dataset(train=SPLIT | {"rows": 10**9}), make_plan())
