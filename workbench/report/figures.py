"""The figure of the result, the final loss against x, and the x axis that other figures share with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation

from workbench.report import captions, ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Cell, Evidence, Series
from workbench.report.findings import Analysis, cell_mean, reference_level, tolerance_edge
from workbench.report.labels import wrap
from workbench.report.printing import (
    axis_label,
    axis_symbol,
    metric_label,
    metric_name,
    percent,
    setting,
    significant,
)
from workbench.statistics import mean, t_interval

Draw = Callable[[Layout], matplotlib.figure.Figure]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Where cells stand along x: at their value, or side by side where values are words or there is no x."""

    label: str
    log: bool
    ticks: tuple[Any, ...]
    positions: dict[Any, float]
    joined: bool
    """Whether points may be joined by lines: x is a quantity, not a word."""

    def position(self, cell: Cell) -> float | None:
        """None where x does not apply to the cell (it is then drawn as a level line)."""
        key = cell.series.label if self.positions and None in self.positions else cell.x
        return self.positions.get(key)

    @property
    def limits(self) -> tuple[float, float]:
        """Limits with some room on both sides."""
        low, high = min(self.positions.values()), max(self.positions.values())
        if self.log:
            room = (high / low) ** 0.05 if high > low else 1.5
            return low / room, high * room
        room = (high - low) * 0.05 if high > low else 0.5
        return low - room, high + room


def axis_of(evidence: Evidence) -> Axis:
    """The x axis of the study's figures."""
    values = evidence.x_values
    if not values:
        labels = [series.label for series in evidence.series] or ["no trials"]
        places = {label: float(index) for index, label in enumerate(labels)}
        return Axis(label="", log=False, ticks=tuple(labels), positions={None: 0.0, **places}, joined=False)
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    log = bool(evidence.report.get("log_x")) and numeric and min(values) > 0
    places = {value: float(value) if numeric else float(index) for index, value in enumerate(values)}
    label = axis_label(evidence.x_path or "")
    return Axis(label=label, log=log, ticks=tuple(values), positions=places, joined=numeric)


def frame_x(axes: Axes, axis: Axis) -> None:
    """Scale, ticks, limits and label of an x axis."""
    ink.x_ticks(axes, [axis.positions[tick] for tick in axis.ticks], axis.ticks, log=axis.log)
    axes.set_xlim(*axis.limits)
    axes.set_xlabel(wrap(axis.label, 0.7 * ink.column_pt(axes), 8.6))


def loss_figure(analysis: Analysis) -> Figure | None:
    """The primary metric against x, with the reference, the tolerance and the sweet spots."""
    evidence = analysis.evidence
    rows = [
        {
            "arm": cell.series.label,
            "x": cell.x,
            "seed": seed,
            metric_name(evidence.metric).replace(" ", "_"): value,
        }
        for cell in evidence.cells
        for seed, value in cell.values(evidence.metric).items()
    ]
    if not rows:
        return None
    against = f"against {axis_symbol(evidence.x_path)}" if evidence.x_path else "of each arm"

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("loss"):
            return _draw_loss(analysis, layout)

    return Figure(
        id="loss",
        title=f"Final {metric_name(evidence.metric)} {against} at equal training tokens",
        caption=captions.loss_against_x(analysis),
        alt=captions.alt_by_x(evidence, evidence.metric, f"Final {metric_label(evidence.metric)}"),
        data=pd.DataFrame(rows),
        draw=draw,
    )


def _draw_loss(analysis: Analysis, layout: Layout) -> matplotlib.figure.Figure:
    evidence, axis = analysis.evidence, axis_of(analysis.evidence)
    figure, grid = ink.new_figure(layout, max(3.4, 0.46 * (len(evidence.series) + 1)) if layout.narrow else 3.4)
    axes, styles = grid[0, 0], ink.styles(evidence)
    frame_x(axes, axis)
    labels = _draw_levels(analysis, axes, axis, layout)
    drawn = [s for s in evidence.series if any(axis.position(c) is not None for c in evidence.cells_of(s))]
    axes.set_ylim(*_loss_limits(analysis))
    for index, series in enumerate(drawn):
        dodge = (index - (len(drawn) - 1) / 2) * 3.0
        last = _draw_series(axes, axis, evidence, series, styles[series], dodge)
        if last is not None and evidence.x_values:
            detail = _spot_words(analysis, series) if not layout.narrow else ""
            low, high = axes.get_ylim()
            labels.append(
                ink.end_label(axes, min(max(last, low), high), series.label, styles[series].colour, detail=detail)
            )
        _draw_spot(analysis, axes, axis, series, styles[series], dodge)
    _draw_beyond(axes, axis, evidence, styles)
    axes.set_ylabel(metric_label(evidence.metric))
    ink.few_ticks(axes.yaxis, 6)
    ink.spread(figure, labels)
    return figure


def _loss_limits(analysis: Analysis) -> tuple[float, float]:
    """Limits that hold every seed and interval, the reference's band and the tolerance, but not what is far out."""
    evidence, heights = analysis.evidence, []
    means = [value for cell in evidence.cells if (value := cell_mean(cell, evidence.metric)) is not None]
    edges = [] if (level := reference_level(evidence)) is None else [tolerance_edge(evidence, level)]
    lowest, highest = ink.without_outliers([*means, *edges])
    for cell in evidence.cells:
        if (values := list(cell.values(evidence.metric).values())) and lowest <= mean(values) <= highest:
            interval = t_interval(values)
            heights += [*values, interval.upper, interval.mean if interval.low is None else interval.low]
    heights += edges
    room = 0.07 * (max(heights) - min(heights)) or 0.02 * abs(heights[0]) or 1.0
    return min(heights) - room, max(heights) + room


def _draw_beyond(axes: Axes, axis: Axis, evidence: Evidence, styles: dict[Series, ink.Style]) -> None:
    """An arrow at the frame's edge, with the value, for every mean that lies beyond it."""
    low, high = axes.get_ylim()
    taken: dict[float, int] = {}
    for cell in evidence.cells:
        value, place = cell_mean(cell, evidence.metric), axis.position(cell)
        if value is None or place is None or low <= value <= high:
            continue
        above, colour = value > high, styles[cell.series].colour
        level = taken[place] = taken.get(place, -1) + 1
        axes.plot(place, high if above else low, marker="^" if above else "v", markersize=6, color=colour,
                  markeredgewidth=0, clip_on=False)  # fmt: skip
        axes.annotate(
            significant(value, 3), (place, high if above else low), xytext=(7, (-1 if above else 1) * (4 + 10 * level)),
            textcoords="offset points", va="top" if above else "bottom", color=colour, fontsize=7.8,
        )  # fmt: skip


def _draw_levels(analysis: Analysis, axes: Axes, axis: Axis, layout: Layout) -> list[ink.EndLabel]:
    """Series to which x does not apply as level lines with their interval as a band, and the tolerance line."""
    evidence, labels = analysis.evidence, []
    styles = ink.styles(evidence)
    for series in evidence.series:
        is_reference = series == evidence.reference
        for cell in evidence.cells_of(series):
            values = list(cell.values(evidence.metric).values())
            level = axis.position(cell) is None or (is_reference and not evidence.x_values)
            if not values or not level:
                continue
            interval = t_interval(values)
            if interval.low is not None and interval.high is not None:
                axes.axhspan(interval.low, interval.high, color=styles[series].colour, alpha=0.13, linewidth=0)
            axes.axhline(interval.mean, color=styles[series].colour, linewidth=1.2)
            labels.append(ink.end_label(axes, interval.mean, series.label, styles[series].colour))
            if is_reference:
                edge = tolerance_edge(evidence, interval.mean)
                axes.axhline(edge, color=ink.MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
                text = f"{'+' if edge > interval.mean else '−'}{percent(evidence.tolerance, digits=0)}"
                text = text if layout.narrow else f"tolerance {text}"
                labels.append(ink.end_label(axes, edge, text, ink.MUTED, bold=False))
    return labels


def _shifted(axes: Axes, points: float) -> Any:
    """Data coordinates moved right by some points, so that arms at the same x do not hide one another."""
    return axes.transData + ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)


def _draw_series(
    axes: Axes, axis: Axis, evidence: Evidence, series: Series, style: ink.Style, dodge_pt: float
) -> float | None:
    """Means with intervals, joined by a line, and a dot per seed; returns the height of the last mean."""
    places, means = [], []
    for cell in evidence.cells_of(series):
        values, place = list(cell.values(evidence.metric).values()), axis.position(cell)
        if not values or place is None:
            continue
        interval = t_interval(values)
        places.append(place)
        means.append(interval.mean)
        if interval.low is not None and interval.high is not None:
            bar, dots = _shifted(axes, dodge_pt), _shifted(axes, dodge_pt + 5)
            axes.plot([place] * 2, [interval.low, interval.high], color=style.colour, linewidth=1.1, transform=bar)
            axes.plot(
                [place] * len(values), values, linestyle="none", marker="o", markersize=2.8, color=style.colour,
                alpha=0.55, markeredgewidth=0, transform=dots,
            )  # fmt: skip
    join, shift = "-" if axis.joined else "none", _shifted(axes, dodge_pt)
    axes.plot(places, means, color=style.colour, linestyle=join, transform=shift, **ink.marker_style(style, 6.5))
    return means[-1] if means else None


def _draw_spot(analysis: Analysis, axes: Axes, axis: Axis, series: Series, style: ink.Style, dodge_pt: float) -> None:
    """A ring around the sweet spot and a fine line down to its x."""
    spot = analysis.spots.get(series)
    cells = analysis.evidence.cells_of(series)
    cell = next((c for c in cells if spot is not None and c.x == spot.x), None)
    height, place = cell_mean(cell, analysis.evidence.metric), axis.position(cell) if cell else None
    if height is None or place is None:
        return
    shift = _shifted(axes, dodge_pt)
    axes.plot(
        [place] * 2, [axes.get_ylim()[0], height], color=style.colour, linewidth=0.9, linestyle=(0, (1, 2)),
        transform=shift, zorder=1.5,
    )  # fmt: skip
    axes.plot(
        place, height, marker="o", markersize=13, markerfacecolor="none", markeredgecolor=style.colour,
        markeredgewidth=1.0, transform=shift,
    )  # fmt: skip


def _spot_words(analysis: Analysis, series: Series) -> str:
    if series not in analysis.spots:
        return ""
    spot = analysis.spots[series]
    return "sweet spot not identified" if spot is None else f"sweet spot {setting(analysis.evidence.x_path, spot.x)}"
