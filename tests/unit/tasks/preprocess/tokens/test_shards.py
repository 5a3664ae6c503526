from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.tasks.preprocess.tokens.shards import (
    Stream,
    dtype_for,
    entropy_bits,
    map_shard,
    save_array,
    write_shard,
)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=30),
    at_once=st.integers(0, 30),
    dtype=st.sampled_from([np.uint16, np.uint32]),
)
def test_a_shard_is_its_documents_each_with_its_end_however_it_is_filled(
    tmp_path_factory, lengths, at_once, dtype
):
    folder = tmp_path_factory.mktemp("shards")
    documents = [
        (np.arange(length) * 7 + number + 1).tolist()
        for number, length in enumerate(lengths)
    ]
    stream = Stream(np.dtype(dtype))
    for several in filter(None, (documents[:at_once], documents[at_once:])):
        joined = np.array([*chain.from_iterable(several)], dtype=np.uint32)
        stream.add(joined, np.cumsum([0, *map(len, several)]), 0)
    write_shard(folder / "x.arrow", stream.values[: stream.filled], stream.lengths())
    offsets, values = map_shard(folder / "x.arrow")
    assert values.dtype == dtype and [path.name for path in folder.iterdir()] == [
        "x.arrow"
    ]
    assert [values[start:end].tolist() for start, end in pairwise(offsets)] == [
        [*document, 0] for document in documents
    ]


def test_16_bits_hold_a_vocabulary_of_65536_and_not_one_more():
    assert (dtype_for(65_536), dtype_for(65_537)) == (np.uint16, np.uint32)


def test_entropy_is_that_of_the_distribution():
    assert entropy_bits(np.array([5, 5, 0, 5, 5])) == 2.0
    assert entropy_bits(np.array([7])) == 0.0
    assert entropy_bits(np.array([3, 1])) == pytest.approx(
        0.75 * np.log2(4 / 3) + 0.25 * 2
    )


def test_arrays_are_numpys_own_format(tmp_path):
    for array in (
        np.arange(7, dtype=np.int64),
        np.zeros(0, dtype=np.int32),
        np.arange(10)[::3],
    ):
        save_array(tmp_path / "mine.npy", array)
        np.save(tmp_path / "theirs.npy", array)
        assert (tmp_path / "mine.npy").read_bytes() == (
            tmp_path / "theirs.npy"
        ).read_bytes()
