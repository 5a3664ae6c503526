"""The ranks: process group, device and the few things they agree on."""

import os
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from infini_llama.configs.errors import ConfigError
from infini_llama.model.context import Context
from infini_llama.tasks.train.worker.preflight import preflight


class Ranks:
    """This process's place among the workers that torchrun started, and what they decide together.

    Args:
        timeout_seconds: that one waits for another in any exchange.
        preflight_seconds: that they get to find each other (`preflight`); None: that is not tried.
    """

    def __init__(
        self, device: str, backend: str, timeout_seconds: float = 600.0, preflight_seconds: float | None = None
    ) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self.device = torch.device("cuda", self.local_rank) if device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_seconds)
        if preflight_seconds is not None and self.world_size > 1:
            store = preflight(self.rank, self.world_size, preflight_seconds, timeout_seconds)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
        # Checkpoints are written beside the training steps, so their agreements must not get between the gradients'.
        self.saving_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        self.timeout, self.context = timeout, cast(Context | None, None)

    def share_rows(self, size: int) -> None:
        """Lets every `size` neighbours have the same rows, each its part of them (`model.context`); all ranks have to ask.

        Raises:
            ConfigError: the ranks are not whole groups of `size`.
        """
        self.context = None
        if self.world_size % size:
            raise ConfigError(
                f"train.context_parallel={size}, but {self.world_size} worker(s) are no whole groups of {size}; choose a divisor."
            )
        if size > 1:
            group = cast(dist.ProcessGroup, dist.new_subgroups(size, timeout=self.timeout)[0])
            self.context = Context(group, self.rank % size, size)

    @property
    def groups(self) -> int:
        """How many groups of ranks have rows of their own: each rank, or with context parallelism several together."""
        return self.world_size if self.context is None else self.world_size // self.context.size

    @property
    def group(self) -> int:
        """Which of them this rank is in."""
        return self.rank if self.context is None else self.rank // self.context.size

    @property
    def counts_rows(self) -> bool:
        """Whether this rank is the one of its group that counts what the rows hold."""
        return self.context is None or self.context.place == 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sums over ranks, in fp64."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return totals.tolist()

    def all(self, condition: bool) -> bool:
        """Whether `condition` holds on every rank."""
        return self.sum(float(not condition))[0] == 0

    def barrier(self) -> None:
        dist.barrier()

    def leave(self) -> None:
        dist.destroy_process_group()
