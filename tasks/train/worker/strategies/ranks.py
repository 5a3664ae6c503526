"""The ranks: process group, device and collective decisions."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import os

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.model.context import Context

POLL_SECONDS = 0.05
SEVERAL_NODES_SECONDS = 120.0


def preflight_timeout(communication_timeout: float, nnodes: int) -> float:
    """Seconds for the preflight. On one machine, which may be loaded, at least as long as for a collective call in training."""
    return SEVERAL_NODES_SECONDS if nnodes > 1 else max(SEVERAL_NODES_SECONDS, communication_timeout)


def preflight(
    rank: int,
    world_size: int,
    seconds: float,
    afterwards: float,
    check: Callable[[Store], None] = lambda store: None,
) -> Store:
    """Every rank reports to torchrun's store; then one barrier and one sum over a process group.

    The group is destroyed again: that of the training has other timeouts.

    Args:
        seconds: for the whole preflight.
        afterwards: seconds that the store waits for a key from then on.
        check: what else has to hold, once every rank is there; all of them call it.

    Returns:
        the store for the training's process group.

    Raises:
        PipelineError: names the missing ranks, or what failed between those that are there; another attempt may succeed.
    """
    until = time.monotonic() + seconds
    timeout = timedelta(seconds=seconds)
    store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
    store.set(f"there-{rank}", socket.gethostname())
    _await(store, "there", world_size, until, f"has not responded within {seconds:g} s")
    check(store)
    try:
        dist.init_process_group(
            "gloo", store=PrefixStore("preflight", store), rank=rank, world_size=world_size, timeout=timeout
        )
        dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world_size
        store.set(f"passed-{rank}", "")
        _await(store, "passed", world_size, until + seconds, "has not passed the first all-reduce")
    except RuntimeError as fault:
        raise PipelineError(
            f"rank {rank} on {socket.gethostname()} cannot reach all other ranks within {seconds:g} s: {fault}"
        ) from fault
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    store.set_timeout(timedelta(seconds=afterwards))
    return store


def _await(store: Store, what: str, world_size: int, until: float, complaint: str) -> None:
    """Wait until each rank has set `what`; then name those that have not, with the host where it is known."""
    missing = list(range(world_size))
    while missing := [rank for rank in missing if not store.check([f"{what}-{rank}"])]:
        if time.monotonic() > until:
            hosts = {rank: store.get(f"there-{rank}").decode() for rank in missing if store.check([f"there-{rank}"])}
            names = ", ".join(f"{rank} on {hosts[rank]}" if rank in hosts else str(rank) for rank in missing)
            raise PipelineError(f"rank {names} {complaint}; see the logs on its machine.")
        time.sleep(POLL_SECONDS)


class Ranks:
    """This process among the workers that torchrun started.

    Args:
        timeout_seconds: of every collective call.
        preflight_seconds: of `preflight`; None: it is skipped.
        check: of `preflight`.
    """

    def __init__(
        self,
        device: str,
        backend: str,
        timeout_seconds: float = 600.0,
        preflight_seconds: float | None = None,
        check: Callable[[Store], None] = lambda store: None,
    ) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self.device = torch.device("cuda", self.local_rank) if device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_seconds)
        if preflight_seconds is not None and self.world_size > 1:
            store = preflight(self.rank, self.world_size, preflight_seconds, timeout_seconds, check)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
        # Checkpoints are written beside the training steps, so their collective calls need a group of their own.
        self.saving_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        self.timeout, self.context = timeout, cast(Context | None, None)

    def use_context_parallel(self, size: int) -> None:
        """Give every `size` neighbouring ranks the same sequences, each a part of them (`model.context`). A collective call.

        Raises:
            ConfigError: the world size is not a multiple of `size`.
        """
        self.context = None
        if self.world_size % size:
            raise ConfigError(
                f"train.context_parallel={size}, but {self.world_size} worker(s) cannot be divided into groups of "
                f"{size}; choose a divisor."
            )
        if size > 1:
            group = cast(dist.ProcessGroup, dist.new_subgroups(size, timeout=self.timeout)[0])
            self.context = Context(group, self.rank % size, size)

    @property
    def data_world_size(self) -> int:
        """Among how many a global batch is split: the ranks, or with context parallelism groups of them."""
        return self.world_size if self.context is None else self.world_size // self.context.size

    @property
    def data_rank(self) -> int:
        """Which of them this rank is, or is part of."""
        return self.rank if self.context is None else self.rank // self.context.size

    @property
    def is_context_rank0(self) -> bool:
        """Whether this rank counts what the sequences hold for all that share them."""
        return self.context is None or self.context.place == 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """Sums over ranks, in fp64. Scalar tensors are read from their device here, together."""
        totals = torch.stack([self._wide(value) for value in values])
        dist.all_reduce(totals)
        return totals.tolist()

    def _wide(self, value: float | torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach().double()
        return torch.full(
            (), value, dtype=torch.float64, device=self.device
        )  # no copy, which a GPU would be waited for

    def all(self, condition: bool) -> bool:
        """Whether `condition` holds on every rank."""
        return self.sum(float(not condition))[0] == 0

    def barrier(self) -> None:
        dist.barrier()

    def leave(self) -> None:
        dist.destroy_process_group()
