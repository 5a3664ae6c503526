"""Facts of each optimizer, without torch.

The function of its name in tasks/train/worker/strategies/optimizer.py builds it.
"""

from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw", "adam", "sgd", "muon"]
Strategy = Literal["ddp", "fsdp", "hsdp", "deepspeed"]


@dataclass(frozen=True)
class Optimizer:
    """The facts of one optimizer.

    Attributes:
        moments: values in fp32 that it keeps for each parameter.
        matrix_moments: the same for the matrices of the layers.
        deepspeed: its name in a DeepSpeed JSON file; "" where DeepSpeed cannot use it.
        strategies: values of train.parallel that it works with.
    """

    moments: int
    matrix_moments: int
    deepspeed: str
    strategies: tuple[Strategy, ...]


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adamw": Optimizer(
        moments=2,
        matrix_moments=2,
        deepspeed="AdamW",
        strategies=("ddp", "fsdp", "hsdp", "deepspeed"),
    ),
    "adam": Optimizer(
        moments=2,
        matrix_moments=2,
        deepspeed="Adam",
        strategies=("ddp", "fsdp", "hsdp", "deepspeed"),
    ),
    "sgd": Optimizer(
        moments=1,
        matrix_moments=1,
        deepspeed="",
        strategies=("ddp", "fsdp", "hsdp"),
    ),
    # An update needs the whole matrix; all other parameters are AdamW's.
    "muon": Optimizer(
        moments=2,
        matrix_moments=1,
        deepspeed="",
        strategies=("ddp",),
    ),
}
