"""Figures of bytes: what a node sends and receives against x, and what a byte buys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation

from workbench.report import captions, ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Evidence, Series
from workbench.report.figures import Axis, axis_of, frame_x
from workbench.report.findings import Analysis, cell_mean, reference_level, tolerance_edge
from workbench.report.labels import PointLabel, place, wrap
from workbench.report.printing import (
    NBSP,
    Scale,
    axis_symbol,
    axis_value,
    metric_label,
    metric_name,
    percent,
    scale_for,
)
from workbench.statistics import mean, t_interval


def bytes_figure(analysis: Analysis) -> Figure | None:
    """Uplink and downlink per node against x: measured as markers over the predicted line."""
    evidence = analysis.evidence
    rows = [
        {
            "arm": cell.series.label, "x": cell.x, "seed": trial.seed,
            **{
                f"{way}_{kind}gb": trial.metrics.get(f"comm/{way}_{kind}gb")
                for way in ("uplink", "downlink") for kind in ("", "predicted_")
            },
        }
        for cell in evidence.cells for trial in cell.done
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    if frame.empty or not (frame["uplink_gb"].fillna(0) > 0).any():
        return None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("uplink"):
            return _draw_bytes(evidence, layout)

    against = f", against {axis_symbol(evidence.x_path)}" if evidence.x_path else ""
    return Figure(
        id="uplink",
        title=f"Bytes that one node sends and receives in the whole run{against}",
        caption=captions.uplink(evidence),
        alt=captions.alt_by_x(evidence, "comm/uplink_gb", "Uplink in GB per node"),
        data=frame,
        draw=draw,
    )


def _draw_bytes(evidence: Evidence, layout: Layout) -> matplotlib.figure.Figure:
    axis, styles = axis_of(evidence), ink.styles(evidence)
    figure, grid = ink.new_figure(layout, 2.75, 1, 2, sharey=True)
    unit = scale_for([t.metrics.get(f"comm/{way}_gb", 0.0) for t in evidence.done for way in ("uplink", "downlink")])
    levels: list[float] = []
    for axes, way in zip(grid[0], ("uplink", "downlink"), strict=True):
        frame_x(axes, axis)
        axes.set_yscale("log")
        axes.set_title(f"{way.capitalize()} per node ({unit.unit})")
        if layout.narrow and evidence.x_path:
            axes.set_xlabel(axis_symbol(evidence.x_path))
        for series in evidence.series:
            levels += _draw_bytes_series(axes, axis, evidence, series, styles[series], way, unit)
    if levels:
        grid[0, 0].set_ylim(min(levels) / 1.4, max(levels) * 1.4)
        ink.log_ticks(grid[0, 0].yaxis, min(levels) / 1.4, max(levels) * 1.4)
    if evidence.x_values:
        way = "downlink"
        labels = []
        for series in evidence.series:
            cells = [c for c in evidence.cells_of(series) if cell_mean(c, f"comm/{way}_gb")]
            if cells:
                height = (cell_mean(cells[-1], f"comm/{way}_gb") or 0.0) * unit.factor
                labels.append(ink.end_label(grid[0, 1], height, series.label, styles[series].colour))
        ink.spread(figure, labels)
    return figure


def _draw_bytes_series(
    axes: Axes, axis: Axis, evidence: Evidence, series: Series, style: ink.Style, way: str, unit: Scale
) -> list[float]:
    """Draw one series and return the heights used."""
    heights: list[float] = []
    line: list[tuple[float, float]] = []
    for cell in evidence.cells_of(series):
        place, measured = axis.position(cell), cell_mean(cell, f"comm/{way}_gb")
        predicted = cell_mean(cell, f"comm/{way}_predicted_gb")
        if place is None and measured:
            axes.axhline(measured * unit.factor, color=style.colour, linewidth=1.2)
            heights.append(measured * unit.factor)
        elif place is not None:
            if predicted:
                line.append((place, predicted * unit.factor))
            if measured:
                axes.plot(place, measured * unit.factor, linestyle="none", **ink.marker_style(style, 6.5))
                heights.append(measured * unit.factor)
    if line:
        form: dict[str, Any] = {"linewidth": 1.3} if axis.joined else {"linestyle": "none", "marker": "_", "ms": 16}
        axes.plot(*zip(*line, strict=True), color=style.colour, zorder=1.5, **form)
    return heights


def pareto_figure(analysis: Analysis) -> Figure | None:
    """The primary metric against uplink: what a byte buys."""
    evidence = analysis.evidence
    rows = [
        {"arm": cell.series.label, "x": cell.x, "uplink_gb": sent, "mean": value, "n": len(cell.done)}
        for cell in evidence.cells
        if (sent := cell_mean(cell, "comm/uplink_gb")) and (value := cell_mean(cell, evidence.metric)) is not None
    ]
    if len(rows) < 2:
        return None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("pareto"):
            return _draw_pareto(evidence, layout)

    return Figure(
        id="pareto",
        title=f"{metric_name(evidence.metric).capitalize()} against bytes sent",
        caption=captions.pareto(evidence),
        alt=captions.alt_pareto(evidence),
        data=pd.DataFrame(rows),
        draw=draw,
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell in the Pareto figure."""

    sent: float
    values: tuple[float, ...]
    """The primary metric by seed."""
    x: Any

    @property
    def mean(self) -> float:
        """Mean of the primary metric over seeds."""
        return mean(self.values)


def _draw_pareto(evidence: Evidence, layout: Layout) -> matplotlib.figure.Figure:
    styles = ink.styles(evidence)
    figure, grid = ink.new_figure(layout, 3.0)
    axes = grid[0, 0]
    axes.set_xscale("log")
    axes.grid(visible=True, axis="x")
    unit = scale_for([t.metrics.get("comm/uplink_gb", 0.0) for t in evidence.done])
    drawn: dict[Series, list[Point]] = {}
    for series in evidence.series:
        points = [
            Point(sent=sent * unit.factor, values=tuple(cell.values(evidence.metric).values()), x=cell.x)
            for cell in evidence.cells_of(series)
            if (sent := cell_mean(cell, "comm/uplink_gb")) and cell.values(evidence.metric)
        ]
        if points:
            _draw_pareto_series(axes, points, styles[series])
            drawn[series] = points
    edges = []
    if (level := reference_level(evidence)) is not None:
        edge = tolerance_edge(evidence, level)
        axes.axhline(edge, color=ink.MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.2)
        text = f"{'+' if edge > level else '−'}{percent(evidence.tolerance, digits=0)}"
        edges.append((edge, text if layout.narrow else f"tolerance {text}"))
    bytes_sent = [point.sent for points in drawn.values() for point in points]
    low, high = min(bytes_sent) / 2, max(bytes_sent) * 1.5
    axes.set_xlim(low, high)
    ink.log_ticks(axes.xaxis, low, high)
    axes.margins(y=0.2)
    ink.few_ticks(axes.yaxis, 5)
    axes.set_xlabel(f"uplink per node ({unit.unit})")
    axes.set_ylabel(metric_label(evidence.metric))
    ink.spread(figure, [ink.end_label(axes, height, text, ink.MUTED, bold=False) for height, text in edges])
    _label_pareto(axes, evidence, drawn, narrow=layout.narrow)
    return figure


def _draw_pareto_series(axes: Axes, points: list[Point], style: ink.Style) -> None:
    """A series: means joined in order of x, with their intervals and a dot per seed."""
    x, y = [point.sent for point in points], [point.mean for point in points]
    axes.plot(x, y, color=style.colour, zorder=1.4)
    axes.plot(x, y, linestyle="none", zorder=2.5, **ink.marker_style(style, 6.5))
    for point in points:
        interval = t_interval(point.values)
        if interval.low is not None and interval.high is not None:
            axes.plot([point.sent] * 2, [interval.low, interval.high], color=style.colour, linewidth=1.1)
            axes.plot(
                [point.sent] * len(point.values), point.values, linestyle="none", marker="o", markersize=2.8,
                color=style.colour, alpha=0.55, markeredgewidth=0,
                transform=axes.transData + ScaledTranslation(5 / 72, 0, axes.figure.dpi_scale_trans),
            )  # fmt: skip


def _label_pareto(axes: Axes, evidence: Evidence, drawn: dict[Series, list[Point]], *, narrow: bool) -> None:
    """Each point's x beside it, one label for points that coincide; the name stands with the point that sent most."""
    styles, found = ink.styles(evidence), []
    for series, points in drawn.items():
        groups: list[list[Point]] = []
        for point in points:
            near = next((group for group in groups if _coincide(axes, group[0], point)), None)
            groups.append([point]) if near is None else near.append(point)
        most = max(points, key=lambda point: point.sent)
        for group in groups:
            words = ", ".join(axis_value(point.x) for point in group if point.x is not None)
            named = most in group
            if named:
                lead = "" if isinstance(group[0].x, str) else f"{axis_symbol(evidence.x_path or '')}{NBSP}={NBSP}"
                words = f"{series.label},{chr(10) if narrow else ' '}{lead}{words}" if words else series.label
            size = 8.6 if named else 7.8
            found.append(
                PointLabel(
                    text=wrap(words, 110 if narrow else 170, size, bold=named), x=group[0].sent, y=group[0].mean,
                    colour=styles[series].colour, size=size, bold=named,
                )
            )  # fmt: skip
    found.sort(key=lambda label: not label.bold)
    place(axes, found, [(point.sent, point.mean) for points in drawn.values() for point in points], ink.PAPER)


def _coincide(axes: Axes, one: Point, other: Point) -> bool:
    """Whether two points lie closer than a marker is wide."""
    apart = axes.transData.transform((one.sent, one.mean)) - axes.transData.transform((other.sent, other.mean))
    return bool(max(abs(apart)) * 72 / axes.figure.dpi < 6)
