"""Batches: which rows of the dataset a rank sees at a step."""

from collections.abc import Iterator

import numpy as np
import torch

from model.loss import IGNORE_INDEX
from tasks.preprocess.reader import TokenReader
from tasks.train.worker.mixture import mixed_rows, parts_of
from tasks.train.worker.order import sample_rows

Batch = tuple[torch.Tensor, ...]  # what the model's loss takes: inputs, labels, and documents where they are kept apart


def to_batch(
    tokens: np.ndarray, targets: np.ndarray | None, device: torch.device, documents: np.ndarray | None = None
) -> Batch:
    """Rows [b, L+1] of tokens as inputs [b, L] and labels [b, L], the labels one token ahead.

    Args:
        targets: bool [b, L], which labels count; the others become IGNORE_INDEX. None where all do.
        documents: int32 [b, L], the document of each input, which becomes the batch's third part. None: there is none.
    """
    rows = moved(tokens, device)
    labels = rows[:, 1:]
    if targets is not None:
        labels = labels.masked_fill(~moved(targets, device), IGNORE_INDEX)
    return (rows[:, :-1], labels) if documents is None else (rows[:, :-1], labels, moved(documents, device))


def moved(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`, copied to a GPU from pinned memory while the GPU computes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class TrainBatches:
    """The global batch of a step is a function of the samples consumed before it; rank r takes its r-th slice.

    Hence another number of ranks sees the same global batches, and resuming costs nothing.

    Args:
        weights: of the dataset's sources; without, every row of all of them is seen once an epoch.
    """

    def __init__(
        self,
        reader: TokenReader,
        seed: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        isolate: bool = False,
        weights: dict[str, float] | None = None,
    ) -> None:
        self.reader, self.seed, self.isolate = reader, seed, isolate
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.per_rank = global_batch // world_size
        self.rank = rank
        self.parts = parts_of(reader.sources, weights) if weights else None

    def rows(self, samples_consumed: int) -> np.ndarray:
        """Row numbers [global_batch] of the step that follows `samples_consumed` samples."""
        if self.parts:
            return mixed_rows(samples_consumed, self.global_batch, self.parts, self.seed)
        return sample_rows(samples_consumed, self.global_batch, len(self.reader), self.seed)

    def micro_batches(self, samples_consumed: int, device: torch.device) -> Iterator[Batch]:
        """This rank's micro-batches of that step, in order."""
        mine = self.rows(samples_consumed)[self.rank * self.per_rank : (self.rank + 1) * self.per_rank]
        for start in range(0, self.per_rank, self.micro_batch):
            rows = mine[start : start + self.micro_batch]
            documents = self.reader.documents(rows) if self.isolate else None
            yield to_batch(self.reader.gather(rows), self.reader.targets(rows), device, documents)

    def targets(self, samples_consumed: int) -> int:
        """Labels that count in that step, over all ranks: each rank knows the rows of all, so none needs to ask."""
        return max(1, self.reader.count_targets(self.rows(samples_consumed)))
