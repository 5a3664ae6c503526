"""Several sources: exact shares, each source whole before it begins anew, seekable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.tokens.order import mixed_rows, weighted_sources
from infini_llama.tasks.records.manifest import SourceRows

seeds = st.integers(0, 2**63 - 1)
mixtures = st.lists(
    st.tuples(
        st.integers(1, 60), st.floats(0.01, 100).map(lambda weight: round(weight, 2))
    ),
    min_size=1,
    max_size=5,
)


def parts(mixture):
    sources = [
        SourceRows(name=f"s{number}", rows=rows)
        for number, (rows, _) in enumerate(mixture)
    ]
    return weighted_sources(
        sources, {f"s{number}": weight for number, (_, weight) in enumerate(mixture)}
    )


@given(
    mixture=mixtures,
    seed=seeds,
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    first=st.integers(0, 5000),
)
@settings(deadline=None, max_examples=25)
def test_any_split_into_batches_gives_the_same_rows(mixture, seed, cuts, first):
    whole, at, found = mixed_rows(first, sum(cuts), parts(mixture), seed), first, []
    for count in cuts:
        found.append(mixed_rows(at, count, parts(mixture), seed))
        at += count
    assert np.array_equal(whole, np.concatenate(found))


@given(mixture=mixtures, seed=seeds)
@settings(deadline=None, max_examples=25)
def test_each_source_is_gone_through_wholly_before_it_begins_anew(mixture, seed):
    rows = mixed_rows(0, 400, parts(mixture), seed)
    for part in parts(mixture):
        mine = rows[(rows >= part.first) & (rows < part.first + part.rows)] - part.first
        for start in range(0, len(mine) - part.rows + 1, part.rows):
            assert len(set(mine[start : start + part.rows].tolist())) == part.rows


def test_shares_are_exact_at_multiples_and_near_between_them():
    mixture = [(1000, 0.7), (10, 0.2), (300, 0.1)]
    of = parts(mixture)
    whole = mixed_rows(0, 100_000, of, 7)
    drawn = np.stack(
        [
            ((whole >= part.first) & (whole < part.first + part.rows)).cumsum()
            for part in of
        ]
    )
    exact = np.outer([0.7, 0.2, 0.1], np.arange(1, 100_001))
    assert np.abs(drawn - exact).max() < 2
    assert np.abs(drawn - exact)[:, 9::10].max() < 1e-6
    assert drawn[:, -1].tolist() == [70_000, 20_000, 10_000]


def test_epochs_of_each_source_are_its_own():
    of = parts([(50, 3), (7, 1)])
    rows = mixed_rows(0, 2800, of, 11)
    assert np.bincount(rows, minlength=57).tolist() == [42] * 50 + [100] * 7
    assert not np.array_equal(rows, mixed_rows(0, 2800, of, 12))
    small = rows[rows >= 50]
    assert not np.array_equal(small[:7], small[7:14])  # another epoch, another order
    third = mixed_rows(0, 2800, parts([(50, 3), (7, 1), (5, 0.01)]), 11)
    assert np.array_equal(third[third < 50], rows[rows < 50][: (third < 50).sum()]), (
        "a source more moves no other"
    )


def test_the_sources_are_spread_evenly():
    rows = mixed_rows(0, 64, parts([(100, 1), (100, 3)]), 3) < 100
    assert np.diff(np.flatnonzero(rows)).tolist() == [4] * 15


def test_weights_of_any_ratio_are_seekable_far_away():
    of = parts([(2**40, 1_000_000), (3, 0.000001)])
    rows = mixed_rows(2**50, 1000, of, 5)
    assert rows.min() >= 0 and rows.max() < 2**40 + 3 and len(np.unique(rows)) > 990


def test_weights_for_other_sources_are_refused():
    with pytest.raises(ConfigError, match=r"a, b.*a, c"):
        weighted_sources(
            [SourceRows(name="a", rows=1), SourceRows(name="c", rows=1)],
            {"a": 1, "b": 1},
        )
