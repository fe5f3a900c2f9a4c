"""The figure of two axes: a heat map of each arm's difference from the reference, hatched where it is inconclusive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from workbench.report import ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Evidence, Series
from workbench.report.findings import Analysis, Comparison, cell_mean
from workbench.report.labels import wrap
from workbench.report.printing import axis_label, axis_symbol, axis_value, metric_name, minus, percent, significant

HATCH = "////"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One arm: what stands at (value of the other axis, x); None where there is no number."""

    arm: str
    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    comparisons: dict[tuple[Any, Any], Comparison]
    means: dict[tuple[Any, Any], float]


def grid_figure(analysis: Analysis) -> Figure | None:
    """A heat map for every arm that varies x and exactly one other axis; None where no arm does."""
    evidence = analysis.evidence
    panels = [panel for arm in evidence.arms if (panel := _panel(analysis, arm)) is not None]
    if not panels or evidence.x_path is None:
        return None
    other = _other_path(evidence, panels[0].arm)
    compared = any(panel.comparisons for panel in panels)
    rows = [
        {
            "arm": panel.arm, other: row, evidence.x_path: column, "mean": panel.means.get((row, column)),
            "difference": c.interval.mean if c else None, "low": c.interval.low if c else None,
            "high": c.interval.high if c else None, "verdict": c.verdict if c else None, "n": c.n if c else None,
        }
        for panel in panels for row in panel.rows for column in panel.columns
        for c in [panel.comparisons.get((row, column))]
    ]  # fmt: skip

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("grid", {"axes.grid": False, "hatch.linewidth": 0.5, "hatch.color": ink.MUTED}):
            return _draw(evidence, panels, other, layout)

    name = metric_name(evidence.metric)
    return Figure(
        id="grid",
        title=f"{'Difference of the ' if compared else ''}{name[0].upper() if not compared else name[0]}{name[1:]} over"
        f" {axis_symbol(evidence.x_path)} and {axis_symbol(other)}",
        caption=_caption(evidence, compared),
        alt=_alt(evidence, panels, other),
        data=pd.DataFrame(rows),
        draw=draw,
    )


def _other_path(evidence: Evidence, arm: str) -> str:
    return next(series.others[0][0] for series in evidence.series if series.arm == arm)


def _panel(analysis: Analysis, arm: str) -> Panel | None:
    evidence = analysis.evidence
    series: list[Series] = [s for s in evidence.series if s.arm == arm]
    cells = [cell for s in series for cell in evidence.cells_of(s) if cell.x is not None]
    columns = tuple(x for x in evidence.x_values if any(cell.x == x for cell in cells))
    if len(series) < 2 or len(columns) < 2 or {len(s.others) for s in series} != {1}:
        return None
    rows = tuple(dict.fromkeys(s.others[0][1] for s in series))
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in rows)
    by_cell = {(c.cell.series.others[0][1], c.cell.x): c for c in analysis.comparisons if c.cell.series.arm == arm}
    means = {(c.series.others[0][1], c.x): v for c in cells if (v := cell_mean(c, evidence.metric)) is not None}
    return Panel(
        arm=arm, rows=tuple(sorted(rows)) if numeric else rows, columns=columns, comparisons=by_cell, means=means
    )


def _caption(evidence: Evidence, compared: bool) -> str:
    if not compared:
        return "Means over seeds. An empty field has no finished trial."
    text = (
        f"In per cent of the reference {evidence.reference.label if evidence.reference else ''}, mean of differences"
        " paired by seed; a stronger colour is worse, and the scale ends where the rest would lose its shades."
    )
    tolerance = percent(evidence.tolerance, digits=0)
    if len(evidence.seeds) > 1:
        return (
            f"{text} Hatched: inconclusive, the 95 % t interval holds the tolerance of {tolerance}. Framed: the whole"
            " interval lies within it. An empty field has no finished pair."
        )
    return (
        f"{text} Framed: the point lies within the tolerance of {tolerance}; one seed gives no interval."
        " An empty field has no finished pair."
    )


def _alt(evidence: Evidence, panels: Sequence[Panel], other: str) -> str:
    words = []
    for panel in panels:
        for row in panel.rows:
            fields = [
                f"{_text(panel, row, column)} ({c.verdict})" if (c := panel.comparisons.get((row, column))) else
                f"{_text(panel, row, column) or 'none'}"
                for column in panel.columns
            ]  # fmt: skip
            lead = f"{panel.arm}, {axis_symbol(other)} = {axis_value(row)}"
            columns = ", ".join(axis_value(column) for column in panel.columns)
            words.append(f"{lead}: {', '.join(fields)} at {axis_symbol(evidence.x_path or '')} = {columns}")
    return f"Heat map. {'; '.join(words)}."


def _text(panel: Panel, row: Any, column: Any) -> str:
    if comparison := panel.comparisons.get((row, column)):
        return minus(f"{100 * comparison.interval.mean:+.1f}") + "\u00a0%"
    value = panel.means.get((row, column))
    return "" if value is None else significant(value, 4)


def _draw(evidence: Evidence, panels: Sequence[Panel], other: str, layout: Layout) -> matplotlib.figure.Figure:
    across = 1 if layout.narrow else min(len(panels), 2)
    down = -(-len(panels) // across)
    tallest = max(len(panel.rows) for panel in panels)
    figure, grid = ink.new_figure(layout, down * (0.36 * tallest + 0.85), down, across)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    values = [_value(panel, key) for panel in panels for key in panel.means]
    known = [value for value in values if value is not None]
    low, high = ink.without_outliers(known or [0.0])
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, evidence, panel, (low, high), room_pt=72 * layout.width_in / across)
        axes.set_title(panel.arm)
        axes.set_xlabel(wrap(axis_label(evidence.x_path or ""), 0.55 * ink.column_pt(axes), 8.6))
        axes.set_ylabel(axis_symbol(other) if axes.get_subplotspec().is_first_col() else "")
    return figure


def _value(panel: Panel, key: tuple[Any, Any]) -> float | None:
    if panel.comparisons:
        return panel.comparisons[key].interval.mean if key in panel.comparisons else None
    return panel.means.get(key)


def _draw_panel(axes: Axes, evidence: Evidence, panel: Panel, span: tuple[float, float], *, room_pt: float) -> None:
    size = 8.2 if room_pt / (len(panel.columns) + 1.5) > 34 else 6.8
    for y, row in enumerate(panel.rows):
        for x, column in enumerate(panel.columns):
            value, comparison = _value(panel, (row, column)), panel.comparisons.get((row, column))
            if value is None:
                continue
            share = min(1.0, max(0.0, (value - span[0]) / (span[1] - span[0] or 1.0)))
            worse = share if panel.comparisons or evidence.smaller_is_better else 1 - share
            unsure = comparison is not None and comparison.verdict == "inconclusive"
            within = comparison is not None and comparison.verdict in ("within", "point within")
            place, wide, tall = (x - 0.48, y - 0.46), 0.96, 0.92
            axes.add_patch(Rectangle(place, wide, tall, facecolor=ink.HEAT, alpha=0.06 + 0.6 * worse, lw=0))
            if unsure:
                axes.add_patch(Rectangle(place, wide, tall, facecolor="none", edgecolor=ink.MUTED, lw=0, hatch=HATCH))
            if within:
                axes.add_patch(Rectangle(place, wide, tall, facecolor="none", edgecolor=ink.INK, lw=1.3))
            axes.annotate(
                _text(panel, row, column), (x, y), ha="center", va="center", fontsize=size, color=ink.INK,
                bbox={"facecolor": ink.PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.2},
            )  # fmt: skip
    axes.set_xlim(-0.55, len(panel.columns) - 0.45)
    axes.set_ylim(len(panel.rows) - 0.45, -0.55)
    ink.x_ticks(axes, range(len(panel.columns)), panel.columns, log=False)
    axes.set_yticks(range(len(panel.rows)), [wrap(axis_value(value), 0.2 * room_pt, 8.2) for value in panel.rows])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
