"""When something is due, when a run ends early, fp16's scale: functions of what a checkpoint holds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_llama.configs.durations import count, duration
from infini_llama.tasks.train.worker import loss_scale
from infini_llama.tasks.train.worker.every import Every
from infini_llama.tasks.train.worker.position import Position


class OneRank:
    is_first = True

    def sum(self, *values):
        return list(values)


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


@given(steps=st.lists(st.integers(1, 50), min_size=1, max_size=60), every=st.integers(1, 100), cut=st.integers(0, 59))
def test_by_tokens_a_resumed_run_is_due_when_the_uninterrupted_is(steps, every, cut):
    def due(at, tokens):
        asked, answers = Every(f"{every} tokens", at, OneRank()), []
        for more in tokens:
            at.advance(samples=1, tokens=more)
            answers.append(asked.due(at))
        return answers

    whole = due(Position(), steps)
    first = Position()
    assert due(first, steps[:cut]) + due(Position.of(first.scalars()), steps[cut:]) == whole
    crossed = sum(steps) // every
    assert sum(whole) <= crossed and (crossed == 0 or any(whole))


def test_by_seconds_the_clock_decides(monkeypatch):
    clock = iter((100.0, 130.0, 160.0, 160.0, 170.0, 219.0, 220.0, 220.0))  # once more where it is due
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    asked = Every("1 minutes", Position(), OneRank())
    answers = [asked.due(Position()) for _ in range(5)]
    assert answers == [False, True, False, False, True]


@given(
    losses=st.lists(st.sampled_from([3.0, 2.0, 1.95, 1.9, math.nan, math.inf]), max_size=12),
    patience=st.integers(1, 4),
    cut=st.integers(0, 11),
)
def test_early_stopping_survives_a_restart(losses, patience, cut):
    def ends(at, heard):
        answers = []
        for loss in heard:
            at.note_validation(loss, 0.1)
            answers.append(at.ended(100, patience))
        return answers

    first = Position()
    answers = ends(first, losses[:cut]) + ends(Position.of(first.scalars()), losses[cut:])
    assert answers == ends(Position(), losses)
    best, stale, expected = math.inf, 0, []  # by its definition
    for loss in losses:
        gained = math.isfinite(loss) and loss < best - 0.1
        best, stale = (loss, 0) if gained else (best, stale + 1)
        expected.append(stale >= patience)
    assert answers == expected


def test_a_loss_that_is_not_finite_is_never_the_best():
    at = Position()
    at.note_validation(math.nan, 0.0)
    assert (at.validation_loss, at.best_validation_loss) == (None, None)
    at.note_validation(2.0, 0.0)
    at.advance(1, 1)
    at.note_validation(math.nan, 0.0)
    assert (at.validation_loss, at.best_validation_loss) == (None, 2.0)


def test_the_loss_scale_halves_and_grows():
    at = Position()
    assert loss_scale.current(at, "bf16") == 1.0 and loss_scale.current(at, "fp16") == 2.0**16
    assert loss_scale.adjust(at, 2.0**16, finite=False)  # explained by the scale
    assert loss_scale.current(at, "fp16") == 2.0**15
    for _ in range(1999):
        assert not loss_scale.adjust(at, loss_scale.current(at, "fp16"), finite=True)
    assert loss_scale.current(Position.of(at.scalars()), "fp16") == 2.0**15
    loss_scale.adjust(at, 2.0**15, finite=True)
    assert loss_scale.current(at, "fp16") == 2.0**16 and at.steps_at_scale == 0
    at.loss_scale = 1.0
    assert not loss_scale.adjust(at, 1.0, finite=False)  # nothing left to lower: the update itself is at fault
