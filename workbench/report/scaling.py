"""The figure of node scaling, in studies whose x is the number of nodes: what one more node saves and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from workbench.report import ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Cell, Evidence
from workbench.report.figures import axis_of, frame_x
from workbench.report.findings import Analysis, cell_mean
from workbench.report.printing import Scale, count, join, percent, scale_for, significant
from workbench.report.resources import PARTS, largest_node
from workbench.statistics import mean

_TRAINED = ("weights", "gradients", "moments")


def scaling_figure(analysis: Analysis) -> Figure | None:
    """Uplink of a round, trained state and speed per node against N: measured, over what arithmetic says."""
    evidence = analysis.evidence
    if evidence.x_path != "nodes" or len(evidence.x_values) < 2:
        return None
    rows: list[dict[str, Any]] = [
        {
            "arm": cell.series.label, "nodes": _nodes(cell), "uplink_per_round_gb": _per_round(cell, "comm/uplink_gb"),
            "uplink_per_round_predicted_gb": _per_round(cell, "comm/uplink_predicted_gb"),
            "trained_state_gb": cell_mean(cell, "mem/trained_state_gb"),
            "trained_state_predicted_gb": _predicted_state(cell),
            "tokens_per_s": cell_mean(cell, "perf/tokens_per_s"),
        }
        for cell in evidence.cells if cell.done
    ]  # fmt: skip
    if not rows:
        return None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("scaling"):
            return _draw(evidence, layout)

    return Figure(
        id="scaling",
        title="What more nodes save and cost: bytes of a round, trained state and speed",
        caption="Markers: measured, mean over seeds; lines: by arithmetic, with S shared and E expert bytes S + E/N of"
        " a sparse partition and S + E of a full one. Level line: an arm with its own number of nodes. Speed: tokens"
        " per second of all nodes together; on one machine the nodes share its cores, so it does not say how a cluster"
        " would scale. Logarithmic scales." + _widest_gap(rows),
        alt=_alt(rows),
        data=pd.DataFrame(rows),
        draw=draw,
    )


def _nodes(cell: Cell) -> int | None:
    return int(cell.done[0].config.get("nodes") or 0) or None


def _per_round(cell: Cell, metric: str) -> float | None:
    """The bytes (GB) of one round of one node."""
    shares = [
        trial.metrics[metric] / trial.metrics["comm/rounds"]
        for trial in cell.done
        if metric in trial.metrics and trial.metrics.get("comm/rounds")
    ]
    return mean(shares) if shares else None


def _predicted_state(cell: Cell) -> float | None:
    nodes = [node for trial in cell.done if (node := largest_node(trial, "predicted"))]
    return mean([sum(node[PARTS[part]] for part in _TRAINED) / 1e9 for node in nodes]) if nodes else None


def _widest_gap(rows: list[dict[str, Any]]) -> str:
    gaps = [
        abs(row[f"{name}_gb"] / row[f"{name}_predicted_gb"] - 1)
        for row in rows
        for name in ("uplink_per_round", "trained_state")
        if row[f"{name}_gb"] and row[f"{name}_predicted_gb"]
    ]
    return f" Largest deviation from the arithmetic: {percent(max(gaps))}." if gaps else ""


def _alt(rows: list[dict[str, Any]]) -> str:
    parts = [
        f"{row['arm']} at N = {row['nodes']}: {significant(row['uplink_per_round_gb'])} GB sent in a round,"
        f" {significant(row['trained_state_gb'])} GB trained state, {significant(row['tokens_per_s'])} tokens/s"
        for row in rows
    ]
    return f"{count(len(rows), 'point')}. {'; '.join(parts)}."


def _draw(evidence: Evidence, layout: Layout) -> matplotlib.figure.Figure:
    wire = scale_for([v for c in evidence.cells if (v := _per_round(c, "comm/uplink_gb"))])
    memory = scale_for([v for c in evidence.cells if (v := cell_mean(c, "mem/trained_state_gb"))])
    speed = Scale(factor=1.0, unit="tokens/s")
    panels: list[tuple[str, Scale, Callable[[Cell], float | None], Callable[[Cell], float | None]]] = [
        (f"Sent per round ({wire.unit})", wire, lambda c: _per_round(c, "comm/uplink_gb"),
         lambda c: _per_round(c, "comm/uplink_predicted_gb")),
        (f"Trained state ({memory.unit})", memory, lambda c: cell_mean(c, "mem/trained_state_gb"), _predicted_state),
        ("Speed (tokens/s)", speed, lambda c: cell_mean(c, "perf/tokens_per_s"), lambda c: None),
    ]  # fmt: skip
    shape = (3, 1) if layout.narrow else (1, 3)
    figure, grid = ink.new_figure(layout, 5.6 if layout.narrow else 2.6, *shape)
    for axes, (title, unit, measured, predicted) in zip(grid.flat, panels, strict=True):
        _draw_panel(axes, evidence, unit, measured, predicted)
        axes.set_title(title)
        axes.set_xlabel("N, nodes")
    styles = ink.styles(evidence)
    handles = [axes.plot([], [], **ink.marker_style(styles[s]), color=styles[s].colour)[0] for s in evidence.series]
    ink.legend(figure, handles, [series.label for series in evidence.series])
    return figure


def _draw_panel(
    axes: Axes,
    evidence: Evidence,
    unit: Scale,
    measured: Callable[[Cell], float | None],
    predicted: Callable[[Cell], float | None],
) -> None:
    axis, styles, heights = axis_of(evidence), ink.styles(evidence), []
    frame_x(axes, axis)
    axes.set_yscale("log")
    for series in evidence.series:
        style, line, joined = styles[series], [], []
        for cell in evidence.cells_of(series):
            place, value, expected = axis.position(cell), measured(cell), predicted(cell)
            if value and place is None:
                axes.axhline(value * unit.factor, color=style.colour, linewidth=1.2)
            if value and place is not None:
                axes.plot(place, value * unit.factor, linestyle="none", **ink.marker_style(style, 6.5))
                joined.append((place, value * unit.factor))
            if expected and place is not None:
                line.append((place, expected * unit.factor))
            heights += [v * unit.factor for v in (value, expected) if v]
        if line or joined:
            axes.plot(*zip(*(line or joined), strict=True), color=style.colour, linewidth=1.3, zorder=1.5)
    if heights:
        axes.set_ylim(min(heights) / 1.3, max(heights) * 1.3)
        ink.log_ticks(axes.yaxis, min(heights) / 1.3, max(heights) * 1.3)


def sentence(analysis: Analysis) -> str:
    """How the bytes of a round and the trained state change from the fewest nodes to the most, by arm."""
    evidence = analysis.evidence
    if evidence.x_path != "nodes":
        return ""
    parts = []
    for series in evidence.series:
        cells = [cell for cell in evidence.cells_of(series) if cell.done and cell.x is not None]
        if len(cells) < 2:
            continue
        sent = [_per_round(cell, "comm/uplink_gb") for cell in (cells[0], cells[-1])]
        held = [cell_mean(cell, "mem/trained_state_gb") for cell in (cells[0], cells[-1])]
        if all(sent) and all(held):
            changes = [percent((two or 0.0) / (one or 1.0), digits=0) for one, two in (sent, held)]
            parts.append(f"in {series.label} to {changes[0]} of the bytes and {changes[1]} of the trained state")
    values = evidence.x_values
    lead = f"From {values[0]} to {values[-1]} nodes, what a node sends in a round and holds goes"
    return f"{lead} {join(parts)}." if parts else ""
