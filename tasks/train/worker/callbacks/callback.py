"""The interface of callbacks, what they share and are given, and intervals."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from infini_llama.configs.durations import duration
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.metrics import TrainLine
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.runs.heartbeat import UNKNOWN, Heartbeat
from infini_llama.tasks.train.worker.data.loader import TrainBatches
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import Strategy


@dataclass(frozen=True)
class Training:
    """What the parts of one rank's training share.

    Attributes:
        strategy: model and optimizer, spread over the ranks.
        batches: the global batches of the run.
        heartbeat: on the first rank, its ledger has the goodput.
        stop_requested: whether this rank was asked to stop.
    """

    attempt: AttemptPlan
    strategy: Strategy
    batches: TrainBatches
    ranks: Ranks
    heartbeat: Heartbeat
    stop_requested: Callable[[], bool]

    def is_stopping(self) -> bool:
        """Whether a stop is requested on any rank. A collective call."""
        return self.ranks.sum(float(self.stop_requested()))[0] > 0


@dataclass(frozen=True)
class Update:
    """The result of an optimizer step; the same on every rank.

    Attributes:
        loss: mean over the global batch, nats per token; NaN without targets.
        grad_norm: before clipping; NaN without targets.
        stop_requested: on any rank.
        skipped: the weights were not updated.
        tokens_without_logits: read by the model, but left out by the loss, over all ranks.
    """

    loss: float
    grad_norm: float
    stop_requested: bool
    skipped: bool
    tokens_without_logits: int = 0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class StepResult:
    """One completed step.

    Attributes:
        samples: consumed before it.
        line: what the step itself measures; `StepMetrics` adds the rest.
    """

    update: Update
    samples: int
    line: TrainLine


class Callback:
    """Called by the Trainer on every rank, in the order of its list.

    A subclass overrides what it needs.
    """

    def on_train_start(self, state: TrainState) -> None:
        """After the checkpoint was loaded, before the first step."""

    def on_step_start(self, state: TrainState) -> None:
        """Before a step; `state` is that of the steps before it."""

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        """After a step, whose `state` it is, and before that state is saved."""

    def on_train_end(self) -> None:
        """After the last step of this attempt; not called after an exception."""

    def save_state(self, state: TrainState) -> None:
        """Write the fields of `state` that a resumed run needs of this callback.

        Called before a checkpoint.
        """

    def load_state(self, state: TrainState) -> None:
        """Continue from the fields that `save_state` wrote."""


def longest_silence(attempt: AttemptPlan) -> float:
    """The time limit in seconds of what training does not need, such as samples, on one rank.

    Half of what ends the attempt first: the other ranks' timeout of communication, or the hang
    timeout of a phase whose duration is not known.
    """
    timeouts = (
        attempt.config.environment.communication_timeout,
        UNKNOWN * attempt.config.runtime.hang_timeout,
    )
    return min(timeouts) / 2


class Interval:
    """Whether something is due that happens every so many steps, tokens or seconds.

    Examples are eval_steps and save_steps. By steps and tokens that is a function of the train
    state alone. By seconds, the first rank's clock decides for all; it counts the time of training
    since the last time, over all attempts of the run.
    """

    def __init__(self, value: int | str, ranks: Ranks) -> None:
        self.number, self.unit = duration(value)
        self.ranks = ranks
        self.tokens = 0
        self.last = time.monotonic()

    def start(self, state: TrainState, seconds: float) -> None:
        """Count from here.

        Args:
            seconds: since the last time, in earlier attempts.
        """
        self.tokens = state.tokens
        self.last = time.monotonic() - seconds

    def advance(self, state: TrainState) -> bool:
        """Count one more step; return whether the interval ends with it, and then count from here.

        By seconds, a collective call.
        """
        if self.unit == "steps":
            return state.step % self.number == 0
        if self.unit == "tokens":
            before = self.tokens
            self.tokens = state.tokens
            return before // self.number < state.tokens // self.number
        elapsed = self.ranks.is_rank0 and time.monotonic() - self.last >= self.number
        due = self.ranks.sum(float(elapsed))[0] > 0
        if due:
            self.last = time.monotonic()
        return due
