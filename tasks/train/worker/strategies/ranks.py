"""The ranks: process group, device and collective decisions."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import os
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from infini_llama.model.context import Context


class Ranks:
    """This process among the workers that torchrun started.

    Args:
        timeout_seconds: of every collective call, and of the store from here on.
        store: of `preflight.preflight`, by which the ranks have found each other; None: they do it
            here.
    """

    def __init__(
        self,
        device: str,
        backend: str,
        timeout_seconds: float = 600.0,
        store: Store | None = None,
    ) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self.device = (
            torch.device("cuda", self.local_rank)
            if device == "cuda"
            else torch.device("cpu")
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_seconds)
        if store is not None:
            store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )
        # Checkpoints are written beside the training steps, so their collective calls need a group
        # of their own.
        self.saving_group = cast(
            dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout)
        )
        self.timeout = timeout
        self.context = cast(Context | None, None)

    def use_context_parallel(self, size: int) -> None:
        """Give every `size` neighbouring ranks the same sequences, each a part of them.

        The parts are those of `model.context`. The plan refuses a world size that is not a multiple
        of `size`. A collective call.
        """
        self.context = None
        if size > 1:
            own_group, _ = dist.new_subgroups(size, timeout=self.timeout)
            group = cast(dist.ProcessGroup, own_group)
            self.context = Context(group, self.rank % size, size)

    @property
    def data_world_size(self) -> int:
        """Number of shares of a global batch.

        A share belongs to one rank, or with context parallelism to one group of ranks.
        """
        return (
            self.world_size
            if self.context is None
            else self.world_size // self.context.size
        )

    @property
    def data_rank(self) -> int:
        """Index of the share of this rank, or of its group, among `data_world_size`."""
        return self.rank if self.context is None else self.rank // self.context.size

    @property
    def is_context_rank0(self) -> bool:
        """Whether this rank counts what the sequences hold for all that share them."""
        return self.context is None or self.context.place == 0

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """Sums over ranks, in fp64. Scalar tensors are read from their device here, together."""
        totals = torch.stack([self._wide(value) for value in values])
        dist.all_reduce(totals)
        return totals.tolist()

    def _wide(self, value: float | torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach().double()
        # Without a copy, which a GPU would be waited for.
        return torch.full((), value, dtype=torch.float64, device=self.device)

    def barrier(self) -> None:
        dist.barrier()

    def leave(self) -> None:
        dist.destroy_process_group()
