"""The ranks: process group, device, data-parallel wrapper and the few things they agree on."""

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model.llama import Llama


class LossModule(nn.Module):
    """Llama with its loss inside forward, where DistributedDataParallel can see it."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the token cross-entropies of input_ids [b, T] against labels [b, T], a scalar in fp32."""
        return self.model.loss(input_ids, labels)[0]


class Ranks:
    """This process's place among the workers that torchrun started, and what they decide together."""

    def __init__(self, device: str, backend: str, timeout_seconds: float = 600.0) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank) if device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, module: LossModule) -> nn.Module:
        """DistributedDataParallel where there is more than one rank; it averages gradients over ranks."""
        if self.world_size == 1:
            return module
        devices = [self.local_rank] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)

    def sum(self, *values: float) -> list[float]:
        """Sums over ranks, in fp64."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return totals.tolist()

    def from_first(self, value: str) -> str:
        """The first rank's string, on every rank."""
        box: list[str | None] = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return str(box[0])

    def barrier(self) -> None:
        dist.barrier()

    def leave(self) -> None:
        dist.destroy_process_group()


def no_sync(module: nn.Module, skip: bool) -> AbstractContextManager[None]:
    """Inside it DDP does not reduce gradients: for every micro-batch of a step but the last."""
    if skip and isinstance(module, DistributedDataParallel):
        return module.no_sync()
    return nullcontext()
