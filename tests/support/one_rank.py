"""One rank without a process group, and strategies for tests of the worker."""

import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.strategies.native import NativeStrategy
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


class OneRank(Ranks):
    """The one rank of a world without a process group."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.local_rank, self.local_world_size = 0, 1, 0, 1
        self.device, self.context = torch.device("cpu"), None

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        return [float(value) for value in values]


def single_rank(model: Llama, train: TrainingConfig | None = None) -> NativeStrategy:
    """The strategy of one rank, in the model's own precision."""
    settings = train or TrainingConfig()
    return NativeStrategy(
        model, settings, OneRank(), torch.autocast("cpu", enabled=False), 1
    )
