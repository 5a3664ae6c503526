"""Batches: which rows of the dataset a rank sees at a step."""

from collections.abc import Iterator

import numpy as np
import torch

from model.loss import IGNORE_INDEX
from tasks.preprocess.reader import TokenReader
from tasks.train.worker.order import sample_rows

Batch = tuple[torch.Tensor, torch.Tensor]


def to_batch(tokens: np.ndarray, targets: np.ndarray | None, device: torch.device) -> Batch:
    """Rows [b, L+1] of tokens as inputs [b, L] and labels [b, L], the labels one token ahead.

    Args:
        targets: bool [b, L], which labels count; the others become IGNORE_INDEX. None where all do.
    """
    rows = torch.from_numpy(tokens)
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    if targets is None:
        return rows[:, :-1], rows[:, 1:]
    return rows[:, :-1], rows[:, 1:].masked_fill(~torch.from_numpy(targets).to(device), IGNORE_INDEX)


class TrainBatches:
    """The global batch of a step is a function of the samples consumed before it; rank r takes its r-th slice.

    Hence another number of ranks sees the same global batches, and resuming costs nothing.
    """

    def __init__(
        self, reader: TokenReader, seed: int, global_batch: int, micro_batch: int, rank: int, world_size: int
    ) -> None:
        self.reader, self.seed = reader, seed
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.per_rank = global_batch // world_size
        self.rank = rank

    def rows(self, samples_consumed: int) -> np.ndarray:
        """Row numbers [global_batch] of the step that follows `samples_consumed` samples."""
        return sample_rows(samples_consumed, self.global_batch, len(self.reader), self.seed)

    def micro_batches(self, samples_consumed: int, device: torch.device) -> Iterator[Batch]:
        """This rank's micro-batches of that step, in order."""
        mine = self.rows(samples_consumed)[self.rank * self.per_rank : (self.rank + 1) * self.per_rank]
        for start in range(0, self.per_rank, self.micro_batch):
            rows = mine[start : start + self.micro_batch]
            yield to_batch(self.reader.gather(rows), self.reader.targets(rows), device)

    def targets(self, samples_consumed: int) -> int:
        """Labels that count in that step, over all ranks: each rank knows the rows of all, so none needs to ask."""
        return max(1, self.reader.count_targets(self.rows(samples_consumed)))
