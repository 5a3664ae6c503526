"""Schedules of the learning rate, and that of the memory's write jitter.

All are pure functions of the step, so that resuming needs no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infini_llama.configs.choices import Choice

if TYPE_CHECKING:
    from infini_llama.configs.schema import TrainingConfig

POLYNOMIAL_EXPONENT = 2  # of the polynomial schedule
WSD_DECAY_SHARE = 0.2  # share of all steps in which wsd decays


@dataclass(frozen=True)
class Position:
    """A step after the warm-up.

    Attributes:
        step: number of completed steps.
        warmup: steps of the warm-up.
        total: steps of the run.
        low: the final rate as a share of the peak.
        progress: from 0 at the end of the warm-up to 1 at the end of the run.
    """

    step: int
    warmup: int
    total: int
    low: float
    progress: float


@dataclass(frozen=True)
class Schedule(Choice):
    """A value of `train.lr_schedule`.

    Attributes:
        factor: the rate of a step as a share of the peak.
    """

    factor: Callable[[Position], float]


def _wsd(at: Position) -> float:
    decay_steps = max(1, round(WSD_DECAY_SHARE * at.total))
    start = max(at.warmup, at.total - decay_steps)
    decayed = min(1.0, max(0, at.step - start) / max(1, at.total - start))
    return 1 - (1 - at.low) * decayed


SCHEDULES = {
    # Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5, one period.
    "cosine": Schedule(
        description="half a wave of a cosine.",
        factor=lambda at: (
            at.low + (1 - at.low) * 0.5 * (1 + math.cos(math.pi * at.progress))
        ),
    ),
    "linear": Schedule(
        description="a straight line.",
        factor=lambda at: 1 - (1 - at.low) * at.progress,
    ),
    "constant": Schedule(
        description="the peak.",
        factor=lambda at: 1.0,
    ),
    "polynomial": Schedule(
        description=f"the remaining share of the steps to the power of {POLYNOMIAL_EXPONENT}.",
        factor=lambda at: (
            at.low + (1 - at.low) * (1 - at.progress) ** POLYNOMIAL_EXPONENT
        ),
    ),
    # Vaswani et al. 2017, section 5.3.
    "inverse_sqrt": Schedule(
        description="√(train.warmup_steps / steps).",
        factor=lambda at: max(at.low, math.sqrt(max(1, at.warmup) / (at.step + 1))),
    ),
    # Hu et al. 2024, arXiv 2404.06395, section 4; linear as in Haegele et al. 2024, arXiv
    # 2405.18392.
    "wsd": Schedule(
        description="warmup-stable-decay, at the peak until the last fifth of the run, and from "
        "there a straight line.",
        factor=_wsd,
    ),
}


def learning_rate_factor(train: TrainingConfig, max_steps: int, step: int) -> float:
    """The share of the peak rate that the step after `step` completed ones uses.

    Linear warm-up, then `train.lr_schedule`.
    """
    warmup = train.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    position = Position(
        step=step,
        warmup=warmup,
        total=max_steps,
        low=train.min_learning_rate_ratio,
        progress=min(1.0, (step - warmup) / max(1, max_steps - warmup)),
    )
    return SCHEDULES[train.lr_schedule].factor(position)


def write_jitter(
    most: float,
    max_steps: int,
    step: int,
    learned: bool = False,
) -> float:
    """The largest factor on the memory's writes in the step after `step` completed ones.

    1 for a fifth of the steps, so that facts are learned first; then most^p with p from 0 to 1 over
    half of them; then `most`. Weights that have `learned` to use a memory need no such beginning:
    for them it is `most` throughout.

    Args:
        most: `model.memory_write_jitter`.
    """
    if learned:
        return most
    progress = (step / max_steps - 0.2) / 0.5
    exponent = min(1.0, max(0.0, progress))
    return most**exponent
