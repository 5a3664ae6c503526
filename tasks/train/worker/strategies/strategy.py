"""The interface of strategies, and the choice between them.

A strategy spreads model and optimizer over the ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import nn

from infini_llama.configs.parallel import STRATEGIES
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.plan import Precision
from infini_llama.tasks.train.worker.data.loader import Batch
from infini_llama.tasks.train.worker.strategies.native import NativeStrategy
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


class Strategy(Protocol):
    """Model and optimizer of a training, spread over the ranks. Every method is a collective call.

    Attributes:
        model: its parameters may be shards of this rank.
        module: forward is the sum of the token losses of a batch.
    """

    model: Llama
    module: nn.Module
    optimizer: torch.optim.Optimizer

    def accumulate(
        self,
        micro_batches: Sequence[Batch],
        targets: int,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Forward and backward: add to every gradient that of the step's mean loss.

        The mean is over all `targets` of the step, on all ranks. Dividing the *sum* of losses by
        the step's number of targets makes the result independent of how the batch is split.
        Gradients are `scale` times as large (fp16's loss scaling).

        Returns:
            this rank's sum of losses, a scalar on its device.
        """
        ...

    def clip_gradients(self, scale: float = 1.0) -> None:
        """Divide the gradients by `scale`, then scale them down to a 2-norm.

        The norm is `train.max_grad_norm`. Nothing happens here where `update` does both.
        """
        ...

    def update(self, apply: bool, scale: float = 1.0) -> float:
        """Update the weights if `apply` and the gradients are finite, on every rank alike.

        The gradients are discarded in any case.

        Returns:
            the gradients' 2-norm before clipping, not finite where they are not.
        """
        ...

    def discard_gradients(self) -> None:
        """Discard the gradients of a throw-away batch.

        The weights stay, and so does the optimizer's state.
        """
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the training, by its name in a checkpoint.

        These are the parameters, and the optimizer's state of each.
        """
        ...

    def load_tensors(
        self, checkpoint: Path, has_own_optimizer: bool = True
    ) -> list[str]:
        """Fill model and optimizer from a verified checkpoint.

        It may have been written under any strategy by any number of ranks.

        Args:
            has_own_optimizer: False: the optimizer's state in it is another optimizer's, and is not
                read, whatever its tensors are called.

        Returns:
            the tensors of the optimizer that begin at zero.
        """
        ...

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, `model` can be observed, its parameters being tensors or DTensors."""
        ...

    def to_plain_model(self) -> Llama | None:
        """The whole model on the first rank, which it can use alone; None on the others.

        One put together from shards is on the CPU.
        """
        ...


def build_strategy(
    model: Llama,
    train: TrainingConfig,
    precision: Precision,
    micro_batch_size: int,
    ranks: Ranks,
) -> Strategy:
    """The strategy that `train.parallel` names.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    autocast = torch.autocast(
        ranks.device.type, dtype=half, enabled=precision != "fp32"
    )
    make: Any = resolve_name(STRATEGIES[train.parallel].maker)
    if ranks.world_size == 1 and issubclass(make, NativeStrategy):
        make = NativeStrategy  # there is nothing to spread
    return make(model, train, ranks, autocast, micro_batch_size)
