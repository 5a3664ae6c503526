"""Batches: which rows of the dataset a rank sees at a step."""

# pyright: reportUnknownMemberType=false
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Self

import numpy as np
import torch

from infini_llama.model.loss import IGNORE_INDEX
from infini_llama.tasks.preprocess.tokens.order import (
    WeightedSource,
    in_order,
    mixed_rows,
    rows_of_samples,
    samples_used,
    weighted_sources,
)
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.lineage import SampleRange


class Batch(NamedTuple):
    """Rows of a micro-batch: the arguments of the model's loss.

    Attributes:
        inputs, labels: [b, L].
        documents: int32 [b, L], the document of each input; None: they are not kept apart.
        row_weights: [b], of the rows in the gradient; None: 1.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with the function's value in place of each tensor."""
        return Batch(
            function(self.inputs),
            function(self.labels),
            None if self.documents is None else function(self.documents),
            None if self.row_weights is None else function(self.row_weights),
        )


def to_batch(
    tokens: np.ndarray,
    targets: np.ndarray | None,
    device: torch.device,
    documents: np.ndarray | None = None,
    row_weights: np.ndarray | None = None,
) -> Batch:
    """Rows [b, L+1] of tokens as inputs [b, L] and labels [b, L], the labels one token ahead.

    Args:
        targets: bool [b, L], which labels count; the others become IGNORE_INDEX. None where all do.
        documents, row_weights: as in `Batch`.
    """
    rows = to_device(tokens, device)
    inputs = rows[:, :-1]
    labels = rows[:, 1:]
    if targets is not None:
        labels = labels.masked_fill(~to_device(targets, device), IGNORE_INDEX)
    return Batch(
        inputs,
        labels,
        None if documents is None else to_device(documents, device),
        None if row_weights is None else to_device(row_weights, device),
    )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`, copied to a GPU from pinned memory while it computes."""
    tensor = torch.from_numpy(array)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor
    )


@dataclass(frozen=True)
class CurriculumStage:
    """The samples of a run from number `first` on.

    Each of them is `rows_per_sample` rows that follow each other in the table's own order. A
    rollback moves the stage to later samples, not their rows: those of samples that it leaves out
    are not used again.
    """

    reader: TokenReader
    first: int
    rows_per_sample: int
    sources: tuple[WeightedSource, ...]  # () where they have no weights
    loss_weights: tuple[float, ...]  # of the reader's sources; () where they are alike

    def rows(self, sample: int, count: int, seed: int) -> np.ndarray:
        """Row numbers [count * rows_per_sample] of consecutive samples.

        These are the samples numbered sample … sample+count-1 of the whole run.
        """
        first = (sample - self.first) * self.rows_per_sample
        number = count * self.rows_per_sample
        if self.sources:
            return mixed_rows(first, number, self.sources, seed)
        return rows_of_samples(first, number, len(self.reader), seed)

    def row_weights(self, rows: np.ndarray) -> np.ndarray | None:
        """Weights of a step's rows in its gradient, float64 [rows]; None: 1.

        With them, the mean over the N targets of the step has the gradient of the weighted mean
        sum(w loss) / sum(w), where w is the loss_weight of a target's source, as of torch's
        cross_entropy with class weights. A row's weight is therefore w N / sum(w). It follows from
        the rows of the global batch, so that neither ranks nor micro-batches change it.
        """
        if not self.loss_weights:
            return None
        reader = self.reader
        ends = np.cumsum([source.rows for source in reader.sources])
        source_of_row = np.searchsorted(ends, rows, side="right")
        weighted_targets = 0.0
        for source, loss_weight in enumerate(self.loss_weights):
            own_rows = rows[source_of_row == source]
            weighted_targets += loss_weight * reader.count_targets(own_rows)
        targets = reader.count_targets(rows)
        scale = targets / weighted_targets if targets else 1.0
        return np.array(self.loss_weights)[source_of_row] * scale


def curriculum_stages(
    reader: TokenReader,
    shorter: Sequence[tuple[TokenReader, int]] = (),
    weights: dict[str, float] | None = None,
    loss_weights: dict[str, float] | None = None,
) -> list[CurriculumStage]:
    """The samples of a run, in order.

    Args:
        shorter: rows of other lengths for the beginning of the run, each with the first sample that
            is no longer of them, ascending. Their length divides the reader's; a sample is as many
            of them as it has tokens.
        weights: of the dataset's sources; without, every row of all of them is seen once per epoch.
        loss_weights: of the dataset's sources, see `CurriculumStage.row_weights`.
    """
    readers = [*(table for table, _ in shorter), reader]
    firsts = [0, *(until for _, until in shorter)]
    stages: list[CurriculumStage] = []
    for table, first in zip(readers, firsts, strict=True):
        sources = weighted_sources(table.sources, weights) if weights else ()
        rows_per_sample = reader.sequence_length // table.sequence_length
        of_loss = in_order(table.sources, loss_weights) if loss_weights else ()
        stages.append(CurriculumStage(table, first, rows_per_sample, sources, of_loss))
    return stages


def curriculum_stages_of(attempt: AttemptPlan) -> list[CurriculumStage]:
    """`curriculum_stages` with the dataset and the settings of a run."""

    def reader(row_table: str) -> TokenReader:
        return TokenReader(
            attempt.dataset_path,
            row_table,
            "train",
            verify_on_read=attempt.verify_on_read,
        )

    return curriculum_stages(
        reader(attempt.dataset.row_table),
        [(reader(row_table), end) for row_table, end in attempt.shorter_rows],
        attempt.lineage.dataset.weights,
        attempt.lineage.loss_weights,
    )


@dataclass(frozen=True)
class BatchPlan:
    """The global batches of a run, and the part of them that one rank takes.

    Attributes:
        seed: of the order of samples.
        global_batch, micro_batch: sequences.
        rank, world_size: of the groups of ranks that have rows of their own.
        isolate: batches have the document of each token.
        skipped: samples that rollbacks have left out; a stage has its number of steps without them.
    """

    seed: int
    global_batch: int
    micro_batch: int
    rank: int
    world_size: int
    isolate: bool = False
    skipped: Sequence[SampleRange] = ()

    @property
    def per_rank(self) -> int:
        """Sequences of a global batch that the rank takes."""
        return self.global_batch // self.world_size


class TrainBatches:
    """The global batches of a run: rank r takes the r-th slice of each.

    The global batch of a step is a function of the samples consumed before it. Hence another number
    of ranks sees the same global batches, and resuming costs nothing.
    """

    def __init__(self, stages: list[CurriculumStage], plan: BatchPlan) -> None:
        self.stages = stages
        self.plan = plan

    def most_documents(self) -> int:
        """The most documents that any row has."""
        return max(stage.reader.most_documents() for stage in self.stages)

    def stage(self, samples_consumed: int) -> CurriculumStage:
        """The stage of the step that follows `samples_consumed` samples."""
        used = samples_used(samples_consumed, self.plan.skipped)
        begun = bisect_right(self.stages, used, key=lambda stage: stage.first)
        return self.stages[begun - 1]

    def rows(self, samples_consumed: int) -> np.ndarray:
        """Row numbers [global_batch * rows per sample] of a step.

        It is the step that follows `samples_consumed` samples.
        """
        return self.stage(samples_consumed).rows(
            samples_consumed, self.plan.global_batch, self.plan.seed
        )

    def micro_batches(
        self, samples_consumed: int, device: torch.device
    ) -> Iterator[Batch]:
        """This rank's micro-batches of that step, in order."""
        stage = self.stage(samples_consumed)
        reader = stage.reader
        rows_per_rank = self.plan.per_rank * stage.rows_per_sample
        rows_per_batch = self.plan.micro_batch * stage.rows_per_sample
        first = self.plan.rank * rows_per_rank
        all_rows = self.rows(samples_consumed)
        row_weights = stage.row_weights(all_rows)
        for start in range(first, first + rows_per_rank, rows_per_batch):
            part = slice(start, min(start + rows_per_batch, first + rows_per_rank))
            rows = all_rows[part]
            documents = reader.documents(rows) if self.plan.isolate else None
            weights = None if row_weights is None else row_weights[part]
            yield to_batch(
                reader.gather(rows), reader.targets(rows), device, documents, weights
            )

    def targets(self, samples_consumed: int) -> int:
        """Labels that count in that step, over all ranks.

        Each rank computes the rows of all, without communication.
        """
        reader = self.stage(samples_consumed).reader
        return reader.count_targets(self.rows(samples_consumed))

    def first_with_targets(self) -> tuple[int, int]:
        """The first micro-batch of which a label counts on any rank.

        Returns:
            samples consumed before its step, and its number in the step; (0, 0) where no label
            counts in the first epoch. The same on all ranks, since each rank knows the rows of all.
        """
        for samples in count(0, self.plan.global_batch):
            stage = self.stage(samples)
            if samples and samples * stage.rows_per_sample >= len(stage.reader):
                break
            rows = self.rows(samples)
            if not stage.reader.count_targets(rows):
                continue
            of_ranks = rows.reshape(-1, self.plan.per_rank * stage.rows_per_sample)
            length = self.plan.micro_batch * stage.rows_per_sample
            for number, start in enumerate(range(0, of_ranks.shape[1], length)):
                micro_batch = of_ranks[:, start : start + length]
                if stage.reader.count_targets(micro_batch.ravel()):
                    return samples, number
        return 0, 0

    def input_tokens(self, samples_consumed: int) -> int:
        """Tokens that the model reads in that step, over all ranks, padding among them."""
        stage = self.stage(samples_consumed)
        return (
            self.plan.global_batch
            * stage.rows_per_sample
            * stage.reader.sequence_length
        )


class GlobalBatch(NamedTuple):
    """One step's data: this rank's micro-batches, and the number of targets over all ranks."""

    micro_batches: list[Batch]
    targets: int


class Prefetch:
    """Global batches by the samples consumed before them.

    Threads build them in CPU memory, pinned if training is on a GPU; the training thread copies
    them to the device. An exception in a thread is raised at the step whose batch it is.

    Args:
        following: samples consumed before the next step, from those before a step.
        workers: threads, and steps built ahead; 0: each batch is built when it is requested, on the
            device itself.
    """

    def __init__(
        self,
        batches: TrainBatches,
        device: torch.device,
        following: Callable[[int], int],
        workers: int,
    ) -> None:
        self.batches = batches
        self.device = device
        self.following = following
        self.workers = workers
        self.threads = (
            ThreadPoolExecutor(workers, thread_name_prefix="data") if workers else None
        )
        self.ahead: dict[int, Future[GlobalBatch]] = {}

    def batch_at(self, samples: int) -> GlobalBatch:
        """The batch of the step that follows `samples` samples, on the device."""
        if self.threads is None:
            micro_batches = list(self.batches.micro_batches(samples, self.device))
            return GlobalBatch(micro_batches, self.batches.targets(samples))
        ahead: dict[int, Future[GlobalBatch]] = {}
        first = samples
        for _ in range(self.workers + 1):
            ahead[first] = self.ahead.get(first) or self.threads.submit(
                self._build, first
            )
            first = self.following(first)
        # A batch built for a position that is never reached is dropped.
        self.ahead = ahead
        built = self.ahead.pop(samples).result()
        on_device = [
            batch.map(lambda part: part.to(self.device, non_blocking=True))
            for batch in built.micro_batches
        ]
        return GlobalBatch(on_device, built.targets)

    def _build(self, samples: int) -> GlobalBatch:
        built = list(self.batches.micro_batches(samples, torch.device("cpu")))
        if self.device.type == "cuda":
            built = [batch.map(torch.Tensor.pin_memory) for batch in built]
        return GlobalBatch(built, self.batches.targets(samples))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the batches that threads are building, and cancel the others."""
        if self.threads is not None:
            self.threads.shutdown(wait=True, cancel_futures=True)
