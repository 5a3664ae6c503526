"""Spikes are found, noise is not, and a restart judges alike."""

import math
import random

import numpy as np
import pytest

from infini_llama.tasks.train.worker.callbacks.divergence import Skips
from infini_llama.tasks.train.worker.callbacks.spikes import ENOUGH, HISTORY, Spikes
from infini_llama.tasks.train.worker.loop import note_update
from infini_llama.tasks.train.worker.position import Position
from infini_llama.tasks.train.worker.step import StepResult


@pytest.fixture
def spikes():
    rng = random.Random(3)
    spikes = Spikes(8.0, Position())
    for step in range(200):
        loss = 5.0 - step / 200 + rng.gauss(0, 0.05)
        assert not spikes.is_spike(loss), "noise on a falling loss"
        spikes.note(loss)
    return spikes


def test_a_loss_far_above_the_last_ones_is_a_spike_also_behind_other_spikes(spikes):
    assert spikes.is_spike(8.0) and not spikes.is_spike(1.0) and not spikes.is_spike(4.3)
    for _ in range(HISTORY // 3):
        spikes.note(50.0)
    assert spikes.is_spike(20.0), "a mean and a standard deviation would have been moved"


def test_what_a_checkpoint_keeps_judges_alike(spikes):
    kept = spikes.at.scalars()
    again = Spikes(8.0, Position.of(kept))
    assert len(again.at.losses) == HISTORY
    assert [again.is_spike(loss / 10) for loss in range(30, 90)] == [
        spikes.is_spike(loss / 10) for loss in range(30, 90)
    ]
    older = {name: value for name, value in kept.items() if name != "losses"}
    assert Position.of(older).losses == [], "checkpoints of before are read"


def test_off_by_default_and_silent_until_enough_was_seen():
    off, young = Spikes(None, Position()), Spikes(3.0, Position())
    for _ in range(ENOUGH - 1):
        off.note(1.0)
        young.note(1.0)
    assert not off.at.losses and not off.is_spike(1e9) and not young.is_spike(1e9)
    young.note(1.0)
    assert young.is_spike(1.1) and not young.is_spike(1.002), "equal losses do not make every difference a spike"


def test_a_loss_that_an_overflow_left_out_is_not_remembered():
    at = Position(step=7)
    skips, spikes = Skips(3, 10, at), Spikes(8.0, at)

    def note(loss: float, skipped: bool, overflow: bool) -> None:
        note_update(StepResult(loss, 1.0, False, skipped), overflow, skips, spikes, lambda: np.arange(3))

    note(2.0, skipped=False, overflow=False)
    note(math.inf, skipped=True, overflow=True)
    assert (at.losses, at.skips) == ([2.0], [])
    note(math.nan, skipped=True, overflow=False)
    assert (at.losses, at.skips) == ([2.0], [7])
