"""Before anything is trained: is every rank there, and do they all reach each other. Who does not is named, within a short time."""

import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from infini_llama.configs.errors import PipelineError

POLL_SECONDS = 0.05


def limit(waits: dict[str, Any], nnodes: int) -> float:
    """Seconds for the preflight, of the config's section environment: one machine, which may be loaded, gets at least as long as
    its ranks have for each other in training."""
    seconds = waits["preflight_timeout"]
    return seconds if nnodes > 1 else max(seconds, waits["communication_timeout"])


def preflight(rank: int, world_size: int, seconds: float, afterwards: float) -> Store:
    """Every rank reports at the store where torchrun lets them meet; then one barrier and one sum over a group of their own.

    The group is taken down again: that of the training has other time-outs.

    Args:
        seconds: for all of it.
        afterwards: seconds that the store waits for a key from then on.

    Returns:
        the store, by which the training's group is to be made.

    Raises:
        PipelineError: names the ranks that are not there, or what is wrong between those that are; another attempt may succeed.
    """
    until = time.monotonic() + seconds
    time_out = timedelta(seconds=seconds)
    store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=time_out)))
    store.set(f"there-{rank}", socket.gethostname())
    _await(store, "there", world_size, until, f"has not come within {seconds:g} s (environment.preflight_timeout)")
    try:
        dist.init_process_group(
            "gloo", store=PrefixStore("preflight", store), rank=rank, world_size=world_size, timeout=time_out
        )
        dist.monitored_barrier(timeout=time_out, wait_all_ranks=True)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world_size
        store.set(f"passed-{rank}", "")
        _await(store, "passed", world_size, until + seconds, "has not passed the first all-reduce")
    except RuntimeError as fault:
        raise PipelineError(
            f"rank {rank} on {socket.gethostname()} does not reach all others within {seconds:g} s "
            f"(environment.preflight_timeout): {fault}"
        ) from fault
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    store.set_timeout(timedelta(seconds=afterwards))
    return store


def _await(store: Store, what: str, world_size: int, until: float, complaint: str) -> None:
    """Waits until each rank has set `what`; afterwards says which has not, with the host where that is known."""
    missing = list(range(world_size))
    while missing := [rank for rank in missing if not store.check([f"{what}-{rank}"])]:
        if time.monotonic() > until:
            hosts = {rank: store.get(f"there-{rank}").decode() for rank in missing if store.check([f"there-{rank}"])}
            names = ", ".join(f"{rank} on {hosts[rank]}" if rank in hosts else str(rank) for rank in missing)
            raise PipelineError(f"rank {names} {complaint}; look at the logs of its machine.")
        time.sleep(POLL_SECONDS)
