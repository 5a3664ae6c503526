"""Learning rates by hand and by their properties."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_llama.configs.schedules import SCHEDULES, learning_rate_factor
from infini_llama.configs.schema import TrainingConfig


def settings(schedule, warmup=10, total=110, low=0.1):
    return TrainingConfig(
        lr_schedule=schedule,
        warmup_steps=warmup,
        max_steps=total,
        min_learning_rate_ratio=low,
    )


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("cosine", {10: 1.0, 60: 0.55, 110: 0.1}),
        ("linear", {10: 1.0, 60: 0.55, 110: 0.1}),
        ("polynomial", {10: 1.0, 60: 0.1 + 0.9 * 0.25, 110: 0.1}),
        ("constant", {10: 1.0, 60: 1.0, 110: 1.0}),
        ("inverse_sqrt", {9: 1.0, 39: 0.5, 89: 1 / 3}),
        ("wsd", {10: 1.0, 88: 1.0, 99: 0.55, 110: 0.1}),
    ],
)
def test_by_hand(schedule, points):
    for step, expected in points.items():
        assert learning_rate_factor(settings(schedule), 110, step) == pytest.approx(
            expected
        ), step
    assert [
        learning_rate_factor(settings(schedule), 110, step) for step in range(10)
    ] == pytest.approx([i / 10 for i in range(1, 11)])


def test_wsd_decays_from_the_peak_after_a_warm_up_that_reaches_into_the_last_fifth():
    late = settings("wsd", warmup=100)
    for step, expected in {99: 1.0, 100: 1.0, 101: 0.91, 105: 0.55, 110: 0.1}.items():
        assert learning_rate_factor(late, 110, step) == pytest.approx(expected), step


@given(
    schedule=st.sampled_from([*SCHEDULES]),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    low=st.floats(0, 1),
)
def test_never_rises_after_the_warm_up_nor_leaves_its_range(
    schedule, warmup, steps, low
):
    train = settings(schedule, warmup, warmup + steps, low)
    factors = [
        learning_rate_factor(train, warmup + steps, step)
        for step in range(warmup + steps + 1)
    ]
    assert all(math.isfinite(value) and 0 <= value <= 1 + 1e-12 for value in factors)
    assert all(
        later <= earlier + 1e-12
        for earlier, later in pairwise(factors[max(0, warmup - 1) :])
    )
    if schedule not in ("constant", "inverse_sqrt"):
        assert factors[-1] == pytest.approx(low, abs=1e-9)
