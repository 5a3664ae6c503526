"""Policy of updates: the skipped ones (not finite, or a loss spike), and the loss scale of fp16."""

import logging
import math
from collections.abc import Callable
from statistics import mean, median

import numpy as np

from infini_llama.configs.errors import Diverged
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.records.train_state import SKIP_WINDOW, TrainState
from infini_llama.tasks.train.worker.callbacks.callback import (
    Callback,
    StepResult,
    Update,
)

HISTORY = 128  # losses in which spikes are looked for
ENOUGH = 32  # with fewer losses nothing is a spike
# Median absolute deviation to standard deviation, for a normal distribution.
NORMAL = 1.4826
# Mean absolute deviation to standard deviation, for a normal distribution.
MEAN_NORMAL = 1.2533
# Share of the median, or of one nat: losses that hardly differ make no spike of a small difference.
SMALLEST = 1e-3
FIRST_SCALE = 2.0**16
LOWEST_SCALE = 1.0
GROWTH_INTERVAL = 2000
log = logging.getLogger("infini_llama.worker")


class LossScaler:
    """Dynamic loss scaling for fp16, as torch's GradScaler does it.

    Micikevicius et al. 2018, arXiv 1710.03740, section 3.2. It is ours because all ranks already
    agree on whether a step's gradients are finite, whatever the strategy, and its two numbers are
    part of the train state.

    Attributes:
        scale: None before the first step.
        steps: since the scale has changed.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.steps = 0
        self.scale: float | None = None

    @property
    def current(self) -> float:
        """The factor of the losses before the backward pass; 1 without fp16."""
        if not self.enabled:
            return 1.0
        return self.scale or FIRST_SCALE

    def adjust(self, finite: bool) -> bool:
        """Halve the scale when gradients overflow, double it after 2000 steps without.

        Returns:
            whether the scale explains a step that was not finite.
        """
        if not self.enabled:
            return False
        scale = self.current
        if finite:
            self.scale = scale
            self.steps += 1
            if self.steps == GROWTH_INTERVAL:
                self.scale = scale * 2
                self.steps = 0
            return False
        self.scale = max(LOWEST_SCALE, scale / 2)
        self.steps = 0
        return scale > LOWEST_SCALE


class SpikeDetector:
    """Robust z-score (Iglewicz and Hoaglin 1993) of a loss.

    It is the distance above the median, in median absolute deviations scaled to a standard one.
    Spikes themselves hardly move it. Where most losses are alike and the others are not, as with
    few targets in most batches, the median deviation is no measure of the others, and the mean
    deviation counts, as there for a median deviation of 0.

    Args:
        threshold: `train.spike_zscore`; None: nothing is a spike.

    Attributes:
        losses: of the last updates that were not skipped, oldest first.
    """

    def __init__(self, threshold: float | None) -> None:
        self.threshold = threshold
        self.losses: list[float] = []

    def is_spike(self, loss: float) -> bool:
        """Whether an update of this loss is to be skipped."""
        if self.threshold is None or len(self.losses) < ENOUGH:
            return False
        middle, spread = self.normal()
        return loss - middle > self.threshold * spread

    def normal(self) -> tuple[float, float]:
        """Median and spread of the recorded losses, nats per token."""
        middle = median(self.losses)
        deviations = [abs(earlier - middle) for earlier in self.losses]
        robust = NORMAL * median(deviations)
        if robust < SMALLEST * max(1.0, abs(middle)):
            robust = MEAN_NORMAL * mean(deviations)
        return middle, max(robust, SMALLEST * max(1.0, abs(middle)))

    def add(self, loss: float) -> None:
        """Record the loss of an update that was made."""
        if self.threshold is not None:
            self.losses = [*self.losses, loss][-HISTORY:]


class UpdatePolicy(Callback):
    """Budget for skipped updates; the trainer reads `scaler` and `spikes` within a step.

    Args:
        rows: row numbers of the global batch that follows a number of samples, for the log.

    Attributes:
        skips: steps within the window whose update was skipped.
        saw_no_targets: a step of this attempt had a batch without a target, which is logged once.
    """

    def __init__(
        self,
        train: TrainingConfig,
        fp16: bool,
        rows: Callable[[int], np.ndarray],
    ) -> None:
        self.limit = train.max_skips
        self.rows = rows
        self.scaler = LossScaler(fp16)
        self.spikes = SpikeDetector(train.spike_zscore)
        self.skips: list[int] = []
        self.saw_no_targets = False

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        """Record an update that was made or skipped.

        One that fp16's scale explains does not count as skipped.

        Raises:
            Diverged: more than `train.max_skips` in the window.
        """
        update = result.update
        if not result.line.targets:  # nothing was computed
            if not self.saw_no_targets:
                self.saw_no_targets = True
                log.warning(
                    "step %d: no token of its sequences is a target, so it changes nothing; "
                    "such steps are counted, and not logged again",
                    state.step,
                )
            return
        # The scale multiplies gradients: a loss that is not finite has another cause.
        overflow = self.scaler.adjust(update.finite) and math.isfinite(update.loss)
        if not update.skipped:
            self.spikes.add(update.loss)
        elif not overflow:
            rows = self.rows(result.samples).tolist()
            reason = self._reason(update)
            message = (
                "step %d: loss %s, gradient norm %s; update skipped because %s; rows %s"
            )
            log.warning(
                message, state.step, update.loss, update.grad_norm, reason, rows
            )
            recent = [step for step in self.skips if step > state.step - SKIP_WINDOW]
            self.skips = [*recent, state.step]
            if len(self.skips) > self.limit:
                raise Diverged(
                    f"{len(self.skips)} updates within {SKIP_WINDOW} steps were skipped, "
                    f"the first at step {self.skips[0]}, the last because {reason}",
                    self.skips[0],
                    state.samples,
                )

    def _reason(self, update: Update) -> str:
        if not update.finite:
            return "it was not finite"
        middle, spread = self.spikes.normal()
        return (
            f"its loss is a spike: {(update.loss - middle) / spread:.1f} times the spread of "
            f"{spread:.3g} above the median of {middle:.4g} "
            f"(train.spike_zscore={self.spikes.threshold:g})"
        )

    def save_state(self, state: TrainState) -> None:
        state.skips = self.skips
        state.losses = self.spikes.losses
        state.loss_scale = self.scaler.scale
        state.steps_at_scale = self.scaler.steps

    def load_state(self, state: TrainState) -> None:
        self.skips = state.skips
        self.spikes.losses = state.losses
        self.scaler.scale = state.loss_scale
        self.scaler.steps = state.steps_at_scale
