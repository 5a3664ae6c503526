"""One line of metrics per step: loss, rates, times, throughput.

Logged steps also have what needs a collective call: norm of the parameters, gates, and the numbers
of `train.metrics_hook`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import logging
import math
import time

import torch
from torch import nn

from infini_llama.configs.durations import duration
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import flops_per_token, head_flops_per_token
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.records.metrics import TrainLine
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.storage.tensors import full_tensor
from infini_llama.tasks.train.worker.callbacks.callback import (
    Callback,
    StepResult,
    Training,
    longest_silence,
)
from infini_llama.tasks.train.worker.callbacks.gates import GateWarnings, gate_shares
from infini_llama.tasks.train.worker.callbacks.metrics_hook import (
    ADVICE,
    call_hook,
    load_hook,
)
from infini_llama.tasks.train.worker.callbacks.metrics_writer import (
    MetricsWriter,
    reporters,
)
from infini_llama.tasks.train.worker.callbacks.peak_flops import (
    peak_flops,
    utilization,
)
from infini_llama.tasks.train.worker.callbacks.profiler import memory_peak

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FEW = 0.1  # share of a step's tokens that are targets
log = logging.getLogger("infini_llama.worker")


class StepMetrics(Callback):
    """Writes the metrics of each step on the first rank.

    Every rank computes what needs all of them.

    Attributes:
        writer: of metrics.jsonl, on the first rank while training.
    """

    def __init__(self, training: Training) -> None:
        train = training.attempt.config.train
        self.training = training
        self.hook = load_hook(train.metrics_hook)
        self.writer: MetricsWriter | None = None
        self.gate_warnings = GateWarnings(train, training.attempt.max_steps)
        self.peak_flops = 0.0
        self.report_time = 0.0
        self.is_first_step = True

    def on_train_start(self, state: TrainState) -> None:
        training = self.training
        attempt = training.attempt
        train = attempt.config.train
        if training.ranks.is_rank0:
            active = reporters(
                train.report_to,
                attempt.run_dir,
                state.step,
                attempt.settings(),
                longest_silence(attempt),
            )
            self.writer = MetricsWriter(attempt.run_dir, train.logging_steps, active)
            if attempt.model.attention == "infini":
                longest = read_dataset(
                    attempt.dataset_path
                ).content.train.longest_document
                self.gate_warnings.at_start(attempt.model.unread_tokens, longest)
        if attempt.model.attention == "infini":
            with training.strategy.full_parameters():
                self.gate_warnings.ignore(gate_shares(training.strategy.model))
        dtype = DTYPES[attempt.plan.precision]
        peak = math.nan  # without a measurement on every rank there is no MFU
        with best_effort("the measurement of the peak of this processor, for MFU"):
            peak = peak_flops(training.ranks.device, dtype)
        self.peak_flops = training.ranks.sum(peak)[0]

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        started = time.perf_counter()
        train = self.training.attempt.config.train
        if self.is_first_step and self.writer:
            tokens = self.training.batches.input_tokens(result.samples)
            warn_of_few_targets(train, result.line.targets or 0, tokens)
        self.is_first_step = False
        line = None
        if state.step % train.logging_steps == 0:
            with self.training.strategy.full_parameters():
                model = self.training.strategy.model
                norm = parameter_norm(model)
                gates = gate_shares(model)
                line = self._with_custom(self._line(result, norm, gates))
            if self.writer and gates:
                self.gate_warnings.observe(state.step, gates)
        elif self.writer:
            line = self._line(result, None, ())
        if self.writer and line:
            self.writer.train(line)
        self.report_time = time.perf_counter() - started

    def on_train_end(self) -> None:
        if self.writer:
            self.writer.close()

    def close_reporters(self, finished: bool) -> None:
        """Wait for the reporters, for a limited time: nothing depends on them any more."""
        if self.writer:
            self.writer.close_reporters(finished)

    def sync(self) -> None:
        """Flush the metrics to disk, before a checkpoint is visible."""
        if self.writer:
            self.writer.sync()

    def _line(
        self,
        result: StepResult,
        norm: float | None,
        gates: tuple[tuple[float, ...], ...],
    ) -> TrainLine:
        batches = self.training.batches
        ledger = self.training.heartbeat.ledger
        measured = result.line
        length = batches.stage(result.samples).reader.sequence_length
        input_tokens = batches.input_tokens(result.samples) if measured.targets else 0
        model = self.training.strategy.model.config
        frozen = self.training.attempt.config.train.frozen_layers
        flops = flops_per_token(model, length, frozen) * input_tokens
        flops -= (
            head_flops_per_token(model, frozen) * result.update.tokens_without_logits
        )
        flops_per_second = flops / measured.step_time
        return changed(
            measured,
            input_tokens=input_tokens,
            param_norm=norm,
            gates=gates,
            sequence_length=length if len(batches.stages) > 1 else None,
            report_time=self.report_time,  # of the step before, as save_time is
            tokens_per_second=input_tokens / measured.step_time,
            flops_per_second=flops_per_second,
            mfu=utilization(flops_per_second, self.peak_flops),
            memory_peak=memory_peak(),
            goodput=ledger.spent() if ledger else None,
        )

    def _with_custom(self, line: TrainLine) -> TrainLine:
        name = self.training.attempt.config.train.metrics_hook
        if self.hook and name:
            with (
                self.training.heartbeat.during("metrics_hook"),
                best_effort(f"train.metrics_hook={name}", ADVICE, repeated=True),
            ):
                numbers = call_hook(self.hook, name, self.training.strategy.model, line)
                return changed(line, custom=numbers)
        return line


def warn_of_few_targets(train: TrainingConfig, targets: int, tokens: int) -> None:
    """Warn if intervals in tokens are much longer than the tokens that are read suggest.

    Args:
        targets, tokens: of a step, the latter with those that are no targets.
    """
    in_tokens = [
        f"train.{key}={value}"
        for key, value in (
            ("eval_steps", train.eval_steps),
            ("save_steps", train.save_steps),
        )
        if duration(value).unit == "tokens"
    ]
    if in_tokens and 0 < targets < FEW * tokens:
        log.warning(
            "%s: tokens are targets, and only %d of the %d tokens of the first step are; "
            "give the interval in steps, or fewer tokens",
            ", ".join(in_tokens),
            targets,
            tokens,
        )


def parameter_norm(model: nn.Module) -> float:
    """2-norm of all parameters as one vector. A collective call."""
    parameters = [value.detach() for value in model.parameters()]
    return full_tensor(nn.utils.get_total_norm(parameters)).item()
