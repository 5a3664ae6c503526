"""Batches of the steps to come, built by threads while the current step computes; which batches, and their order, stay the same."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch

from infini_llama.tasks.train.worker.data.loader import Batch, TrainBatches

Step = tuple[list[Batch], int]  # this rank's micro-batches, and the labels that count over all ranks


class Prefetch:
    """Gives a step's batches by the samples consumed before it.

    Threads build them in memory of the CPU, pinned where training is on a GPU; the thread that trains copies them over. An error of
    theirs is raised at the step whose batch it is.

    Args:
        following: the samples consumed before the step after the one that began at some number of samples.
        workers: threads, and steps built ahead; 0: each step is built when it is asked for, on the device itself.
    """

    def __init__(
        self, batches: TrainBatches, device: torch.device, following: Callable[[int], int], workers: int
    ) -> None:
        self.batches, self.device, self.following, self.workers = batches, device, following, workers
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="data") if workers else None
        self.ahead: dict[int, Future[Step]] = {}

    def step(self, samples: int) -> Step:
        """The batches, on the device, of the step that follows `samples` samples."""
        if self.threads is None:
            return list(self.batches.micro_batches(samples, self.device)), self.batches.targets(samples)
        wanted = [samples]
        while len(wanted) <= self.workers:
            wanted.append(self.following(wanted[-1]))
        # What was built for a place that is never reached is dropped.
        self.ahead = {at: self.ahead.get(at) or self.threads.submit(self._build, at) for at in wanted}
        micro_batches, targets = self.ahead.pop(samples).result()
        return [tuple(part.to(self.device, non_blocking=True) for part in batch) for batch in micro_batches], targets

    def _build(self, samples: int) -> Step:
        built = list(self.batches.micro_batches(samples, torch.device("cpu")))
        if self.device.type == "cuda":
            built = [tuple(part.pin_memory() for part in batch) for batch in built]
        return built, self.batches.targets(samples)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the steps that threads are building, and leaves out those they have not begun."""
        if self.threads is not None:
            self.threads.shutdown(wait=True, cancel_futures=True)
