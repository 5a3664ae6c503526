"""Global batches, built ahead by threads while the current step computes; the batches and their order stay the same."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import torch

from infini_llama.tasks.train.worker.data.loader import Batch, TrainBatches


class GlobalBatch(NamedTuple):
    """One step's data: this rank's micro-batches, and the number of targets over all ranks."""

    micro_batches: list[Batch]
    targets: int


class Prefetch:
    """Global batches by the samples consumed before them.

    Threads build them in CPU memory, pinned if training is on a GPU; the training thread copies them to the device. An
    exception in a thread is raised at the step whose batch it is.

    Args:
        following: samples consumed before the next step, from those before a step.
        workers: threads, and steps built ahead; 0: each batch is built when it is requested, on the device itself.
    """

    def __init__(
        self, batches: TrainBatches, device: torch.device, following: Callable[[int], int], workers: int
    ) -> None:
        self.batches, self.device, self.following, self.workers = batches, device, following, workers
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="data") if workers else None
        self.ahead: dict[int, Future[GlobalBatch]] = {}

    def batch_at(self, samples: int) -> GlobalBatch:
        """The batch of the step that follows `samples` samples, on the device."""
        if self.threads is None:
            return GlobalBatch(list(self.batches.micro_batches(samples, self.device)), self.batches.targets(samples))
        needed = [samples]
        while len(needed) <= self.workers:
            needed.append(self.following(needed[-1]))
        # A batch built for a position that is never reached is dropped.
        self.ahead = {first: self.ahead.get(first) or self.threads.submit(self._build, first) for first in needed}
        built = self.ahead.pop(samples).result()
        moved = [tuple(part.to(self.device, non_blocking=True) for part in batch) for batch in built.micro_batches]
        return GlobalBatch(moved, built.targets)

    def _build(self, samples: int) -> GlobalBatch:
        built = list(self.batches.micro_batches(samples, torch.device("cpu")))
        if self.device.type == "cuda":
            built = [tuple(part.pin_memory() for part in batch) for batch in built]
        return GlobalBatch(built, self.batches.targets(samples))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the batches that threads are building, and cancel the others."""
        if self.threads is not None:
            self.threads.shutdown(wait=True, cancel_futures=True)
