"""Spikes are found, noise is not, the budget of skipped updates holds, and a resumed run decides the same."""

import math
import random

import numpy as np
import pytest

from infini_llama.configs.errors import Diverged
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.records.metrics import TrainLine
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.train.worker.callbacks.callback import StepResult, Update
from infini_llama.tasks.train.worker.callbacks.update_policy import (
    ENOUGH,
    HISTORY,
    SpikeDetector,
    UpdatePolicy,
)


@pytest.fixture
def spikes():
    rng = random.Random(3)
    spikes = SpikeDetector(8.0)
    for step in range(200):
        loss = 5.0 - step / 200 + rng.gauss(0, 0.05)
        assert not spikes.is_spike(loss), "noise on a falling loss"
        spikes.add(loss)
    return spikes


def policy(fp16: bool = False, **changes) -> UpdatePolicy:
    return UpdatePolicy(
        TrainingConfig(spike_zscore=8.0, **changes), fp16, lambda samples: np.arange(3)
    )


def end_step(
    policy: UpdatePolicy,
    step: int,
    loss: float = 2.0,
    skipped: bool = False,
    grad_norm: float = 1.0,
) -> None:
    result = StepResult(
        Update(loss, grad_norm, False, skipped), 0, TrainLine(step=1, targets=8)
    )
    policy.on_step_end(TrainState(step=step, samples=step * 8), result)


def test_a_loss_far_above_the_last_ones_is_a_spike_even_after_spikes(spikes):
    assert (
        spikes.is_spike(8.0) and not spikes.is_spike(1.0) and not spikes.is_spike(4.3)
    )
    for _ in range(HISTORY // 3):
        spikes.add(50.0)
    assert spikes.is_spike(20.0), (
        "a mean and a standard deviation would have been moved"
    )


def test_a_resumed_policy_decides_the_same(spikes):
    first, again = policy(), policy()
    first.spikes = spikes
    first.skips = [3]
    first.save_state(state := TrainState())
    again.load_state(state)
    assert len(again.spikes.losses) == HISTORY and again.skips == [3]
    assert [again.spikes.is_spike(loss / 10) for loss in range(30, 90)] == [
        spikes.is_spike(loss / 10) for loss in range(30, 90)
    ]
    assert TrainState.read_json("{}").losses == [], (
        "checkpoints of older versions are read"
    )


def test_off_by_default_and_silent_until_enough_was_seen():
    off, young = SpikeDetector(None), SpikeDetector(3.0)
    for _ in range(ENOUGH - 1):
        off.add(1.0)
        young.add(1.0)
    assert not off.losses and not off.is_spike(1e9) and not young.is_spike(1e9)
    young.add(1.0)
    assert young.is_spike(1.1) and not young.is_spike(1.002), (
        "equal losses do not make every difference a spike"
    )


@pytest.mark.parametrize(
    "usual", [[0.0, 0.0, 2.0], [1e-7, 2e-7, 2.0], [0.5, 0.5, 0.5, 3.0]]
)
def test_losses_that_are_mostly_alike_make_no_spike_of_the_others(usual):
    spikes = SpikeDetector(6.0)
    for loss in usual * ENOUGH:
        spikes.add(loss)
    assert not spikes.is_spike(max(usual) + 0.5) and spikes.is_spike(50.0)


def test_steps_without_targets_are_no_losses_and_no_skips(caplog):
    fp16 = policy(fp16=True)
    for step in (1, 2, 3):
        result = StepResult(
            Update(math.nan, math.nan, False, True), 0, TrainLine(step=1, targets=0)
        )
        fp16.on_step_end(TrainState(step=step), result)
    assert (fp16.spikes.losses, fp16.skips, fp16.scaler.scale) == ([], [], None)
    assert len(caplog.records) == 1


def test_the_reason_of_a_skip_is_named(spikes, caplog):
    limited = policy(max_skips=1)
    limited.spikes = spikes
    end_step(limited, 1, 9.0, skipped=True)
    assert "spike" in caplog.text and "finite" not in caplog.text
    with pytest.raises(Diverged, match="not finite"):
        end_step(limited, 2, math.nan, skipped=True)


def test_an_update_skipped_by_an_overflow_does_not_count():
    fp16 = policy(fp16=True)
    end_step(fp16, 5)
    end_step(fp16, 6, grad_norm=math.inf, skipped=True)
    assert (fp16.spikes.losses, fp16.skips) == ([2.0], [])
    fp16.scaler.scale = 1.0
    end_step(fp16, 7, grad_norm=math.nan, skipped=True)
    assert (fp16.spikes.losses, fp16.skips) == ([2.0], [7])


def test_a_loss_that_is_not_finite_is_no_overflow_of_the_scale(caplog):
    fp16 = policy(fp16=True, max_skips=1)
    end_step(fp16, 5, math.nan, skipped=True)
    assert fp16.skips == [5] and "not finite" in caplog.text
    with pytest.raises(Diverged):
        end_step(fp16, 6, math.inf, skipped=True)


def test_skips_outside_the_window_do_not_count():
    limited = policy(max_skips=2)
    for step in (1, 2, 103, 104):
        end_step(limited, step, math.nan, skipped=True)
    limited.save_state(state := TrainState())
    assert state.skips == [103, 104]
    with pytest.raises(Diverged) as raised:
        end_step(limited, 105, math.nan, skipped=True)
    assert (raised.value.first_skip, raised.value.samples) == (103, 840)
