"""Curves as SVG inside a page, drawn by matplotlib.

Their colours are the page's own, so that they follow its light or dark ground.
"""

import contextlib
import html
import io
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from infini_llama.tasks.document import Chart, Curve
from infini_llama.tasks.storage.files import temporary_name

# The eight colours stay apart for colour-blind readers, on both grounds.
LIGHT = (
    "#2a78d6",
    "#eb6834",
    "#1baf7a",
    "#eda100",
    "#e87ba4",
    "#008300",
    "#4a3aa7",
    "#e34948",
)
DARK = (
    "#3987e5",
    "#d95926",
    "#199e70",
    "#c98500",
    "#d55181",
    "#22a022",
    "#9085e9",
    "#e66767",
)
INCHES = (4.6, 2.5)
DIGIT = 0.08  # inches, of a number beside an axis
MOST_VALUES = 60  # of one chart that show their values under the pointer
# Of one curve; more of them would not be seen, and a page of a long run would be large.
MOST_POINTS = 400
# matplotlib writes colours as #rrggbb; these stand for the page's variables.
INK = "#010101"
LINE = "#020202"
VARIABLES = {INK: "var(--soft)", LINE: "var(--line)"}
SERIES = tuple(f"#0301{number:02x}" for number in range(1, len(LIGHT) + 1))
VARIABLES |= {
    colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)
}


def import_matplotlib() -> ModuleType:
    """Import matplotlib, also where MPLBACKEND names no backend; pictures for files need none."""
    is_first = "matplotlib" not in sys.modules
    backend = os.environ.pop("MPLBACKEND", None)
    import matplotlib

    if backend is not None:
        os.environ["MPLBACKEND"] = backend
        if is_first:  # a notebook's own pictures are drawn by it
            with contextlib.suppress(ValueError):
                matplotlib.rcParams["backend"] = backend
    return matplotlib


def figure(chart: Chart) -> str:
    key = ""
    if len(chart.curves) > 1:
        spans = (
            f'<span><i style="background:{VARIABLES.get(colour, colour)}"></i>'
            f"{html.escape(curve.label)}</span>"
            for curve, colour in zip(chart.curves, _colours(chart), strict=True)
        )
        key = f'<div class="key">{"".join(spans)}</div>'
    return f"<figure><figcaption>{html.escape(chart.title)}</figcaption>{key}{svg(chart)}</figure>"


def svg(chart: Chart) -> str:
    """The chart as an <svg> element, the same bytes for the same values."""
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "infini-llama",
        "font.family": "sans-serif",
    }
    with import_matplotlib().rc_context(settings):
        target = io.StringIO()
        figure = _draw(chart, SERIES, INK, LINE)
        figure.savefig(
            target,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
        values = _values_under_the_pointer(chart, figure)
    drawn = target.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)  # the same in every chart of a page
    drawn = re.sub(
        r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", drawn
    )
    drawn = drawn.replace(LINE, VARIABLES[LINE])
    drawn = re.sub(r"#0[123]01[0-9a-f]{2}", lambda match: VARIABLES[match[0]], drawn)
    drawn = drawn.replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(chart.title)}" ', 1
    )
    end = drawn.rindex("</svg>")
    return drawn[:end] + values + drawn[end:]


def _values_under_the_pointer(chart: Chart, drawn: Any) -> str:
    """Transparent strips over the axes, whose <title> a browser shows.

    A title has x, and the value of each curve near it.
    """
    curves = [
        (curve.label, *_finite(curve))
        for curve in chart.curves
        if curve.kind in ("line", "points")
    ]
    curves = [(label, xs, ys) for label, xs, ys in curves if xs.size]
    if not curves:
        return ""
    every = np.unique(np.concatenate([xs for _, xs, _ in curves]))
    spread = np.linspace(0, len(every) - 1, min(MOST_VALUES, len(every)))
    chosen = every[np.unique(spread.astype(np.int64))]
    apart = np.diff(chosen).max(initial=0)  # a value farther away is not shown
    (axes,) = drawn.axes
    scale = 72 / drawn.dpi  # an SVG has 72 units per inch
    box = axes.get_window_extent()
    height = drawn.get_size_inches()[1] * 72
    places = axes.transData.transform([(x, axes.get_ylim()[0]) for x in chosen])[:, 0]
    edges = [box.x0, *((places[1:] + places[:-1]) / 2), box.x1]
    strips = []
    for x, left, right in zip(chosen, edges[:-1], edges[1:], strict=True):
        lines = [f"{chart.x_label} {x:,.10g}"]
        for label, xs, ys in curves:
            nearest = np.abs(xs - x).argmin()
            if abs(xs[nearest] - x) <= apart:
                lines.append(f"{label} {ys[nearest]:,.5g}".strip())
        strips.append(
            f'<rect x="{left * scale:.1f}" y="{height - box.y1 * scale:.1f}" '
            f'width="{(right - left) * scale:.1f}" height="{box.height * scale:.1f}" '
            'fill="none" pointer-events="all">'
            f"<title>{html.escape(chr(10).join(lines))}</title></rect>"
        )
    return "".join(strips)


def save_picture(chart: Chart, target: Path) -> None:
    """The chart as a PNG of 960 by 540 points, with a key, for places that show no SVG."""
    drawn = _draw(chart, LIGHT, "#16191d", "#d9dde2", (8, 4.5), beside=0.3)
    (axes,) = drawn.axes
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    axes.set_ylabel(chart.title)
    temporary = temporary_name(target)  # a killed process leaves no half picture
    drawn.savefig(temporary, format="png", dpi=120, facecolor="white")
    temporary.replace(target)


def thinned(
    x: np.ndarray,
    y: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Means of x and y, and the least and greatest y, of groups of neighbours.

    There are at most MOST_POINTS groups, of nearly equal size.
    """
    edges = np.linspace(0, len(x), min(MOST_POINTS, len(x)) + 1).astype(np.int64)[:-1]
    sizes = np.diff([*edges, len(x)])
    x_mean = np.add.reduceat(x, edges) / sizes
    y_mean = np.add.reduceat(y, edges) / sizes
    return x_mean, y_mean, np.minimum.reduceat(y, edges), np.maximum.reduceat(y, edges)


def _colours(chart: Chart) -> list[str]:
    return [
        INK if curve.kind == "level" else SERIES[number % len(SERIES)]
        for number, curve in enumerate(chart.curves)
    ]


def _finite(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    pairs = [
        (x, y)
        for x, y in zip(curve.x, curve.y, strict=curve.kind != "bars")
        if y is not None and math.isfinite(y)
    ]
    xs = np.asarray([x for x, _ in pairs], dtype=np.float64)
    ys = np.asarray([y for _, y in pairs], dtype=np.float64)
    return xs, ys


def _draw(
    chart: Chart,
    series: Sequence[str],
    ink: str,
    line: str,
    inches: tuple[float, float] = INCHES,
    beside: float = 0.0,
) -> Any:
    import_matplotlib()
    from matplotlib.figure import Figure

    drawn = Figure(figsize=inches)
    axes = drawn.add_subplot()
    named = dict(zip((*SERIES, INK), (*series, ink), strict=False)) | {INK: ink}
    for curve, colour in zip(chart.curves, _colours(chart), strict=True):
        _draw_curve(axes, curve, named[colour], ink)
    for mark in chart.marks:
        axes.axvline(mark, color=ink, linewidth=0.8, linestyle=(0, (1, 2)))
    _scale_axes(axes, chart, ink)
    axes.tick_params(colors=ink, which="both", labelsize=9, length=0)
    axes.grid(color=line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines.bottom.set_color(line)
    _margins(drawn, beside)
    return drawn


def _draw_curve(axes: Any, curve: Curve, colour: str, ink: str) -> None:
    """Draw one curve as its kind says; one without a finite value is left out."""
    x, y = _finite(curve)
    if not x.size:
        return
    if curve.kind == "level":
        axes.axhline(
            y[0],
            color=ink,
            linewidth=1,
            linestyle=(0, (4, 3)),
            label=curve.label,
        )
    elif curve.kind == "bars":
        edges = np.asarray(curve.x, dtype=np.float64)
        axes.stairs(
            y,
            edges,
            color=colour,
            fill=True,
            alpha=0.6,
            label=curve.label,
        )
    elif curve.kind == "points":
        axes.plot(
            x,
            y,
            color=colour,
            linewidth=1.4,
            marker="o",
            markersize=3.2,
            label=curve.label,
        )
    else:
        middle, mean, low, high = thinned(x, y)
        if len(x) > MOST_POINTS:
            axes.fill_between(
                middle,
                low,
                high,
                color=colour,
                alpha=0.25,
                linewidth=0,
            )
        axes.plot(
            middle,
            mean,
            color=colour,
            linewidth=1.4,
            # A line of one value would not be seen.
            marker="o" if len(middle) == 1 else None,
            markersize=3.2,
            label=curve.label,
        )


def _scale_axes(axes: Any, chart: Chart, ink: str) -> None:
    """Give both axes their scales and number formats, and the horizontal one its label."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_yscale("log" if chart.log else "linear")
    if chart.log_x and any(x <= 0 for curve in chart.curves for x in curve.x):
        axes.set_xscale("symlog", linthresh=1)  # which has a place for 0
    else:
        axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_xlabel(chart.x_label, color=ink, fontsize=9)
    if chart.x_label == "step" and not chart.log_x:
        steps = MaxNLocator(
            nbins="auto",
            integer=True,
            steps=[1, 2, 2.5, 5, 10],
        )
        axes.xaxis.set_major_locator(steps)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if not chart.log:
        low, high = axes.get_ylim()
        if max(abs(low), abs(high)) >= 1000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _margins(drawn: Any, beside: float) -> None:
    """Make room for what stands around the axes, from the length of its words.

    matplotlib's own layouts draw everything to measure it.

    Args:
        beside: inches for what stands left of the numbers.
    """
    (axes,) = drawn.axes
    width, height = drawn.get_size_inches()
    # Without the markup of 10^{-3}.
    labels = [
        re.sub(r"\\\w+|[${}^]", "", label.get_text())
        for label in axes.get_yticklabels(which="both")
    ]
    numbers = max(map(len, labels), default=0)
    above = 0.24 if axes.yaxis.get_major_formatter().get_offset() else 0.1
    drawn.subplots_adjust(
        left=(0.12 + beside + DIGIT * numbers) / width,
        right=1 - 0.22 / width,
        bottom=0.5 / height,
        top=1 - above / height,
    )
