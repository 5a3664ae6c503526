"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2), as torch's GradScaler does it.

Its own, since all ranks already agree on whether a step's gradients are finite, whatever the strategy, and its two numbers then are
part of a run's position.
"""

from infini_llama.tasks.train.worker.position import Position

FIRST, LOWEST = 2.0**16, 1.0
GROWTH_INTERVAL = 2000


def current(at: Position, precision: str) -> float:
    """What losses are multiplied by before the backward pass, 1 but in fp16."""
    if precision != "fp16":
        return 1.0
    return at.loss_scale or FIRST


def adjust(at: Position, scale: float, finite: bool) -> bool:
    """Notes how a step went under `scale`; returns whether a step that was not finite is explained by the scale.

    Halved when gradients overflow, doubled after 2000 steps without.
    """
    if finite:
        at.steps_at_scale += 1
        at.loss_scale = scale
        if at.steps_at_scale == GROWTH_INTERVAL:
            at.loss_scale, at.steps_at_scale = scale * 2, 0
        return False
    at.loss_scale, at.steps_at_scale = max(LOWEST, scale / 2), 0
    return scale > LOWEST
