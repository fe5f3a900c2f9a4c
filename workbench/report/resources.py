"""Figures of what a method costs: memory and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from workbench.report import captions, ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Cell, Evidence, Trial
from workbench.report.findings import Analysis, cell_mean, row_label
from workbench.report.labels import wrap
from workbench.report.printing import missing, scale_for, significant
from workbench.statistics import mean

PARTS = {
    "weights": "weights_bytes", "gradients": "gradients_bytes", "moments": "moments_bytes",
    "activations": "activations_bytes", "sync buffers": "sync_buffers_bytes",
}  # fmt: skip
STEP = "step (compute and gradient exchange)"
"""The part of a bar that stands for computing where the exchange runs inside it."""
DEVICE_GB = (24, 48, 80)
"""Memory of common accelerators, drawn where the bars come near."""


def largest_node(trial: Trial, kind: str) -> dict[str, float]:
    """Memory of the node whose parts sum to the most ("measured" or "predicted"); empty without any."""
    nodes = trial.part("memory").get(kind) or []
    return dict(max(nodes, key=lambda node: sum(node.get(part) or 0 for part in PARTS.values()), default={}))


def memory_frame(evidence: Evidence) -> pd.DataFrame:
    """Mean over seeds of each part in GB, one row per cell, or per series where x does not change the memory."""
    rows = [_memory_row(evidence, cell) for cell in evidence.cells]
    frame = pd.DataFrame([row for row in rows if row])
    if frame.empty:
        return frame
    parts = [f"{part.replace(' ', '_')}_gb" for part in PARTS]
    totals = frame[parts].sum(axis=1)
    constant = all(group.max() <= 1.02 * group.min() for _, group in totals.groupby(frame["arm"]))
    if constant:
        frame = frame.groupby("arm", sort=False).max(numeric_only=True).reset_index()
        frame.insert(1, "label", frame["arm"])
    return frame


def _memory_row(evidence: Evidence, cell: Cell) -> dict[str, Any]:
    measured = [node for trial in cell.done if (node := largest_node(trial, "measured"))]
    predicted = [node for trial in cell.done if (node := largest_node(trial, "predicted"))]
    if not measured:
        return {}

    def gigabytes(nodes: Sequence[Mapping[str, float]], key: str) -> float | None:
        values = [float(node[key]) / 1e9 for node in nodes if node.get(key) is not None]
        return mean(values) if values else None

    return {
        "arm": cell.series.label,
        "label": row_label(evidence, cell),
        **{f"{part.replace(' ', '_')}_gb": gigabytes(measured, key) or 0.0 for part, key in PARTS.items()},
        **{f"predicted_{part.replace(' ', '_')}_gb": gigabytes(predicted, key) for part, key in PARTS.items()},
        "rss_peak_gb": gigabytes(measured, "rss_peak_bytes"),
        "cuda_peak_gb": gigabytes(measured, "cuda_peak_bytes"),
    }


def memory_figure(analysis: Analysis) -> Figure | None:
    """Memory of the largest node as stacked parts, predicted totals, and process memory."""
    evidence = analysis.evidence
    frame = memory_frame(evidence)
    if frame.empty:
        return None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("memory", {"axes.grid.axis": "x"}):
            return _draw_memory(evidence, frame, layout)

    parts = [f"{part.replace(' ', '_')}_gb" for part in PARTS]
    totals = [f"{row['label']} {significant(sum(row[p] for p in parts))} GB" for _, row in frame.iterrows()]
    return Figure(
        id="memory",
        title="Peak memory of one node, by what holds it",
        caption=captions.memory(evidence),
        alt=f"Memory per node, stacked by part. Totals: {'; '.join(totals)}.",
        data=frame,
        draw=draw,
    )


def _draw_memory(evidence: Evidence, frame: pd.DataFrame, layout: Layout) -> matplotlib.figure.Figure:
    unit = scale_for([float(frame["rss_peak_gb"].fillna(0).max()), *frame["weights_gb"]])
    rows, bars = len(frame), 0.3 * len(frame)
    labels = [wrap(label, 21 * layout.width_in, 8.2) for label in frame["label"]]
    bars *= max(1.0, (1 + max(label.count("\n") for label in labels)) / 2)
    if layout.narrow:
        figure, grid = ink.new_figure(layout, 1.8 * bars + 2.0, 2, 1, height_ratios=[1, 0.8])
        left, right = grid[0, 0], grid[1, 0]
    else:
        figure, grid = ink.new_figure(layout, bars + 1.25, 1, 2, sharey=True, width_ratios=[2.4, 1])
        left, right = grid[0, 0], grid[0, 1]
    _draw_parts(left, frame, unit.factor, unit.unit)
    right.plot(frame["rss_peak_gb"] * unit.factor, range(rows), linestyle="none", marker="|", markersize=13,
               color=ink.INK, markeredgewidth=2)  # fmt: skip
    for row, value in enumerate(frame["rss_peak_gb"] * unit.factor):
        _value(right, value, row, significant(value))
    right.set_title(f"Process peak ({unit.unit})")
    right.set_xlim(0, float(frame["rss_peak_gb"].fillna(0).max()) * unit.factor * 1.3 or 1.0)
    ink.few_ticks(right.xaxis, 3)
    for axes in (left, right):
        axes.set_yticks(range(rows), labels)
        axes.set_ylim(rows - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=colour, linewidth=0) for colour in ink.PART_COLOURS.values()]
    ink.legend(figure, handles, list(PARTS), columns=3 if layout.narrow else 5)
    return figure


def _draw_parts(axes: Axes, frame: pd.DataFrame, factor: float, unit: str) -> None:
    rows = range(len(frame))
    start = pd.Series(0.0, index=frame.index)
    predicted = pd.Series(0.0, index=frame.index)
    for part, colour in ink.PART_COLOURS.items():
        width = frame[f"{part.replace(' ', '_')}_gb"] * factor
        axes.barh(rows, width, left=start, height=0.62, color=colour, edgecolor=ink.PAPER, linewidth=0.7)
        start = start + width
        predicted = predicted + frame[f"predicted_{part.replace(' ', '_')}_gb"].astype(float) * factor
    axes.plot(predicted, rows, linestyle="none", marker="D", markersize=5, markerfacecolor=ink.PAPER,
              markeredgecolor=ink.INK, markeredgewidth=1.0, clip_on=False, zorder=4)  # fmt: skip
    for row, (total, expected) in enumerate(zip(start, predicted.fillna(0), strict=True)):
        _value(axes, max(total, expected), row, significant(total))
    reach = float(max(start.max(), predicted.fillna(0).max()))
    axes.set_title(f"Model, optimizer and buffers ({unit})")
    axes.set_xlim(0, reach * 1.12 or 1.0)
    ink.few_ticks(axes.xaxis, 5)
    for size in DEVICE_GB:
        if 0.4 * size <= reach / (factor if unit == "MB" else 1.0) <= 1.2 * size:
            axes.axvline(size * factor, color=ink.MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
            axes.set_xlim(0, max(axes.get_xlim()[1], size * factor * 1.05))


def _value(axes: Axes, x: float, row: int, text: str) -> None:
    """A number beside the end of a bar."""
    axes.annotate(text, (x, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8.2)


def throughput_figure(analysis: Analysis) -> Figure | None:
    """Tokens per second with and without synchronization, and where a node's time goes."""
    evidence = analysis.evidence
    frame = pd.DataFrame([row for cell in evidence.cells if (row := _time_row(evidence, cell))])
    if frame.empty:
        return None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("throughput", {"axes.grid.axis": "x"}):
            return _draw_throughput(evidence, frame, layout)

    lines = [f"{row['label']} {significant(row['tokens_per_s'])}" for _, row in frame.iterrows()]
    return Figure(
        id="throughput",
        title="Throughput, and where a node's time goes",
        caption=captions.throughput(evidence),
        alt=f"Global tokens per second with synchronization: {'; '.join(lines)}.",
        data=frame,
        draw=draw,
    )


def _time_row(evidence: Evidence, cell: Cell) -> dict[str, Any]:
    shares = []
    for trial in cell.done:
        times = times_s(trial)
        if (total := sum(times.values())) > 0:
            shares.append({part: seconds / total for part, seconds in times.items()})
    if not shares:
        return {}
    return {
        "arm": cell.series.label,
        "label": row_label(evidence, cell),
        "tokens_per_s": cell_mean(cell, "perf/tokens_per_s"),
        "tokens_per_s_compute": None if cell.exchanges_gradients else cell_mean(cell, "perf/tokens_per_s_compute"),
        **{f"share_{part}": mean([share[part] for share in shares]) for part in ink.TIME_COLOURS},
    }


def times_s(trial: Trial) -> dict[str, float]:
    """Seconds of a node by the parts of a bar; a step that exchanges gradients inside is one part."""
    times = {part: float(trial.part("time_s").get(part) or 0.0) for part in ink.TIME_COLOURS}
    if trial.exchanges_gradients:
        times |= {STEP: times["compute"], "compute": 0.0}
    return times


def _draw_throughput(evidence: Evidence, frame: pd.DataFrame, layout: Layout) -> matplotlib.figure.Figure:
    labels = [wrap(label, 21 * layout.width_in, 8.2) for label in frame["label"]]
    tall = (0.215, 0.29, 0.4)[min(2, max(label.count("\n") for label in labels))]
    bars = tall * max(_grouped(list(frame["arm"])), default=0.0) + 0.2
    if layout.narrow:
        figure, grid = ink.new_figure(layout, 2 * bars + 2.4, 2, 1)
        left, right = grid[0, 0], grid[1, 0]
    else:
        figure, grid = ink.new_figure(layout, bars + 1.3, 1, 2, sharey=True, width_ratios=[1, 1.35])
        left, right = grid[0, 0], grid[0, 1]
    styles = {series.label: style for series, style in ink.styles(evidence).items()}
    places = _grouped(list(frame["arm"]))
    for index, (_, row) in zip(places, frame.iterrows(), strict=True):
        style = styles[str(row["arm"])]
        ends = [row["tokens_per_s"], row["tokens_per_s_compute"]]
        if not missing(ends[1]):
            left.plot(ends, [index] * 2, color=style.colour, linewidth=1.0, alpha=0.6)
            left.plot(ends[1], index, marker=style.marker, markersize=5.5, mfc=ink.PAPER, mec=style.colour, mew=1.1)
        left.plot(ends[0], index, **ink.marker_style(style, 6))
    start = pd.Series(0.0, index=frame.index)
    first = (STEP,) if evidence.gradient_series else ()
    drawn = {part: ink.TIME_COLOURS[part] for part in (*first, *(part for part in ink.TIME_COLOURS if part != STEP))}
    for part, colour in drawn.items():
        width = frame[f"share_{part}"] * 100
        right.barh(places, width, left=start, height=0.72, color=colour, edgecolor=ink.PAPER, linewidth=0.4)
        start = start + width
    left.set_title("Tokens per second, all nodes")
    left.set_xlim(0, 1.08 * float(frame[["tokens_per_s", "tokens_per_s_compute"]].max().max() or 1.0))
    ink.few_ticks(left.xaxis, 3 if layout.narrow else 4)
    right.set_title("Share of time (%)")
    right.set_xlim(0, 100)
    for axes in (left, right):
        axes.set_yticks(places, labels)
        axes.set_ylim(max(places) + 0.6, -0.6)
        axes.spines["left"].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=colour, linewidth=0) for colour in drawn.values()]
    ink.legend(figure, handles, list(drawn), columns=4 if layout.narrow else 8)
    return figure


def _grouped(arms: Sequence[str]) -> list[float]:
    """Row heights with half a row between arms."""
    places: list[float] = []
    for index, arm in enumerate(arms):
        gap = 0.0 if not index else (1.0 if arm == arms[index - 1] else 1.5)
        places.append((places[-1] if places else 0.0) + gap)
    return places
