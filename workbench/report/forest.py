"""The figure of differences: every arm against the reference, paired by seed, as a forest plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from workbench.report import ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Evidence
from workbench.report.findings import Analysis, Comparison, row_label
from workbench.report.labels import wrap
from workbench.report.printing import join, metric_name, percent, percent_interval, sample_size

MOST_ROWS = 48
"""Above this many rows the table alone shows the differences."""


def forest_figure(analysis: Analysis) -> Figure | None:
    """Relative differences with their 95 % intervals, a dot per seed, and the tolerance."""
    evidence, comparisons = analysis.evidence, analysis.comparisons
    if not comparisons or evidence.reference is None or len(comparisons) > MOST_ROWS:
        return None
    rows = [
        {
            "arm": c.cell.series.label, "x": c.cell.x, "n": c.n, "mean": c.interval.mean, "low": c.interval.low,
            "high": c.interval.high, "verdict": c.verdict,
            **{f"seed_{seed}": value for seed, value in c.relative.items()},
        }
        for c in comparisons
    ]  # fmt: skip

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("forest", {"axes.grid.axis": "x"}):
            return _draw(evidence, comparisons, layout)

    name = metric_name(evidence.metric)
    return Figure(
        id="forest",
        title=f"Difference of the {name} from {evidence.reference.label}, paired by seed",
        caption=_caption(evidence, comparisons),
        alt=f"Forest plot. {'; '.join(_words(evidence, c) for c in comparisons)}.",
        data=pd.DataFrame(rows),
        draw=draw,
    )


def _words(evidence: Evidence, comparison: Comparison) -> str:
    bounds = "" if comparison.interval.low is None else f" {percent_interval(comparison.interval)}"
    return (
        f"{row_label(evidence, comparison.cell)} {percent(comparison.interval.mean, signed=True)}{bounds},"
        f" {comparison.verdict}"
    )


def _caption(evidence: Evidence, comparisons: tuple[Comparison, ...]) -> str:
    sizes = sorted({c.n for c in comparisons})
    n = join([str(size) for size in sizes], "or")
    points = (
        f"One seed per point ({sample_size(1)}), so no interval can be given."
        if sizes == [1]
        else f"Markers: mean over {sample_size(n)} seeds; bars: 95 % t interval of the mean difference; small dots: the"
        " seeds."
    )
    better = "left" if evidence.smaller_is_better else "right"
    edge = percent(evidence.tolerance, digits=0)
    return (
        f"{points} In per cent of the reference's value with the same seed; {better} of 0 is better. Dashed: the"
        f" tolerance of {edge}. An arrow marks what lies beyond the frame; the numbers stand beside the rows."
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a forest plot."""

    label: str
    comparison: Comparison
    style: ink.Style


def _draw(evidence: Evidence, comparisons: tuple[Comparison, ...], layout: Layout) -> matplotlib.figure.Figure:
    styles = ink.styles(evidence)
    rows = [Row(label=row_label(evidence, c.cell), comparison=c, style=styles[c.cell.series]) for c in comparisons]
    return draw_rows(rows, layout, metric_name(evidence.metric), evidence.tolerance, smaller=evidence.smaller_is_better)


def draw_rows(
    rows: Sequence[Row], layout: Layout, metric: str, tolerance: float | None, *, smaller: bool
) -> matplotlib.figure.Figure:
    """A forest plot of relative differences; ``tolerance`` None draws no line of it."""
    comparisons = [row.comparison for row in rows]
    labels = [row.label for row in rows]
    room_pt = 72 * layout.width_in * (0.3 if layout.narrow else 0.36)
    labels = [wrap(label, room_pt, 8.2) for label in labels]
    tall = 0.34 if any("\n" in label for label in labels) else 0.25
    figure, grid = ink.new_figure(layout, tall * len(comparisons) + 0.85)
    axes = grid[0, 0]
    sign = 1.0 if smaller else -1.0  # the axis shows the metric's own direction
    edge = sign * (tolerance or 0.0) * 100
    low, high = _limits([sign * 100 * v for c in comparisons for v in _reach(c)], edge)
    axes.axvline(0, color=ink.INK, linewidth=0.8)
    if tolerance is not None:
        axes.axvline(edge, color=ink.MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    for row, (comparison, line) in enumerate(zip(comparisons, rows, strict=True)):
        _draw_row(axes, row, comparison, line.style, 100 * sign, (low, high))
        text = percent(sign * comparison.interval.mean, signed=True)
        axes.annotate(
            text, (1, row), xycoords=("axes fraction", "data"),
            xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.2, annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_ylim(len(comparisons) - 0.4, -0.6)
    axes.set_yticks(range(len(comparisons)), labels)
    axes.spines["left"].set_visible(False)
    ink.few_ticks(axes.xaxis, 4 if layout.narrow else 6)
    axes.set_xlabel(f"difference of the {metric} (%)")
    return figure


def _draw_row(
    axes: Axes, row: int, comparison: Comparison, style: ink.Style, factor: float, limits: tuple[float, float]
) -> None:
    """One row: interval, seeds, mean; arrows at the edges where they lie beyond the limits."""
    interval = comparison.interval
    if interval.low is not None and interval.high is not None:
        axes.plot([factor * interval.low, factor * interval.high], [row] * 2, color=style.colour, linewidth=1.3)
        axes.plot(
            [factor * value for value in comparison.relative.values()], [row + 0.24] * comparison.n, linestyle="none",
            marker="o", markersize=2.8, color=style.colour, alpha=0.55, markeredgewidth=0,
        )  # fmt: skip
    axes.plot(factor * interval.mean, row, linestyle="none", zorder=3, **ink.marker_style(style, 6.5))
    reach = [factor * value for value in _reach(comparison)]
    for beyond, edge, marker in ((min(reach) < limits[0], limits[0], "<"), (max(reach) > limits[1], limits[1], ">")):
        if beyond:
            axes.plot(edge, row, marker=marker, markersize=5, color=style.colour, clip_on=False, markeredgewidth=0)


def _reach(comparison: Comparison) -> list[float]:
    interval = comparison.interval
    return [interval.mean, *(bound for bound in (interval.low, interval.high) if bound is not None)]


def _limits(values: list[float], edge: float) -> tuple[float, float]:
    """Room for everything but what is so far out that the rest would be squeezed together."""
    span = ink.without_outliers([*values, 0.0, 1.15 * edge])
    low, high = min(span[0], 1.15 * edge), max(span[1], 1.15 * edge)
    room = 0.06 * (high - low)
    return low - room, high + room
