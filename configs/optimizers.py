"""The optimizers that `train.optimizer` names, without torch.

tasks/train/worker/strategies/optimizer.py makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infini_llama.configs.choices import Choice

if TYPE_CHECKING:
    from infini_llama.configs.schema import TrainingConfig

MOMENTUM = 0.95  # of sgd and muon


@dataclass(frozen=True)
class UpdateRule:
    """A class of optimizers, and what it is given beside parameters and learning rate.

    Attributes:
        maker: the class, as "module:name". Its state is tensors that begin at zero.
        moments: names of the tensors in fp32 that it keeps for each parameter, in its shape.
        arguments: of the class, by name.
    """

    maker: str
    moments: tuple[str, ...]
    arguments: Callable[[TrainingConfig], dict[str, Any]]


@dataclass(frozen=True)
class Optimizer(Choice):
    """A value of `train.optimizer`.

    Attributes:
        update: of all parameters, or of those that `matrices` leaves.
        matrices: update of the matrices of the layers, each of which it needs whole; None: `update`
            is theirs too.
        deepspeed: its name in a DeepSpeed JSON file; "" where DeepSpeed cannot use it.
    """

    update: UpdateRule
    matrices: UpdateRule | None = None
    deepspeed: str = ""


def _adam(train: TrainingConfig) -> dict[str, Any]:
    return {
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
        "fused": True,
    }


ADAMW = UpdateRule("torch.optim:AdamW", ("exp_avg", "exp_avg_sq"), _adam)
OPTIMIZERS = {
    "adamw": Optimizer(
        description="Adam with decoupled weight decay.",
        update=ADAMW,
        deepspeed="AdamW",
    ),
    "adam": Optimizer(
        description="weight decay is added to the gradient.",
        update=UpdateRule("torch.optim:Adam", ("exp_avg", "exp_avg_sq"), _adam),
        deepspeed="Adam",
    ),
    "sgd": Optimizer(
        description=f"a momentum of {MOMENTUM}; weight decay is added to the gradient.",
        update=UpdateRule(
            "torch.optim:SGD",
            ("momentum_buffer",),
            lambda train: {"momentum": MOMENTUM, "fused": True},
        ),
    ),
    "muon": Optimizer(
        description=f"used for the matrices of the layers, with a momentum of {MOMENTUM}; adamw is "
        "used for all other parameters.",
        update=ADAMW,
        # Updates of the size of AdamW's, so that one learning rate serves both (Liu et al. 2025,
        # arXiv 2502.16982, section 2.2).
        matrices=UpdateRule(
            "torch.optim:Muon",
            ("momentum_buffer",),
            lambda train: {"momentum": MOMENTUM, "adjust_lr_fn": "match_rms_adamw"},
        ),
    ),
}
