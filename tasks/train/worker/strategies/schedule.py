"""Schedules of the learning rate and of the memory's write jitter.

Both are pure functions of the step, so that resuming needs no state.
"""

import math

from infini_llama.configs.schema import TrainingConfig

EXPONENT = 2  # of the polynomial schedule
DECAY = 0.2  # share of all steps in which wsd decays
SAMPLED_STEPS = 10_000


def factor(train: TrainingConfig, max_steps: int, step: int) -> float:
    """The share of the peak rate that the step after `step` completed ones uses.

    Linear warm-up, then `train.lr_schedule`. With p the progress from the end of the warm-up to
    `max_steps`, r = `min_learning_rate_ratio`:

    cosine: r + (1 - r) (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5,
        one period).
    linear: 1 - (1 - r) p.
    polynomial: r + (1 - r) (1 - p)^2.
    constant: 1.
    inverse_sqrt: sqrt(w / (step + 1)), w the warm-up, at least r (Vaswani et al. 2017, section
        5.3).
    wsd: 1, and over the last fifth of all steps, or what the warm-up leaves of it, down to r,
        linearly (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395, section 4; linear as in
        Haegele et al. 2024, arXiv 2405.18392).
    """
    warmup = train.warmup_steps
    total = max_steps
    low = train.min_learning_rate_ratio
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    match train.lr_schedule:
        case "cosine":
            return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return 1 - (1 - low) * progress
        case "polynomial":
            return low + (1 - low) * (1 - progress) ** EXPONENT
        case "inverse_sqrt":
            return max(low, math.sqrt(max(1, warmup) / (step + 1)))
        case "wsd":
            decay_steps = max(1, round(DECAY * total))
            start = max(warmup, total - decay_steps)
            decayed = min(1.0, max(0, step - start) / max(1, total - start))
            return 1 - (1 - low) * decayed
        case "constant":
            return 1.0


def write_jitter(most: float, max_steps: int, step: int, learned: bool = False) -> float:
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


def gate_reach(train: TrainingConfig, max_steps: int) -> float:
    """How far Adam can move a gate, before the sigmoid, in a run.

    The sum of the gates' learning rates over its steps; in a long run it is estimated from
    SAMPLED_STEPS or a few more of them.
    """
    every = max(1, max_steps // SAMPLED_STEPS)
    factors = [factor(train, max_steps, step) for step in range(every // 2, max_steps, every)]
    return train.gate_learning_rate * max_steps * sum(factors) / len(factors)
