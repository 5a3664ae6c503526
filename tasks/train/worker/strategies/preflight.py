"""Check before training that every rank has started and reaches all others, within a short time; name those that do not."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from infini_llama.configs.errors import PipelineError

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
