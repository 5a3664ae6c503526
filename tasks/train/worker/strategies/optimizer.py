"""The optimizers that `train.optimizer` names (configs/optimizers.py), and their parameter groups."""

from typing import Any

import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.llama import Llama, parameter_groups
from infini_llama.tasks.train.worker.strategies.schedule import factor

Group = dict[str, Any]  # as torch's optimizers take them, with a "name" and the "peak_lr"
MOMENTUM = 0.95  # of sgd and muon


def build_optimizer(model: Llama, train: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer that `train.optimizer` names.

    Each group has its peak rate as "peak_lr"; decay is decoupled from the gradient (arXiv 1711.05101) but for Adam and SGD.
    """
    groups = [group for group in parameter_groups(model, train.weight_decay) if group["params"]]
    for group in groups:
        group["peak_lr"] = (
            train.gate_learning_rate if group["name"] == "gates" else train.learning_rate
        )
    rate = train.learning_rate
    adam: dict[str, Any] = {
        "lr": rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
        "fused": True,
    }
    match train.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, **adam)
        case "adam":
            return torch.optim.Adam(groups, **adam)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=MOMENTUM, fused=True)
        case "muon":
            matrices, others = _split_matrices(model, groups)
            # Updates of the size of AdamW's, so that one learning rate serves both (Liu et al. 2025, arXiv 2502.16982, section 2.2).
            muon = torch.optim.Muon(
                [matrices], lr=rate, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
            )
            return Both(muon, torch.optim.AdamW(others, **adam))


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
    matrices = decay | {
        "name": "matrices",
        "params": [p for p in decay["params"] if id(p) in inner],
    }
    others = [
        group | {"params": [p for p in group["params"] if id(p) not in inner]} for group in groups
    ]
    return matrices, [group for group in others if group["params"]]


def set_learning_rate(
    optimizer: torch.optim.Optimizer, train: TrainingConfig, max_steps: int, step: int
) -> float:
    """Set every group's rate for the step that follows `step` completed ones; return the first group's."""
    share = factor(train, max_steps, step)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share
    return optimizer.param_groups[0]["lr"]
