"""Validation loss over a fixed set of held-out rows, the same at every world size."""

# pyright: reportUnknownMemberType=false
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from infini_llama.configs.durations import count
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.tokens.order import representative_rows
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.metrics import ValidationLine
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.train.worker.callbacks.callback import (
    Callback,
    Interval,
    StepResult,
    Training,
)
from infini_llama.tasks.train.worker.callbacks.gates import MemoryNorms
from infini_llama.tasks.train.worker.callbacks.step_metrics import StepMetrics
from infini_llama.tasks.train.worker.data.loader import to_batch
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

# Validation sequences per evaluation, where train.eval_tokens is not set.
SEQUENCES = 64


@dataclass(frozen=True)
class ValidationSet:
    """A number of `representative_rows` of the validation split, all if it has fewer.

    Attributes:
        micro_batch: rows per forward pass.
        isolate: keep the documents of a row apart, as training does.
    """

    reader: TokenReader
    sequences: int
    micro_batch: int
    isolate: bool = False

    def measure(
        self,
        module: nn.Module,
        ranks: Ranks,
        step: int,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> ValidationLine | None:
        """The validation after `step`: means over all targets. A collective call.

        Data rank r takes rows r, r + data_world_size, … All ranks make the same number of forward
        passes, as sharded parameters need all of them; one that has no row left computes one that
        does not count.

        Args:
            is_given_up: asked on every rank before each forward pass; the same on all ranks.

        Returns:
            None: it was given up.
        """
        sequences = min(self.sequences, len(self.reader))
        readers = ranks.data_world_size
        rows = representative_rows(self.reader, sequences)[ranks.data_rank :: readers]
        most_rows = -(-sequences // readers)  # of any rank
        loss_sum = 0.0
        target_bytes = 0
        targets = 0
        module.eval()
        with torch.no_grad():
            for start in range(0, most_rows, self.micro_batch):
                if is_given_up():
                    module.train()
                    return None
                chosen = rows[start : start + self.micro_batch]
                counts = len(chosen) > 0
                if not counts:
                    chosen = np.zeros(1, dtype=np.int64)
                tokens = self.reader.gather(chosen)
                mask = self.reader.targets(chosen)
                documents = self.reader.documents(chosen) if self.isolate else None
                batch = to_batch(tokens, mask, ranks.device, documents)
                loss = module(*batch).item()
                if counts:
                    loss_sum += loss
                if counts and ranks.is_context_rank0:
                    sizes = self.reader.text_bytes(chosen)
                    counted = sizes if mask is None else sizes[mask]
                    target_bytes += int(counted.sum())
                    targets += counted.size
        module.train()
        loss_sum, total_bytes, total_targets = ranks.sum(
            loss_sum, target_bytes, targets
        )
        return ValidationLine(
            kind="validation",
            step=step,
            loss=loss_sum / total_targets if total_targets else None,
            bits_per_byte=loss_sum / math.log(2) / total_bytes if total_bytes else None,
            tokens=int(total_targets),
        )


def rows_with(reader: TokenReader, tokens: int) -> int:
    """Number of the `representative_rows` that have `tokens` targets between them.

    All of them if they have fewer.
    """
    rows = representative_rows(reader, len(reader))
    for number in range(1, len(rows)):
        # One row: masks of many rows at once may not fit into memory.
        tokens -= reader.count_targets(rows[number - 1 : number])
        if tokens <= 0:
            return number
    return len(rows)


def validation_set(attempt: AttemptPlan) -> ValidationSet:
    """The held-out rows of the run's dataset that `train.eval_tokens` names."""
    train = attempt.config.train
    reader = TokenReader(
        attempt.dataset_path,
        attempt.dataset.row_table,
        "validation",
        verify_on_read=attempt.verify_on_read,
    )
    sequences = SEQUENCES
    if train.eval_tokens is not None:
        sequences = rows_with(reader, count(train.eval_tokens))
    return ValidationSet(
        reader, sequences, attempt.micro_batch_size, train.document_masking
    )


class Evaluation(Callback):
    """Measures the validation loss, into the train state and the metrics.

    It is measured every `train.eval_steps` and after the last step. Two cases are measured before
    any step, into the metrics alone: the weights of a model that a run starts from, which are no
    checkpoint of this run, and a run that resumes beyond its end, since train.max_steps was
    lowered.

    A request to stop waits for an evaluation, whose time the grace period includes. Where no
    evaluation of the run has been measured yet, it is given up, and `TrainState.evaluation_due`
    has the next attempt begin with it.

    Attributes:
        last_step: the last one after which was evaluated.
        is_time_known: an evaluation of this run has been measured.
    """

    def __init__(
        self, training: Training, validation: ValidationSet, metrics: StepMetrics
    ) -> None:
        self.training = training
        self.validation = validation
        self.metrics = metrics
        self.interval = Interval(
            training.attempt.config.train.eval_steps, training.ranks
        )
        self.last_step = -1
        self.is_time_known = training.attempt.evaluation_time > 0

    def on_train_start(self, state: TrainState) -> None:
        attempt = self.training.attempt
        train = attempt.config.train
        starts_from_model = train.init_from and state.step == 0
        is_finished = state.is_finished(
            attempt.max_steps, train.early_stopping_patience
        )
        if starts_from_model or is_finished:
            # An earlier attempt may have measured it.
            writer = self.metrics.writer
            is_measured = writer is not None and writer.has_validation(state.step)
            is_measured_on_rank0 = self.training.ranks.sum(float(is_measured))[0]
            if not is_measured_on_rank0:
                line = self._measure(state.step, self._is_given_up)
                # Due again, so that this attempt ends before its first step.
                state.evaluation_due |= line is None
        # One that the attempt before gave up is made before any step.
        seconds = 0.0 if state.evaluation_due else attempt.since_evaluation
        self.interval.start(state, seconds)

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        interval_ends = self.interval.advance(state)
        if interval_ends or state.step >= self.training.attempt.max_steps:
            state.evaluation_due = True
            self.evaluate(state)
            self.interval.start(state, 0.0)  # the time of the evaluation does not count

    def evaluate(self, state: TrainState) -> None:
        """Measure the loss that is due; after a request to stop, it may stay due.

        A collective call.
        """
        line = self._measure(state.step, self._is_given_up)
        if line is None:
            return
        state.evaluation_due = False
        if line.loss is not None:
            state.record_validation(line.loss)
        self.last_step = state.step

    def _is_given_up(self) -> bool:
        """Whether a stop is requested and need not wait. A collective call."""
        return not self.is_time_known and self.training.is_stopping()

    def _measure(
        self,
        step: int,
        is_given_up: Callable[[], bool],
    ) -> ValidationLine | None:
        """The validation loss, which is also written into the metrics; None if it was given up.

        A collective call.
        """
        strategy = self.training.strategy
        self.training.heartbeat.beat("evaluate", step)
        started = time.perf_counter()
        norms = MemoryNorms(strategy.model.config.num_hidden_layers)
        # Its shapes are others than those of training, and it is too rare to pay for compiled code
        # of its own.
        with torch.compiler.set_stance("force_eager"), norms.observed(strategy.model):
            line = self.validation.measure(
                strategy.module, self.training.ranks, step, is_given_up
            )
        if line is None:
            return None
        self.is_time_known = True
        line = changed(line, evaluation_time=time.perf_counter() - started)
        if norms.sums:
            line = changed(line, memory_reads=norms.reads, memory_norms=norms.writes)
        if self.metrics.writer:
            self.metrics.writer.validation(line)
        return line
