"""Curves as drawn: where their points lie, what is left out, and colours that are the page's own."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from infini_llama.tasks.document import Chart, Curve
from infini_llama.tasks.records.metrics import TrainLine, metrics_of
from infini_llama.tasks.report.charts import MOST_POINTS, figure, svg, thinned
from infini_llama.tasks.report.curves import charts_of_metrics


def points_of(drawn: str, colour: str) -> list[tuple[float, float]]:
    """Coordinates of the path in this colour."""
    paths = [
        path
        for path in re.findall(r'<path d="([^"]+)"[^>]*style="([^"]+)"', drawn)
        if f"stroke: var({colour})" in path[1]
    ]
    numbers = re.findall(r"[ML] ([\d.]+) ([\d.]+)", paths[0][0])
    return [(float(x), float(y)) for x, y in numbers]


def test_a_curve_matches_its_values():
    drawn = svg(Chart("loss", [Curve("a", [1, 2, 3], [3.0, 1.0, 2.0])]))
    (x1, y1), (x2, y2), (x3, y3) = points_of(drawn, "--series-1")
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.01)
    assert (y2 - y1) == pytest.approx(2 * (y2 - y3), abs=0.01)  # SVG counts downwards


def test_missing_and_non_finite_values_are_skipped():
    drawn = svg(
        Chart("loss", [Curve("a", [1, 2, 3, 4], [3.0, None, float("nan"), 2.0])])
    )
    assert len(points_of(drawn, "--series-1")) == 2


@pytest.mark.parametrize("x", [[0, 1, 8, 64], [0]])
def test_a_logarithmic_axis_has_zero(x):
    drawn = svg(Chart("found", [Curve("a", x, [1.0] * len(x), "points")], log_x=True))
    places = [
        float(place)
        for place in re.findall(r'<use [^>]*x="([\d.]+)"[^>]*var\(--series-1\)', drawn)
    ]
    found = re.findall(
        r'<rect x="(\S+)" y="\S+" width="(\S+)" height="\S+" fill="none" pointer-events',
        drawn,
    )
    strips = [(float(left), float(width)) for left, width in found]
    assert len(places) == len(x) and all(width > 0 for _, width in strips)
    assert all(
        left <= place <= left + width
        for place, (left, width) in zip(places, strips, strict=True)
    )


def test_no_colour_but_the_page_s_own():
    drawn = figure(
        Chart(
            "loss",
            [Curve("a", [1, 2], [1, 2]), Curve("level", [0], [1.5], "level")],
            marks=[1.5],
        )
    )
    assert not re.findall(r"#[0-9a-fA-F]{6}", drawn)
    assert {"var(--series-1)", "var(--soft)", "var(--line)"} <= set(
        re.findall(r"var\(--[a-z0-9-]+\)", drawn)
    )


def test_a_long_curve_keeps_its_mean_and_its_extremes():
    x = np.arange(100_000.0)
    y = np.sin(x)
    y[777] = 50.0
    middle, mean, low, high = thinned(x, y)
    assert len(mean) == MOST_POINTS and (np.diff(middle) > 0).all()
    assert high.max() == 50.0 and low.min() == y.min()
    assert mean @ np.full(MOST_POINTS, 1 / MOST_POINTS) == pytest.approx(y.mean())
    assert len(svg(Chart("loss", [Curve("a", x.tolist(), y.tolist())]))) < 60_000


def test_the_same_values_give_the_same_bytes():
    chart = Chart("loss", [Curve("a", [1, 2], [1, 2], "points")])
    assert svg(chart) == svg(chart)


def test_every_metric_that_names_a_chart_is_in_it_and_alone_there_it_is_compared():
    metrics = {
        name: metric for name, metric in metrics_of(TrainLine).items() if metric.chart
    }
    line = TrainLine.model_validate({"step": 1, **dict.fromkeys(metrics, 1)})
    runs = [SimpleNamespace(name=name, trained=[line]) for name in ("one", "two")]
    of_run = {chart.title: chart for chart in charts_of_metrics(runs[:1], [7])}
    of_both = {chart.title: chart for chart in charts_of_metrics(runs, [])}
    assert len(metrics) > 8
    for metric in metrics.values():
        chart = of_run[metric.chart]
        values = {curve.label: [*curve.y] for curve in chart.curves}
        assert values[metric.curve] == [metric.factor]
        assert chart.log == metric.is_log and chart.marks == [7]
        if metric.curve:
            assert metric.chart not in of_both
        else:
            assert [curve.label for curve in of_both[metric.chart].curves] == [
                "one",
                "two",
            ]
