"""One rank's training, from the built model to the last checkpoint."""

# pyright: reportUnknownMemberType=false
import hashlib
import math
import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from infini_llama.configs.reading import changed
from infini_llama.configs.schedules import write_jitter
from infini_llama.model.backends import BY_BOUNDARIES
from infini_llama.model.context import Context
from infini_llama.model.llama import Llama
from infini_llama.model.loss import tokens_with_logits
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.preprocess.tokens.order import next_sample
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.metrics import TrainLine
from infini_llama.tasks.records.summary import TrainingResult
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.heartbeat import Heartbeat
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.signals import hangup_as_termination
from infini_llama.tasks.storage.tensors import state_hash
from infini_llama.tasks.train.worker.callbacks.callback import (
    Callback,
    StepResult,
    Training,
    Update,
)
from infini_llama.tasks.train.worker.callbacks.evaluation import (
    Evaluation,
    validation_set,
)
from infini_llama.tasks.train.worker.callbacks.profiler import Profiler
from infini_llama.tasks.train.worker.callbacks.samples import (
    ADVICE,
    WHAT,
    samples_in_time,
    write_samples,
)
from infini_llama.tasks.train.worker.callbacks.step_metrics import StepMetrics
from infini_llama.tasks.train.worker.callbacks.update_policy import UpdatePolicy
from infini_llama.tasks.train.worker.checkpointer import Checkpointer
from infini_llama.tasks.train.worker.data.loader import (
    Batch,
    BatchPlan,
    GlobalBatch,
    Prefetch,
    TrainBatches,
    curriculum_stages_of,
)
from infini_llama.tasks.train.worker.initial_model import build_model, load_pretrained
from infini_llama.tasks.train.worker.strategies.compiling import compile_if_it_agrees
from infini_llama.tasks.train.worker.strategies.optimizer import set_learning_rate
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import Strategy, build_strategy

FitEnd = Literal["done", "preempted"]


class StopRequest:
    """Flag that SIGTERM (also as SIGHUP), SIGUSR1 and SIGXCPU set; they do nothing else.

    The ranks agree on it and save at the next step boundary.
    """

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU):
            signal.signal(number, self._set)
        hangup_as_termination()
        # Ctrl-C reaches the supervisor, which then sends SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _set(self, number: int, frame: object) -> None:
        self.requested = True


class Trainer:
    """One rank of an attempt at a run.

    Attributes:
        state: how far the run is; with the tensors of `strategy` it is everything that a checkpoint
            contains.
        strategy: model and optimizer, spread over the ranks.
        data: the global batches of the run.
        callbacks: called between the steps, in this order; a step itself uses `policy` for the loss
            scale and for spikes.
        checkpointer: saves and loads all of these.
    """

    def __init__(
        self,
        attempt: AttemptPlan,
        ranks: Ranks,
        stop: StopRequest,
        heartbeat: Heartbeat,
    ) -> None:
        train = attempt.config.train
        plan = attempt.plan
        self.attempt = attempt
        self.ranks = ranks
        self.heartbeat = heartbeat
        self.state = TrainState(
            world_size=ranks.world_size,
            model=attempt.model.to_dict(),
            dataset=attempt.dataset.digest,
            optimizer=train.optimizer,
        )
        model = _first_model(attempt, ranks)
        ranks.use_context_parallel(train.context_parallel)
        self.strategy = build_strategy(
            model, train, plan.precision, attempt.micro_batch_size, ranks
        )

        self.batches = _train_batches(attempt, ranks)
        self.data = Prefetch(
            self.batches, ranks.device, self._following, train.dataloader_num_workers
        )
        if train.document_masking and model.attention_backend in BY_BOUNDARIES:
            model.most_documents = self.batches.most_documents()
        self.step_samples = 0  # the first sample of the step that runs, or ran last
        heartbeat.sample_rows = lambda: self.batches.rows(self.step_samples).tolist()

        self.training = Training(
            attempt,
            self.strategy,
            self.batches,
            ranks,
            heartbeat,
            lambda: stop.requested,
        )
        self.policy = UpdatePolicy(train, plan.precision == "fp16", self.batches.rows)
        self.metrics = StepMetrics(self.training)
        self.evaluation = Evaluation(
            self.training, validation_set(attempt), self.metrics
        )
        self.callbacks: list[Callback] = [
            # First, since a run that diverges ends with the step.
            self.policy,
            # Before what is no part of a step.
            Profiler(self.training, RunFolder(attempt.run_dir).profile),
            # Before the evaluation, so that metrics.jsonl has the step before its validation.
            self.metrics,
            self.evaluation,
        ]
        self.checkpointer = Checkpointer(
            self.training, self.callbacks, self.metrics.sync
        )

    def fit(self) -> FitEnd:
        """Train to the end, or to the step in which a stop is requested on any rank."""
        self._run_discarded_pass()
        self.checkpointer.load_into(self.state)
        for callback in self.callbacks:
            callback.on_train_start(self.state)
        with self.checkpointer, self.data:
            stop_requested = self._finish_evaluation()
            while not (self.finished or stop_requested):
                for callback in self.callbacks:
                    callback.on_step_start(self.state)
                result = self.step()
                for callback in self.callbacks:
                    callback.on_step_end(self.state, result)
                is_due = self.checkpointer.advance(self.state)
                # An evaluation stays due only after a request to stop.
                stop_requested = (
                    result.update.stop_requested or self.state.evaluation_due
                )
                stop_requested = self._save_then_sample(is_due, stop_requested)
        self.heartbeat.beat("finish", self.state.step)
        if self.finished:
            self._write_result()
        for callback in self.callbacks:
            callback.on_train_end()
        return "done" if self.finished else "preempted"

    def _finish_evaluation(self) -> bool:
        """Make the evaluation that the attempt before gave up; return whether to stop."""
        if not self.state.evaluation_due:
            return False
        self.evaluation.evaluate(self.state)
        if self.state.evaluation_due:
            return True
        return self._save_then_sample(
            self.checkpointer.is_best(self.state), stop_requested=False
        )

    def _save_then_sample(self, is_save_due: bool, stop_requested: bool) -> bool:
        """Save the step if that is due, then write the texts of its evaluation.

        Returns:
            whether a stop is requested now: the step is saved then, and no other one follows.
        """
        is_saved = is_save_due or self.finished or stop_requested
        if is_saved:
            self.checkpointer.save(self.state)
        if self.finished or self.evaluation.last_step != self.state.step:
            return stop_requested
        write_samples(
            self.training, self.metrics.writer, self.state.step, stop_requested
        )
        stop_requested = stop_requested or self.training.is_stopping()
        if stop_requested and not is_saved:
            self.checkpointer.save(self.state)
        return stop_requested

    def step(self) -> StepResult:
        """One optimizer step: data, seed, learning rate, forward and backward, update, advance."""
        state = self.state
        train = self.attempt.config.train
        started = time.perf_counter()
        self.heartbeat.beat("data", state.step)
        state.samples = next_sample(state.samples, self.attempt.lineage.skipped_samples)
        self.step_samples = state.samples
        # Everything random in a step depends on seed, step and rank alone, so no generator's state
        # is saved.
        torch.manual_seed(step_seed(train.seed, state.step, self.ranks.rank))
        rate = set_learning_rate(
            self.strategy.optimizer, train, self.attempt.max_steps, state.step
        )
        initial = self.attempt.lineage.init_from
        learned = initial is not None and initial.memory
        jitter = write_jitter(
            self.attempt.model.memory_write_jitter,
            self.attempt.max_steps,
            state.step,
            learned,
        )
        self._set_write_jitter(jitter)
        batch = self.data.batch_at(state.samples)
        data_time = time.perf_counter() - started

        self.heartbeat.beat("compute")
        scale = self.policy.scaler.current
        update = optimizer_step(
            self.strategy,
            batch,
            scale,
            self.policy.spikes.is_spike,
            self.training.stop_requested,
            self.ranks,
        )
        state.advance(train.global_batch_size, batch.targets)
        step_time = time.perf_counter() - started
        # Raises what a background save failed with.
        written = self.checkpointer.writer.poll()
        line = TrainLine(
            kind="train",
            step=state.step,
            loss=None if update.skipped else update.loss,
            learning_rate=rate,
            grad_norm=None if update.skipped else update.grad_norm,
            tokens=state.tokens,
            targets=batch.targets,
            loss_scale=scale if self.attempt.plan.precision == "fp16" else None,
            step_time=step_time,
            data_time=data_time,
            save_time=self.checkpointer.save_time,
            save_write_time=written,
        )
        return StepResult(update, self.step_samples, line)

    @property
    def finished(self) -> bool:
        """Whether the run needs no further step."""
        return self.state.is_finished(
            self.attempt.max_steps, self.attempt.config.train.early_stopping_patience
        )

    def _run_discarded_pass(self) -> None:
        """Run one forward and backward pass and discard it.

        With train.compile the comparison with eager execution runs, too.

        DDP rebuilds its buckets after the first iteration; a resumed run would otherwise sum
        gradients in another order than the uninterrupted one. All of this comes before the
        checkpoint is loaded: every attempt compares with the same initial weights, and DeepSpeed,
        which discards gradients by an update of rate 0 and zeroes the moments after it, would lose
        what was loaded.
        """
        train = self.attempt.config.train
        strategy = self.strategy
        samples, number = self.batches.first_with_targets()

        def first_batch() -> float:
            torch.manual_seed(step_seed(train.seed, 0, self.ranks.rank))
            # Compiled code draws other factors than eager code.
            self._set_write_jitter(1.0)
            device = self.ranks.device
            first = list(self.batches.micro_batches(samples, device))[
                number : number + 1
            ]
            targets = max(1, self.batches.targets(samples))
            return strategy.accumulate(first, targets).item()

        first_batch()
        strategy.discard_gradients()
        self.heartbeat.beat("compile")
        compile_if_it_agrees(
            strategy.module,
            strategy.model,
            self.attempt.plan,
            first_batch,
            self.ranks,
            self.attempt.run_dir,
        )
        self.heartbeat.beat("start")

    def _write_result(self) -> None:
        """Write result.json on the first rank. A collective call.

        It has hashes of the state; then the texts by the model are written into it.
        """
        attempt = self.attempt
        step = self.state.step
        tensors = self.strategy.tensors()
        weights = state_hash(tensors, "model.")
        moments = state_hash(tensors, "optimizer.")
        model = self.strategy.to_plain_model()
        if model is not None:
            run = RunFolder(attempt.run_dir)
            stopped_early = None
            if step < attempt.max_steps:
                stopped_early = attempt.config.train.early_stopping_patience
            path = checkpoints.checkpoint_path(run.checkpoints, step)
            result = TrainingResult(
                steps=step,
                stopped_early=stopped_early,
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                weights_sha256=weights,
                optimizer_sha256=moments,
                checkpoint_digest=checkpoints.verify(path, False).digest,
            )
            run.write(run.result, result)
            self.heartbeat.beat("samples")
            with best_effort(WHAT, ADVICE, repeated=True):
                texts = samples_in_time(model, self.training)
                samples = tuple(sample.text for sample in texts or ())
                run.write(run.result, changed(result, samples=samples))
            self.heartbeat.beat("finish", step)
        self.ranks.barrier()

    def _set_write_jitter(self, most: float) -> None:
        if self.attempt.model.memory_write_jitter > 1:
            self.strategy.model.set_write_jitter(most)

    def _following(self, samples: int) -> int:
        """Samples consumed before the step after the one that starts at `samples`."""
        return next_sample(
            samples + self.attempt.config.train.global_batch_size,
            self.attempt.lineage.skipped_samples,
        )


def _first_model(attempt: AttemptPlan, ranks: Ranks) -> Llama:
    """The model that a run begins with; what is frozen must be before a strategy wraps it."""
    train = attempt.config.train
    model = build_model(attempt.model, train, attempt.plan, ranks.device)
    if attempt.init_from:
        load_pretrained(model, attempt.init_from)
    model.freeze(train.frozen_layers)
    return model


def _train_batches(attempt: AttemptPlan, ranks: Ranks) -> TrainBatches:
    """The global batches of a run, of which this rank takes its slices."""
    train = attempt.config.train
    return TrainBatches(
        curriculum_stages_of(attempt),
        BatchPlan(
            train.seed,
            train.global_batch_size,
            attempt.micro_batch_size,
            ranks.data_rank,
            ranks.data_world_size,
            train.document_masking,
            attempt.lineage.skipped_samples,
        ),
    )


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the generators during one step on one rank."""
    digest = hashlib.blake2b(f"{seed}:{step}:{rank}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def optimizer_step(
    strategy: Strategy,
    batch: GlobalBatch,
    scale: float,
    is_spike: Callable[[float], bool],
    stop_requested: Callable[[], bool],
    ranks: Ranks,
) -> Update:
    """Forward, backward, clip, one all-reduce of the scalars, update.

    This waits for a GPU only after the gradients are clipped, first for the loss, then for the
    norm; never between micro-batches.

    An update that is not finite, or whose loss `is_spike`, is skipped on every rank alike: the
    summed loss and the reduced gradients are the same on all. A batch without targets, whose number
    all ranks know, is not computed and changes nothing.
    """
    if not batch.targets:
        _, stop = ranks.sum(0.0, float(stop_requested()))
        return Update(math.nan, math.nan, stop > 0, skipped=True)
    loss_sum = strategy.accumulate(batch.micro_batches, batch.targets, scale)
    strategy.clip_gradients(scale)
    without_logits = tokens_without_logits(
        strategy.model, batch.micro_batches, ranks.context
    )
    total, stop, without_logits = ranks.sum(
        loss_sum, float(stop_requested()), without_logits
    )
    loss = total / batch.targets
    apply = math.isfinite(loss) and not is_spike(loss)
    grad_norm = strategy.update(apply, scale)
    skipped = not (apply and math.isfinite(grad_norm))
    return Update(loss, grad_norm, stop > 0, skipped, int(without_logits))


def tokens_without_logits(
    model: Llama,
    micro_batches: Sequence[Batch],
    context: Context | None,
) -> int:
    """Tokens of this rank's micro-batches that the loss leaves out.

    With a `context` those of its part of the micro-batches.
    """
    left_out = 0
    for _, labels, *_ in micro_batches:
        if context is not None:
            labels = context.part(labels, model.config.segment_length)
        chosen = tokens_with_logits(labels.flatten(), model.loss_chunk)
        if chosen is not None:
            left_out += labels.numel() - len(chosen)
    return left_out
