"""Saving while training goes on: the state is copied, and a thread writes and commits the copy."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed.tensor import DTensor

from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.train.worker import checkpoint
from infini_llama.tasks.train.worker.strategies.native import local_part, replica_of
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

log = logging.getLogger("infini_llama.worker")


class Saver:
    """Commits checkpoints of one run, at most one at a time in the background; leaving its context waits for that one.

    Args:
        folder: of the run's checkpoints.
        train: the run's `train` section.
        before_commit: called before the checkpoint can be seen: puts on the disk what led to it. None where nothing does.
    """

    def __init__(self, folder: Path, train: dict, ranks: Ranks, before_commit: Callable[[], None] | None) -> None:
        self.folder, self.train, self.ranks, self.before_commit = folder, train, ranks, before_commit
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="save") if train["async_save"] else None
        self.pending: Future[float] | None = None
        self.copies: dict[str, torch.Tensor] = {}

    def save(self, step: int, state: dict[str, torch.Tensor], scalars: dict) -> None:
        """Commits the state as it is now; in the background, it returns after one copy and the end of the save before.

        Raises:
            Exception: whatever made this save, or the pending one, fail.
        """
        state = self._share(state)
        if self.thread is None:
            self._write(step, state, scalars)
            return
        self.wait()
        self.pending = self.thread.submit(self._write, step, self._copy(state), scalars)

    def wait(self) -> float:
        """Waits for the pending save; returns the seconds it took, 0 without one, or raises what it failed with."""
        pending, self.pending = self.pending, None
        return pending.result() if pending else 0.0

    def poll(self) -> float:
        """`wait`, where that takes no time; else 0."""
        return self.wait() if self.pending and self.pending.done() else 0.0

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.thread is None:
            return
        try:
            self.wait()
        except BaseException:
            if error is None:
                raise
            log.exception("the pending save failed as well")
        finally:
            self.thread.shutdown(wait=False)

    def _share(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this rank has to write: of each tensor that several ranks hold, the owner alone has it in its part."""
        loads: dict[tuple[int, int], int] = {}
        mine = {}
        for name, value in state.items():
            index, count = replica_of(value, self.ranks)
            owner = min(range(count), key=lambda replica: loads.get((count, replica), 0))
            loads[count, owner] = loads.get((count, owner), 0) + value.nbytes
            if owner == index:
                mine[name] = value
        return mine

    def _copy(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state in memory of its own on the host, the same memory each time."""
        if self.copies.keys() != state.keys():
            self.copies = {name: _empty_like(value) for name, value in state.items()}
        for name, value in state.items():
            local_part(self.copies[name]).copy_(local_part(value), non_blocking=True)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return self.copies

    def _write(self, step: int, state: dict[str, torch.Tensor], scalars: dict) -> float:
        began = time.perf_counter()
        if self.before_commit is not None:
            self.before_commit()
        target = checkpoint.save(self.folder, step, state, scalars, self.ranks.saving_group)
        if self.ranks.is_first:
            checkpoints.point_and_prune(self.folder, self.train["save_total_limit"], self.train["save_permanent_every"])
            log.info("committed %s", target.name)
        return time.perf_counter() - began


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    """Memory for the same part of the same tensor on the host; pinned where it will be copied to from a GPU."""
    local = local_part(value)
    memory = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    if not isinstance(value, DTensor):
        return memory
    return DTensor.from_local(
        memory, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
