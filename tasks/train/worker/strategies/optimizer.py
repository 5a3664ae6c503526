"""The optimizers that `train.optimizer` names, their parameter groups, and the schedules.

Schedules, of the learning rate and of the memory's write jitter, are pure functions of the step, so that resuming needs no state.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.llama import Llama, parameter_groups

Group = dict[str, Any]  # as torch's optimizers take them, with a "name" and the "peak_lr"
MOMENTUM = 0.95  # of sgd and muon
SAMPLED_STEPS = 10_000
EXPONENT = 2  # of the polynomial schedule
DECAY = 0.2  # share of all steps in which wsd decays


def adamw(model: Llama, groups: list[Group], train: TrainingConfig) -> torch.optim.Optimizer:
    betas = (train.adam_beta1, train.adam_beta2)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon, fused=True)


def adam(model: Llama, groups: list[Group], train: TrainingConfig) -> torch.optim.Optimizer:
    betas = (train.adam_beta1, train.adam_beta2)
    return torch.optim.Adam(groups, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon, fused=True)


def sgd(model: Llama, groups: list[Group], train: TrainingConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=train.learning_rate, momentum=MOMENTUM, fused=True)


def muon(model: Llama, groups: list[Group], train: TrainingConfig) -> torch.optim.Optimizer:
    """Muon for the matrices of the layers, AdamW for everything else."""
    matrices, others = _split_matrices(model, groups)
    # Updates of the size of AdamW's, so that one learning rate serves both (Liu et al. 2025, arXiv 2502.16982, section 2.2).
    first = torch.optim.Muon([matrices], lr=train.learning_rate, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    return Both(first, adamw(model, others, train))


# Another optimizer is one more entry here, and its name in the type of `train.optimizer`.
OPTIMIZERS: dict[str, Callable[[Llama, list[Group], TrainingConfig], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adam": adam,
    "sgd": sgd,
    "muon": muon,
}


def build_optimizer(model: Llama, train: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer that `train.optimizer` names.

    Each group has its peak rate as "peak_lr"; decay is decoupled from the gradient (arXiv 1711.05101) but for Adam and SGD.
    """
    groups = [group for group in parameter_groups(model, train.weight_decay) if group["params"]]
    for group in groups:
        group["peak_lr"] = train.gate_learning_rate if group["name"] == "gates" else train.learning_rate
    return OPTIMIZERS[train.optimizer](model, groups, train)


class Both(torch.optim.Optimizer):
    """Two optimizers of different parameters as one: their groups and states are shared, not copied."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        super().__init__(first.param_groups + second.param_groups, {})
        self.parts = (first, second)
        first.state = second.state = self.state

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for part in self.parts:
            part.step(closure)


def _split_matrices(model: Llama, groups: list[Group]) -> tuple[Group, list[Group]]:
    """The layers' matrices, which Muon is for (Jordan et al. 2024), and the rest of the groups: norms, gates, embedding, head."""
    inner = {id(parameter) for parameter in model.model.layers.parameters() if parameter.ndim == 2}
    decay = next(group for group in groups if group["name"] == "decay")
    matrices = decay | {"name": "matrices", "params": [p for p in decay["params"] if id(p) in inner]}
    others = [group | {"params": [p for p in group["params"] if id(p) not in inner]} for group in groups]
    return matrices, [group for group in others if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, train: TrainingConfig, max_steps: int, step: int) -> float:
    """Set every group's rate for the step that follows `step` completed ones; return the first group's."""
    share = factor(train, max_steps, step)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share
    return optimizer.param_groups[0]["lr"]


def factor(train: TrainingConfig, max_steps: int, step: int) -> float:
    """The share of the peak rate that the step after `step` completed ones uses: linear warm-up, then `train.lr_schedule`.

    With p the progress from the end of the warm-up to `max_steps`, r = `min_learning_rate_ratio`:

    cosine: r + (1 - r) (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5, one period).
    linear: 1 - (1 - r) p.        polynomial: r + (1 - r) (1 - p)^2.
    constant: 1.                  inverse_sqrt: sqrt(w / (step + 1)), w the warm-up, at least r (Vaswani et al. 2017, section 5.3).
    wsd: 1, and over the last fifth of all steps down to r, linearly (warm-up, stable, decay: Hu et al. 2024, arXiv
        2404.06395, section 4; linear as in Haegele et al. 2024, arXiv 2405.18392).
    """
    warmup, total, low = train.warmup_steps, max_steps, train.min_learning_rate_ratio
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
            decay = max(1, round(DECAY * total))
            return 1 - (1 - low) * min(1.0, max(0, step - (total - decay)) / decay)
        case "constant":
            return 1.0


def write_jitter(most: float, max_steps: int, step: int) -> float:
    """The largest factor on the memory's writes in the step after `step` completed ones, `most` being `model.memory_write_jitter`.

    1 for a fifth of the steps, so that facts are learned first; then most^p with p from 0 to 1 over half of them; then `most`.
    """
    return most ** min(1.0, max(0.0, (step / max_steps - 0.2) / 0.5))


def gate_reach(train: TrainingConfig, max_steps: int) -> float:
    """How far Adam can move a gate, before the sigmoid, in a run: the sum of the gates' learning rates over its steps.

    Of a long run it is estimated from SAMPLED_STEPS or a few more of them.
    """
    every = max(1, max_steps // SAMPLED_STEPS)
    factors = [factor(train, max_steps, step) for step in range(every // 2, max_steps, every)]
    return train.gate_learning_rate * max_steps * sum(factors) / len(factors)
