"""The charts of one run, and of several beside one another."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Literal, TypeVar

from infini_llama.tasks.document import Chart, Curve
from infini_llama.tasks.formatting import NATS_PER_BIT
from infini_llama.tasks.records.evaluation import PasskeyResult
from infini_llama.tasks.records.metrics import (
    PasskeyLine,
    TrainLine,
    ValidationLine,
    metrics_of,
)
from infini_llama.tasks.runs.run_reader import RunReader

Line = TypeVar("Line", TrainLine, ValidationLine)
Value = Callable[[Line], float | None]


def loss_chart(run: RunReader) -> Chart:
    """Training and validation loss in nats per token, with the unigram entropy as a baseline."""
    curves = [
        _curve("training", run.trained, lambda line: line.loss),
        _curve("validation", run.validated, lambda line: line.loss, points=True),
    ]
    bits = run.dataset.rows.meta.unigram_entropy_bits if run.dataset else None
    if bits is not None:
        entropy = bits * NATS_PER_BIT
        curves.append(Curve("unigram entropy", [0, 1], [entropy, entropy], "level"))
    return Chart("Loss, nats per token", curves, marks=_starts(run))


def charts_of_run(run: RunReader) -> list[Chart]:
    """Every chart of a run; what it has not recorded is left out where it is drawn."""
    marks = _starts(run)
    gates = _by_layer(run.trained, lambda line: line.layer_gates, "line")
    bits = _curve("", run.validated, lambda line: line.bits_per_byte, points=True)
    return [
        loss_chart(run),
        Chart("Validation, bits per byte", [bits], marks=marks),
        *charts_of_metrics([run], marks),
        Chart(
            "Mean gate: fraction of memory in Infini-attention's output",
            gates,
            marks=marks,
        ),
        Chart(
            "What is read from memory, relative to local attention",
            _by_layer(run.validated, lambda line: line.memory_reads),
            marks=marks,
        ),
        Chart(
            "Norm of the memory M",
            _by_layer(run.validated, lambda line: line.memory_norms),
            marks=marks,
        ),
    ]


def charts_of_evaluations(run: RunReader) -> list[Chart]:
    """Numbers found by distance, and bits per byte by part of a sequence, of each text.

    Each chart has the newest measurement of its kind.
    """
    newest: dict[str, Chart] = {}
    for line in run.evaluations:
        if isinstance(line, PasskeyLine):
            curves = [
                _by_distance(words, cells) for words, cells in line.measurements()
            ]
            title = f"Fraction found by segment boundaries: {line.form}, {line.filler} filler"
            chart = Chart(title, curves, "segment boundaries", log_x=True)
        else:
            curves = []
            for words, loss in line.measurements():
                bits = loss.bits_per_byte_by_part or ()
                curves.append(Curve(words, range(1, 1 + len(bits)), bits, "points"))
            text = line.text if isinstance(line.text, str) else ", ".join(line.text)
            title = f"Bits per byte by part of a sequence: {text}"
            chart = Chart(title, curves, "part")
        if any(curve.x for curve in curves):
            newest[chart.title] = chart
    return list(newest.values())


def _by_distance(words: str, cells: Sequence[PasskeyResult]) -> Curve:
    exact = [cell for cell in cells if cell.depth is None]
    boundaries = [cell.boundaries or 0 for cell in exact]
    return Curve(words, boundaries, [cell.found for cell in exact], "points")


def charts_of_runs(runs: Sequence[RunReader]) -> list[Chart]:
    """A curve per run in each chart."""

    def trained(value: Value[TrainLine]) -> list[Curve]:
        return [_curve(run.name, run.trained, value) for run in runs]

    def validated(
        value: Value[ValidationLine],
        place: Callable[[RunReader], Callable[[int], float]],
    ) -> list[Curve]:
        return [
            _curve(run.name, run.validated, value, points=True, x=place(run))
            for run in runs
        ]

    return [
        Chart("Training loss, nats per token", trained(lambda line: line.loss)),
        Chart(
            "Validation loss, nats per token",
            validated(lambda line: line.loss, tokens_at),
            "tokens",
        ),
        Chart(
            "Validation, bits per byte",
            validated(lambda line: line.bits_per_byte, tokens_at),
            "tokens",
        ),
        Chart(
            "Validation loss, nats per token",
            validated(lambda line: line.loss, seconds_at),
            "seconds of steps",
        ),
        *charts_of_metrics(runs, ()),
        Chart(
            "Mean share of memory in the output", trained(lambda line: line.mean_gate)
        ),
    ]


def charts_of_metrics(runs: Sequence[RunReader], marks: Sequence[float]) -> list[Chart]:
    """The charts that fields of `TrainLine` name; of several runs, each has a curve per run."""
    is_comparison = len(runs) > 1
    charts: dict[str, Chart] = {}
    for name, metric in metrics_of(TrainLine).items():
        if not metric.chart or (is_comparison and metric.curve):
            continue
        new = Chart(metric.chart, [], log=metric.is_log, marks=marks)
        chart = charts.setdefault(metric.chart, new)
        for run in runs:
            label = run.name if is_comparison else metric.curve
            chart.curves.append(
                _curve(label, run.trained, attrgetter(name), metric.factor)
            )
    return [*charts.values()]


def tokens_at(run: RunReader) -> Callable[[int], float]:
    """Tokens seen by a step."""
    seen = {line.step: line.tokens for line in run.trained}
    return lambda step: seen.get(step, 0)


def seconds_at(run: RunReader) -> Callable[[int], float]:
    """Time that the steps up to a step took, without the time between them."""
    times = accumulate(line.step_time for line in run.trained)
    spent = dict(zip((line.step for line in run.trained), times, strict=True))
    return lambda step: spent.get(step, 0.0)


def _curve(
    label: str,
    lines: Sequence[Line],
    value: Value[Line],
    factor: float = 1.0,
    points: bool = False,
    x: Callable[[int], float] = float,
) -> Curve:
    measured = [(x(line.step), value(line)) for line in lines]
    present = [(at, y * factor) for at, y in measured if y is not None]
    return Curve(
        label,
        [at for at, _ in present],
        [y for _, y in present],
        "points" if points else "line",
    )


def _by_layer(
    lines: Sequence[Line],
    values: Callable[[Line], Sequence[float | None]],
    kind: Literal["line", "points"] = "points",
) -> list[Curve]:
    """A curve per layer; one without a memory has no values, and no curve."""
    measured = [line for line in lines if values(line)]
    layers = min((len(values(line)) for line in measured), default=0)
    steps = [line.step for line in measured]
    curves = [
        Curve(f"layer {n}", steps, [values(line)[n] for line in measured], kind)
        for n in range(layers)
    ]
    return [curve for curve in curves if curve.has_values]


def _starts(run: RunReader) -> list[int]:
    """The steps at which attempts after the first began."""
    return sorted({record.from_step for record in run.attempts if record.from_step})
