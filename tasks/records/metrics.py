"""Lines of the files of measurements, facts of a checkpoint, and the use of a run's time.

The files are metrics.jsonl, samples.jsonl and evaluations.jsonl.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from infini_llama.tasks.records.evaluation import EvaluationRequest, PasskeyRetrieval, Perplexity
from infini_llama.tasks.records.record import Record


class StartTime(Record):
    """The time at which an attempt started.

    Attributes:
        wall: seconds since 1970.
        monotonic: by the clock of `machine`.
    """

    wall: float
    monotonic: float
    machine: str


class Goodput(Record):
    """Seconds of each part of a run's wall time, over all its attempts.

    Attributes:
        lost_work: steps that a later attempt repeated, and the time between the last complete step
            of a failed attempt and its end.
        down: between attempts.
        wall: since the first attempt started.
        share: `training` divided by `wall`.
    """

    start_up: float = 0.0
    compile: float = 0.0
    data_wait: float = 0.0
    training: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0
    samples: float = 0.0
    ending: float = 0.0
    lost_work: float = 0.0
    down: float = 0.0
    wall: float = 0.0
    share: float = 0.0

    def parts(self) -> dict[str, float]:
        """Seconds by the name of the part, without `wall` and `share`."""
        return self.model_dump(exclude={"wall", "share"})


class StepTimeSpread(Record):
    """Percentiles of the times of recent steps, seconds."""

    p50: float
    p90: float
    p99: float


class StepLine(Record):
    """The line of a step. A resumed run cuts its files back to the step of the checkpoint."""

    step: int


def when_measured(default: Any) -> Any:
    """A field that lines have only where it was measured."""
    return Field(default=default, exclude_if=lambda value: value == default)


class TrainLine(StepLine):
    """One step.

    A field is None if it was not measured in this step or was not finite; a `when_measured` one is
    then left out.

    Attributes:
        loss: mean over the global batch, nats per token; None: the update was skipped, or the step
            has no targets.
        tokens: targets trained on so far, over all ranks.
        targets: of them, those of this step; 0: nothing was computed, and the weights did not
            change.
        input_tokens: that the model read in this step, over all ranks: also prompts and padding,
            which are no targets.
        loss_scale: with fp16.
        gates: share of memory in the output of each head, by layer; of a layer without a memory
            empty.
        custom: of train.metrics_hook.
        sequence_length: with data.curriculum.
        step_time, data_time, save_time, save_write_time: see `StepTimes`.
        report_time: seconds that the metrics of the step before took.
        tokens_per_second: of `input_tokens`, all ranks together.
        flops_per_second: of what is computed for them, all ranks together: the head is counted for
            tokens that have logits alone.
        mfu: `flops_per_second` as a share of the processors' peak.
        memory_peak: bytes.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    kind: Literal["train"] = "train"
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    targets: int | None = None
    input_tokens: int = 0
    loss_scale: float | None = when_measured(None)
    param_norm: float | None = when_measured(None)
    gates: tuple[tuple[float | None, ...], ...] = when_measured(())
    custom: dict[str, float | None] = when_measured({})
    sequence_length: int | None = when_measured(None)
    step_time: float = 0.0
    data_time: float | None = None
    save_time: float = 0.0
    save_write_time: float = 0.0
    report_time: float | None = None
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    mfu: float | None = None
    memory_peak: int | None = None
    goodput: Goodput | None = when_measured(None)
    step_time_spread: StepTimeSpread | None = when_measured(None)

    @property
    def layer_gates(self) -> list[float | None]:
        """Mean over the heads of each layer."""
        return [_mean(heads) for heads in self.gates]

    @property
    def mean_gate(self) -> float | None:
        """Mean over all layers; None without Infini-attention."""
        return _mean(self.layer_gates)


class ValidationLine(StepLine):
    """One validation.

    Attributes:
        loss: nats per token; None: it was not finite, or with 0 `tokens` not measured.
        bits_per_byte: over the UTF-8 bytes of the same targets, comparable between tokenizers; None
            also without text in them.
        tokens: targets.
        evaluation_time: seconds.
        memory_reads, memory_norms: by layer, see `MemoryNorms`; of the first rank's rows.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    kind: Literal["validation"] = "validation"
    loss: float | None = None
    bits_per_byte: float | None = None
    tokens: int | None = None
    evaluation_time: float = 0.0
    memory_reads: tuple[float | None, ...] = ()
    memory_norms: tuple[float | None, ...] = ()


MetricsLine = TrainLine | ValidationLine
METRICS_LINE: TypeAdapter[MetricsLine] = TypeAdapter(
    Annotated[MetricsLine, Field(discriminator="kind")]
)


class SampleLine(StepLine):
    """A text by the model.

    Attributes:
        given_up: the texts of this step were given up for a request to stop, so there is none.
    """

    prompt: str | None = None
    text: str
    given_up: bool = False


class PerplexityLine(Perplexity):
    """A measurement of `evaluate`.

    Attributes:
        measured: when, ISO 8601.
        asked: see `EvaluationRequest`.
    """

    kind: Literal["evaluate"]
    measured: str | None = None
    asked: EvaluationRequest | None = None


class PasskeyLine(PasskeyRetrieval):
    """A measurement of `evaluate --passkey`; see `PerplexityLine`."""

    kind: Literal["passkey"]
    measured: str | None = None
    asked: EvaluationRequest | None = None


EvaluationLine = PerplexityLine | PasskeyLine
EVALUATION_LINE: TypeAdapter[EvaluationLine] = TypeAdapter(
    Annotated[EvaluationLine, Field(discriminator="kind")]
)


class CheckpointFacts(Record):
    """A committed checkpoint.

    Attributes:
        validation_loss: nats per token.
        bytes: on disk.
    """

    name: str
    step: int
    validation_loss: float | None
    bytes: int
    latest: bool
    best: bool

    @property
    def pointers(self) -> str:
        """The pointers that name it: "latest", "best", both or neither."""
        names: list[str] = []
        if self.latest:
            names.append("latest")
        if self.best:
            names.append("best")
        return " ".join(names)


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
