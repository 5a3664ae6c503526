"""AdamW with the right weight-decay groups, and the learning rate as a pure function of the step."""

import math

import torch

from model.llama import Llama, parameter_groups


def learning_rate_factor(step: int, warmup_steps: int, max_steps: int, final_ratio: float) -> float:
    """Share of the peak learning rate that step `step` (from 0) uses: linear warm-up, then a cosine to `final_ratio`.

    Loshchilov and Hutter 2017 (SGDR, arXiv 1608.03983), eq. 5, with one period.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(model: Llama, train: dict) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101); each group keeps its peak rate under "peak_lr"."""
    groups = parameter_groups(model, train["weight_decay"])
    for group in groups:
        group["peak_lr"] = train["gate_learning_rate"] if group["name"] == "gates" else train["learning_rate"]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train["learning_rate"],
        betas=(train["adam_beta1"], train["adam_beta2"]),
        eps=train["adam_epsilon"],
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, train: dict, step: int) -> float:
    """Every group's rate for the step that follows `step` completed ones; returns the first group's."""
    factor = learning_rate_factor(step, train["warmup_steps"], train["max_steps"], train["min_learning_rate_ratio"])
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return optimizer.param_groups[0]["lr"]
