"""Many curves of shares as one picture: a row per curve, time to the right, and the darker, the closer to 1."""

from collections.abc import Mapping, Sequence

from infini_llama.tasks.report.page import text
from infini_llama.tasks.runs.record import RunRecord

MOST_CELLS = 4000
WIDTH, LEFT, ROW = 900, 110, 16  # units of the SVG: in all, of the rows' names, and the height of a row


def heat_map(title: str, x_label: str, x: Sequence[float], rows: Mapping[str, Sequence[float]]) -> str:
    """A <figure>, or nothing where there are no values.

    Args:
        rows: values from 0 to 1 by name, one for each of `x`. Of a long one, as many at equal distances as fit are drawn.
    """
    if not rows or not x:
        return ""
    count = max(1, min(len(x), 120, MOST_CELLS // len(rows)))
    chosen = sorted({round(at * (len(x) - 1) / max(1, count - 1)) for at in range(count)})
    width = (WIDTH - LEFT) / len(chosen)
    cells: list[str] = []
    words: list[str] = []
    for row, (name, values) in enumerate(rows.items()):
        top = row * ROW
        words.append(f'<text x="{LEFT - 6}" y="{top + ROW - 4}" text-anchor="end">{text(name)}</text>')
        for column, at in enumerate(chosen):
            cells.append(
                f'<rect x="{LEFT + column * width:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 1}" '
                f'fill-opacity="{min(1.0, max(0.0, values[at])):.3f}">'
                f"<title>{text(f'{x_label} {x[at]:g}, {name}: {values[at]:.4g}')}</title></rect>"
            )
    end = len(rows) * ROW + 14
    for place, anchor, at in ((LEFT, "start", chosen[0]), (WIDTH, "end", chosen[-1])):
        words.append(f'<text x="{place}" y="{end}" text-anchor="{anchor}">{text(f"{x_label} {x[at]:g}")}</text>')
    svg = (
        f'<svg role="img" aria-label="{text(title)}" viewBox="0 0 {WIDTH} {end + 6}" font-size="12" fill="var(--soft)">'
        f'<g fill="var(--series-1)">{"".join(cells)}</g>{"".join(words)}</svg>'
    )
    return f"<figure><figcaption>{text(title)}</figcaption>{svg}</figure>"


def gate_map(run: RunRecord) -> str:
    """Infini-attention's gates by layer and head over the steps that recorded them."""
    lines = [line for line in run.trained if line.gate_heads]
    if not lines:
        return ""
    rows = {
        f"layer {layer}, head {head}": [line.gate_heads[layer][head] for line in lines]
        for layer, heads in enumerate(lines[-1].gate_heads)
        for head in range(len(heads))
    }
    return heat_map("Gates: fraction of memory by layer and head", "step", [line.step for line in lines], rows)
