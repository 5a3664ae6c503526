"""The optimizers that `train.optimizer` names (configs/optimizers.py), and their groups."""

from pkgutil import resolve_name
from typing import Any

import torch

from infini_llama.configs.optimizers import OPTIMIZERS, UpdateRule
from infini_llama.configs.schedules import learning_rate_factor
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.llama import Llama, parameter_groups

# As torch's optimizers take them, with a "name" and the "peak_lr".
Group = dict[str, Any]


def build_optimizer(model: Llama, train: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer that `train.optimizer` names.

    Each group has its peak rate as "peak_lr"; decay is decoupled from the gradient (arXiv
    1711.05101) but for Adam and SGD.
    """
    groups = [
        group
        for group in parameter_groups(model, train.weight_decay)
        if group["params"]
    ]
    of_memories = {"gates": train.gate_learning_rate, "maps": train.map_learning_rate}
    for group in groups:
        group["peak_lr"] = of_memories.get(group["name"], train.learning_rate)
    optimizer = OPTIMIZERS[train.optimizer]
    if optimizer.matrices is None:
        return _made(optimizer.update, groups, train)
    matrices, others = _split_matrices(model, groups)
    of_matrices = _made(optimizer.matrices, [matrices], train)
    return Both(of_matrices, _made(optimizer.update, others, train))


def _made(
    update: UpdateRule, groups: list[Group], train: TrainingConfig
) -> torch.optim.Optimizer:
    make: Any = resolve_name(update.maker)
    return make(groups, lr=train.learning_rate, **update.arguments(train))


class Both(torch.optim.Optimizer):
    """Two optimizers of different parameters as one.

    Their groups and states are shared, not copied.
    """

    def __init__(
        self, first: torch.optim.Optimizer, second: torch.optim.Optimizer
    ) -> None:
        super().__init__(first.param_groups + second.param_groups, {})
        self.parts = (first, second)
        first.state = self.state
        second.state = self.state

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        closure: Any = None,
    ) -> None:
        for part in self.parts:
            part.step(closure)


def _split_matrices(model: Llama, groups: list[Group]) -> tuple[Group, list[Group]]:
    """The layers' matrices, which Muon is for (Jordan et al. 2024), and the rest of the groups.

    The rest are norms, gates, maps of memories, embedding and head.
    """
    of_layers = {id(parameter) for parameter in model.model.layers.parameters()}
    decay = next(group for group in groups if group["name"] == "decay")
    inner = [parameter for parameter in decay["params"] if id(parameter) in of_layers]
    outer = [
        parameter for parameter in decay["params"] if id(parameter) not in of_layers
    ]
    others = [group for group in groups if group is not decay]
    if outer:
        others.insert(0, decay | {"params": outer})
    return decay | {"name": "matrices", "params": inner}, others


def set_learning_rate(
    optimizer: torch.optim.Optimizer,
    train: TrainingConfig,
    max_steps: int,
    step: int,
) -> float:
    """Set every group's rate for the step that follows `step` completed ones.

    Returns:
        the first group's rate.
    """
    share = learning_rate_factor(train, max_steps, step)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share
    return optimizer.param_groups[0]["lr"]
