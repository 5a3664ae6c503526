"""When something is due, when a run ends early, fp16's scale: functions of what a checkpoint holds."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_llama.configs.durations import count, duration
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.train.worker.callbacks.callback import Interval
from infini_llama.tasks.train.worker.callbacks.update_policy import LossScaler
from support.one_rank import OneRank


def reloaded(state: TrainState) -> TrainState:
    return TrainState.read_json(json.dumps(state.to_json()))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (200, (200, "steps")),
        ("200 steps", (200, "steps")),
        ("1 step", (1, "steps")),
        ("10M tokens", (10_000_000, "tokens")),
        ("1.5k tokens", (1500, "tokens")),
        ("15 minutes", (900, "seconds")),
        ("0.5 hours", (1800, "seconds")),
    ],
)
def test_durations(value, expected):
    assert duration(value) == expected


def test_counts():
    assert [count(value) for value in (7, "7", "1.5k", "300M", " 2 G ", "0.1T")] == [
        7,
        7,
        1500,
        3 * 10**8,
        2 * 10**9,
        10**11,
    ]


@given(
    steps=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    every=st.integers(1, 100),
    cut=st.integers(0, 59),
)
def test_by_tokens_a_resumed_run_is_due_when_the_uninterrupted_is(steps, every, cut):
    def due(at, tokens):
        interval, answers = Interval(f"{every} tokens", OneRank()), []
        interval.start(at, 0.0)
        for more in tokens:
            at.advance(samples=1, tokens=more)
            answers.append(interval.advance(at))
        return answers

    whole = due(TrainState(), steps)
    first = TrainState()
    assert due(first, steps[:cut]) + due(reloaded(first), steps[cut:]) == whole
    crossed = sum(steps) // every
    assert sum(whole) <= crossed and (crossed == 0 or any(whole))


def test_by_seconds_the_clock_decides(monkeypatch):
    # Once more where it is due.
    clock = iter((100.0, 130.0, 160.0, 160.0, 170.0, 219.0, 220.0, 220.0))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    interval = Interval("1 minutes", OneRank())
    answers = [interval.advance(TrainState()) for _ in range(5)]
    assert answers == [False, True, False, False, True]


@given(
    losses=st.lists(
        st.sampled_from([3.0, 2.0, 1.95, 1.9, math.nan, math.inf]), max_size=12
    ),
    patience=st.integers(1, 4),
    cut=st.integers(0, 11),
)
def test_early_stopping_survives_a_restart(losses, patience, cut):
    def ends(at, heard):
        answers = []
        for loss in heard:
            at.record_validation(loss)
            answers.append(at.is_finished(100, patience))
        return answers

    first = TrainState()
    answers = ends(first, losses[:cut]) + ends(reloaded(first), losses[cut:])
    assert answers == ends(TrainState(), losses)
    best, stale, expected = math.inf, 0, []  # by its definition
    for loss in losses:
        gained = math.isfinite(loss) and loss < best
        best, stale = (loss, 0) if gained else (best, stale + 1)
        expected.append(stale >= patience)
    assert answers == expected


def test_a_validation_loss_that_is_not_finite_is_not_kept():
    at = TrainState()
    at.record_validation(math.nan)
    assert at.validation_loss is None


def test_the_loss_scale_halves_and_grows():
    scaler = LossScaler(enabled=True)
    assert LossScaler(enabled=False).current == 1.0 and scaler.current == 2.0**16
    assert scaler.adjust(finite=False), "explained by the scale"
    assert scaler.current == 2.0**15
    assert not any(scaler.adjust(finite=True) for _ in range(1999))
    assert (scaler.scale, scaler.steps) == (2.0**15, 1999)
    scaler.adjust(finite=True)
    assert scaler.current == 2.0**16 and scaler.steps == 0
    scaler.scale = 1.0
    assert not scaler.adjust(finite=False), (
        "nothing left to lower: the update itself is at fault"
    )
    assert not LossScaler(enabled=False).adjust(finite=False)
