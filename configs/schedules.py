"""The schedules that `train.lr_schedule` names."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from infini_llama.configs.choices import Choice

EXPONENT = 2  # of the polynomial schedule
DECAY = 0.2  # share of all steps in which wsd decays


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
    decay_steps = max(1, round(DECAY * at.total))
    start = max(at.warmup, at.total - decay_steps)
    decayed = min(1.0, max(0, at.step - start) / max(1, at.total - start))
    return 1 - (1 - at.low) * decayed


SCHEDULES = {
    # Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5, one period.
    "cosine": Schedule(
        description="half a wave of a cosine.",
        factor=lambda at: at.low + (1 - at.low) * 0.5 * (1 + math.cos(math.pi * at.progress)),
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
        description=f"the remaining share of the steps to the power of {EXPONENT}.",
        factor=lambda at: at.low + (1 - at.low) * (1 - at.progress) ** EXPONENT,
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
