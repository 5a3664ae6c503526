"""The order of samples is a permutation, seekable and independent of how it is asked for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infini_llama.tasks.preprocess.tokens.order import permute, rows_of_samples

seeds = st.integers(0, 2**63 - 1)


@given(size=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 1000))
def test_every_row_comes_once_an_epoch(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


@given(
    size=st.integers(1, 2**40),
    seed=seeds,
    positions=st.lists(st.integers(0, 2**40 - 1), min_size=1, max_size=20),
)
def test_images_stay_in_range_for_any_size(size, seed, positions):
    chosen = np.array(positions) % size
    images = permute(chosen, size, seed, 0)
    assert images.min() >= 0 and images.max() < size
    assert len(set(images.tolist())) == len(set(chosen.tolist()))


@given(
    size=st.integers(1, 500),
    seed=seeds,
    first=st.integers(0, 5000),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_any_split_into_batches_gives_the_same_rows(size, seed, first, cuts):
    whole = rows_of_samples(first, sum(cuts), size, seed)
    parts, at = [], first
    for count in cuts:
        parts.append(rows_of_samples(at, count, size, seed))
        at += count
    assert np.array_equal(whole, np.concatenate(parts))


def test_seeds_give_unrelated_orders():
    one, other = rows_of_samples(0, 1000, 1000, 1), rows_of_samples(0, 1000, 1000, 2)
    assert np.mean(one == other) < 0.02
    # Not the identity in disguise.
    assert abs(np.corrcoef(one, np.arange(1000))[0, 1]) < 0.15


def test_the_sample_order_is_stable_across_versions():
    """A change here breaks the resume of every existing run: it needs a new checkpoint format version."""
    assert rows_of_samples(0, 8, 1000, 1234).tolist() == ORDER_OF_FORMAT_1
    assert (
        rows_of_samples(996, 8, 1000, 1234).tolist() == ORDER_ACROSS_EPOCHS_OF_FORMAT_1
    )


ORDER_OF_FORMAT_1 = [551, 38, 763, 263, 89, 725, 215, 172]
ORDER_ACROSS_EPOCHS_OF_FORMAT_1 = [116, 427, 629, 425, 41, 426, 144, 523]
