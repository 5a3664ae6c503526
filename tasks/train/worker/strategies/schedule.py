"""Schedules of the learning rate and of the memory's write jitter.

Both are pure functions of the step, so that resuming needs no state.
"""

from infini_llama.configs.schedules import SCHEDULES, Position
from infini_llama.configs.schema import TrainingConfig

SAMPLED_STEPS = 10_000


def factor(train: TrainingConfig, max_steps: int, step: int) -> float:
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
