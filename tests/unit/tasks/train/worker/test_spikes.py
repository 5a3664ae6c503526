"""Spikes are found, noise is not, and a restart judges alike."""

import random

import pytest

from tasks.train.worker.position import Position
from tasks.train.worker.spikes import ENOUGH, HISTORY, Spikes


@pytest.fixture
def spikes():
    rng = random.Random(3)
    spikes = Spikes(8.0)
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
    kept = Position(losses=spikes.losses).scalars()
    again = Spikes(8.0, Position.of(kept).losses)
    assert len(again.losses) == HISTORY
    assert [again.is_spike(loss / 10) for loss in range(30, 90)] == [
        spikes.is_spike(loss / 10) for loss in range(30, 90)
    ]
    older = {name: value for name, value in kept.items() if name != "losses"}
    assert Position.of(older).losses == [], "checkpoints of before are read"


def test_off_by_default_and_silent_until_enough_was_seen():
    off, young = Spikes(None), Spikes(3.0)
    for _ in range(ENOUGH - 1):
        off.note(1.0)
        young.note(1.0)
    assert not off.losses and not off.is_spike(1e9) and not young.is_spike(1e9)
    young.note(1.0)
    assert young.is_spike(1.1) and not young.is_spike(1.002), "equal losses do not make every difference a spike"
