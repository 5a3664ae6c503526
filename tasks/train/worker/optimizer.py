"""The optimizer of a run: AdamW, Adam, SGD or Muon, its parameter groups and their rates."""

from typing import Any

import torch

from infini_llama.model.llama import Llama, parameter_groups
from infini_llama.tasks.train.worker.schedule import factor


def build_optimizer(model: Llama, train: dict) -> torch.optim.Optimizer:
    """Each group keeps its peak rate under "peak_lr"; decay is decoupled from the gradient (arXiv 1711.05101) but for Adam and SGD."""
    groups = [group for group in parameter_groups(model, train["weight_decay"]) if group["params"]]
    for group in groups:
        group["peak_lr"] = train["gate_learning_rate"] if group["name"] == "gates" else train["learning_rate"]
        if group["name"] == "no_decay" and train["weight_decay_embeddings"]:
            groups.append(_embedding(model, group, train["weight_decay"]))
    rate, betas, eps = train["learning_rate"], (train["adam_beta1"], train["adam_beta2"]), train["adam_epsilon"]
    match train["optimizer"]:
        case "adam":
            return torch.optim.Adam(groups, lr=rate, betas=betas, eps=eps, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=train["momentum"], fused=True)
        case "muon":
            matrices, others = _matrices(model, groups)
            # Updates of the size of AdamW's, so that one learning rate serves both (Liu et al. 2025, arXiv 2502.16982, section 2.2).
            muon = torch.optim.Muon([matrices], lr=rate, momentum=train["momentum"], adjust_lr_fn="match_rms_adamw")
            return Both(muon, torch.optim.AdamW(others, lr=rate, betas=betas, eps=eps, fused=True))
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)


class Both(torch.optim.Optimizer):
    """Two optimizers of different parameters as one: their groups and states are shared, not copied."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        super().__init__(first.param_groups + second.param_groups, {})
        self.parts = (first, second)
        first.state = second.state = self.state

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for part in self.parts:
            part.step(closure)


def _embedding(model: Llama, group: dict, weight_decay: float) -> dict:
    """A group of its own for the embedding, taken out of those that have no decay."""
    embedding = model.model.embed_tokens.weight
    group["params"] = [parameter for parameter in group["params"] if parameter is not embedding]
    return group | {"name": "embedding", "params": [embedding], "weight_decay": weight_decay}


def _matrices(model: Llama, groups: list[dict]) -> tuple[dict, list[dict]]:
    """The layers' matrices, which Muon is for (Jordan et al. 2024), and what is left of the groups: norms, gates, embedding, head."""
    inner = {id(parameter) for parameter in model.model.layers.parameters() if parameter.ndim == 2}
    decay = next(group for group in groups if group["name"] == "decay")
    matrices = decay | {"name": "matrices", "params": [p for p in decay["params"] if id(p) in inner]}
    others = [group | {"params": [p for p in group["params"] if id(p) not in inner]} for group in groups]
    return matrices, [group for group in others if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, train: dict, step: int) -> float:
    """Every group's rate for the step that follows `step` completed ones; returns the first group's."""
    share = factor(train, step)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share
    return optimizer.param_groups[0]["lr"]
