"""Lines of the files of measurements, facts of a checkpoint, and the use of a run's time.

The files are metrics.jsonl, samples.jsonl and evaluations.jsonl.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from infini_llama.tasks.records.evaluation import (
    EvaluationRequest,
    PasskeyRetrieval,
    Perplexity,
)
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


@dataclass(frozen=True)
class Metric:
    """What is said of a field of metrics.jsonl; the annotation of the field has it.

    Attributes:
        meaning: for the tables in docs/metrics.md.
        group: of its curve in TensorBoard and Weights & Biases; "": it has none by itself.
        chart: title in the report, and in the comparison of runs; "": it has none by itself.
        curve: its label where a chart has several metrics, which comparisons leave out.
        factor: of the values in the chart.
        is_log: the chart is logarithmic.
    """

    meaning: str
    group: str = ""
    chart: str = ""
    curve: str = ""
    factor: float = 1.0
    is_log: bool = False


class TrainLine(StepLine):
    """One step.

    A field is None if it was not measured in this step or was not finite; a `when_measured` one is
    then left out. Fields that were not set are not written, so that a new one has to be passed.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    kind: Literal["train"] = "train"
    loss: Annotated[
        float | None,
        Metric(
            "mean over all targets of the global batch, without `loss_weight`, nats per token; "
            "null if the update was skipped or the step has no targets",
            group="train",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        Metric(
            "that of the first optimizer group", group="train", chart="Learning rate"
        ),
    ] = None
    grad_norm: Annotated[
        float | None, Metric("before clipping", group="train", chart="Gradient norm")
    ] = None
    tokens: Annotated[int, Metric("targets so far, all workers together")] = 0
    targets: Annotated[
        int | None,
        Metric(
            "targets of this step; a step without any computes nothing and changes no weight",
            group="train",
        ),
    ] = None
    input_tokens: Annotated[
        int,
        Metric(
            "tokens that the model reads in this step: also those that are no targets, such as "
            "prompts and padding"
        ),
    ] = 0
    loss_scale: Annotated[
        float | None,
        Metric(
            "with fp16: the gradient scaler's scale",
            group="train",
            chart="Loss scale",
            is_log=True,
        ),
    ] = when_measured(None)
    param_norm: Annotated[
        float | None,
        Metric(
            "at logged steps: 2-norm of all parameters",
            group="train",
            chart="Parameter norm",
        ),
    ] = when_measured(None)
    gates: Annotated[
        tuple[tuple[float | None, ...], ...],
        Metric(
            "at logged steps: gates of Infini-attention, the share of memory in the output, by "
            "layer and head"
        ),
    ] = when_measured(())
    custom: Annotated[
        dict[str, float | None], Metric("at logged steps: values of the metrics hook")
    ] = when_measured({})
    sequence_length: Annotated[
        int | None, Metric("with `data.curriculum`: tokens per sequence")
    ] = when_measured(None)
    step_time: Annotated[
        float,
        Metric(
            "seconds of the step",
            group="system",
            chart="Seconds per step",
            curve="step",
        ),
    ] = 0.0
    data_time: Annotated[
        float | None,
        Metric(
            "seconds of the step spent waiting for its batches",
            group="system",
            chart="Seconds per step",
            curve="waiting for data",
        ),
    ] = None
    save_time: Annotated[
        float,
        Metric(
            "seconds that the last save blocked training",
            group="system",
            chart="Seconds per step",
            curve="saving",
        ),
    ] = 0.0
    save_write_time: Annotated[
        float, Metric("seconds of a background save that ended")
    ] = 0.0
    report_time: Annotated[
        float | None, Metric("seconds spent on metrics and curves of the previous step")
    ] = None
    tokens_per_second: Annotated[
        float | None,
        Metric(
            "`input_tokens` per second, all workers together",
            group="system",
            chart="Tokens per second",
        ),
    ] = None
    flops_per_second: Annotated[
        float | None,
        Metric(
            "FLOPs of a step per second, all workers together. Layers count for all "
            "`input_tokens`, the head for tokens that have logits: on a GPU all, on a CPU also "
            "[fewer](data.md#loss-on-answers-alone)"
        ),
    ] = None
    mfu: Annotated[
        float | None,
        Metric(
            "model FLOPs utilization: `flops_per_second` divided by the peak, the "
            "matrix-multiplication speed measured when an attempt starts",
            group="system",
            chart="Model FLOPs utilization, %",
            factor=100.0,
        ),
    ] = None
    memory_peak: Annotated[
        int | None,
        Metric(
            "peak bytes of the first worker: torch's allocator on a GPU, resident set size on a "
            "CPU",
            group="system",
            chart="Memory, GB",
            factor=1e-9,
        ),
    ] = None
    goodput: Annotated[
        Goodput | None, Metric("[time accounting](resume.md#time-accounting), seconds")
    ] = when_measured(None)
    step_time_spread: Annotated[
        StepTimeSpread | None,
        Metric(
            "at logged steps: p50, p90 and p99 of the step time over the last 200 steps"
        ),
    ] = when_measured(None)

    @property
    def layer_gates(self) -> list[float | None]:
        """Mean over the heads of each layer."""
        return [_mean(heads) for heads in self.gates]

    @property
    def mean_gate(self) -> float | None:
        """Mean over all layers; None without Infini-attention."""
        return _mean(self.layer_gates)


class ValidationLine(StepLine):
    """One validation."""

    model_config = ConfigDict(allow_inf_nan=True)

    kind: Literal["validation"] = "validation"
    loss: Annotated[
        float | None,
        Metric(
            "nats per token, over validation sequences with `train.eval_tokens` targets in all "
            "(default: 64 sequences). They are drawn from the whole split, the same ones each "
            "time; each of several sources has its share. Without targets the loss is null: not "
            "measured, never the best checkpoint, and no reason to stop early",
            group="validation",
        ),
    ] = None
    bits_per_byte: Annotated[
        float | None,
        Metric(
            "over the UTF-8 bytes of the same targets, comparable between tokenizers",
            group="validation",
        ),
    ] = None
    tokens: Annotated[int | None, Metric("targets")] = None
    evaluation_time: Annotated[float, Metric("seconds")] = 0.0
    memory_reads: Annotated[
        tuple[float | None, ...],
        Metric(
            "per layer: root mean square of what is read from memory, divided by that of local "
            "attention's output; of the first worker's sequences"
        ),
    ] = ()
    memory_norms: Annotated[
        tuple[float | None, ...],
        Metric(
            "per layer: mean Frobenius norm of the memory that a sequence's last segment reads"
        ),
    ] = ()


def metrics_of(line: type[StepLine]) -> dict[str, Metric]:
    """The metrics that are fields of a line, by their names."""
    return {
        name: metric
        for name, field in line.model_fields.items()
        for metric in field.metadata
        if isinstance(metric, Metric)
    }


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
        is_named = {"latest": self.latest, "best": self.best}
        return " ".join(name for name, is_here in is_named.items() if is_here)


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
