"""The figure of learning curves: loss against tokens, wall-clock and bytes sent, as small multiples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from workbench.report import captions, ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Cell, Evidence
from workbench.report.findings import Analysis
from workbench.report.printing import Scale, scale_for

MOST_POINTS = 400
"""Points of one drawn line; longer curves keep the smallest and largest value of each bucket."""
HIDDEN_SHARE = 0.1
"""Share of training, from the start, that may lie above the frame."""
KINDS = ("validation", "train")


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What a learning curve runs along."""

    column: str
    label: str
    factor: float
    log: bool = False


def curves_figure(analysis: Analysis) -> Figure | None:
    """Validation and training loss against tokens, wall-clock and bytes sent."""
    evidence = analysis.evidence
    frame = curve_frame(evidence)
    if frame.empty:
        return None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("curves"):
            return _draw(evidence, frame, layout)

    return Figure(
        id="curves",
        title="Learning curves against tokens, time and bytes",
        caption=captions.curves(evidence),
        alt=captions.alt_curves(evidence),
        data=frame,
        draw=draw,
    )


def curve_frame(evidence: Evidence) -> pd.DataFrame:
    """Every logged point of every finished trial, one row each."""
    frames = []
    for cell in evidence.cells:
        for trial in cell.done:
            for kind in KINDS:
                rows = trial.part("curves").get(kind) or []
                if rows:
                    frame = pd.DataFrame(rows)
                    frame.insert(0, "curve", kind)
                    frame.insert(0, "seed", trial.seed)
                    frame.insert(0, "x", cell.x)
                    frame.insert(0, "arm", cell.series.label)
                    frames.append(frame)
    if not frames:
        return pd.DataFrame()
    columns = ["arm", "x", "seed", "curve", "step", "tokens", "elapsed_s", "uplink_bytes", "loss_nats"]
    whole = pd.concat(frames, ignore_index=True)
    whole["loss_nats"] = pd.to_numeric(whole["loss_nats"], errors="coerce")
    return whole[[*columns, *(name for name in whole.columns if name not in columns)]]


def mean_curve(frame: pd.DataFrame, cell: Cell, kind: str) -> pd.DataFrame:
    """The curve of one cell, averaged over seeds at each step."""
    same_x = frame["x"].isna() if cell.x is None else frame["x"] == cell.x
    own = frame[(frame["arm"] == cell.series.label) & (frame["curve"] == kind) & same_x]
    return own.groupby("step")[["tokens", "elapsed_s", "uplink_bytes", "loss_nats"]].mean()


def thin(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points of a curve, with the smallest and the largest y of each bucket and both ends kept."""
    if len(x) <= most:
        return x, y
    kept = {0, len(x) - 1}
    for bucket in np.array_split(np.arange(len(x)), most // 2 - 1):
        kept |= {int(bucket[np.nanargmin(y[bucket])]), int(bucket[np.nanargmax(y[bucket])])}
    chosen = sorted(kept)
    return x[chosen], y[chosen]


def _clocks(evidence: Evidence, frame: pd.DataFrame) -> tuple[Clock, ...]:
    unit: Scale = scale_for([float(frame["uplink_bytes"].max()) / 1e9])
    tokens = float(frame["tokens"].max())
    million = tokens >= 1e5
    seconds = float(frame["elapsed_s"].max())
    minutes = seconds >= 300
    return (
        Clock(column="tokens", label=f"tokens{' (million)' if million else ''}", factor=1e-6 if million else 1.0),
        Clock(
            column="elapsed_s",
            label=f"wall-clock ({'min' if minutes else 's'})",
            factor=1 / 60 if minutes else 1.0,
        ),
        Clock(column="uplink_bytes", label=f"sent per node ({unit.unit})", factor=unit.factor / 1e9, log=True),
    )


def _draw(evidence: Evidence, frame: pd.DataFrame, layout: Layout) -> matplotlib.figure.Figure:
    clocks = _clocks(evidence, frame)
    sent = bool((frame["uplink_bytes"] > 0).any())
    clocks = clocks if sent else clocks[:2]
    if layout.narrow:
        figure, grid = ink.new_figure(layout, 2.0 * len(clocks) + 0.4, len(clocks), 2, sharey="col")
        panels = [(grid[i, j], clock, kind) for i, clock in enumerate(clocks) for j, kind in enumerate(KINDS)]
    else:
        figure, grid = ink.new_figure(layout, 4.3, 2, len(clocks), sharey="row", sharex="col")
        panels = [(grid[j, i], clock, kind) for i, clock in enumerate(clocks) for j, kind in enumerate(KINDS)]
    for axes, clock, kind in panels:
        _draw_panel(axes, evidence, frame, clock, kind)
        if layout.narrow:
            axes.set_title(f"{kind} loss" if clock is clocks[0] else "")
        elif clock is clocks[0]:
            axes.set_ylabel(f"{kind} loss (nats per token)")
        if layout.narrow or kind == KINDS[-1]:
            axes.set_xlabel(clock.label)
    ink.legend(figure, _handles(evidence), [series.label for series in evidence.series])
    return figure


def _draw_panel(axes: Axes, evidence: Evidence, frame: pd.DataFrame, clock: Clock, kind: str) -> None:
    styles, tops, bottoms, reach = ink.styles(evidence), [], [], []
    if clock.log:
        axes.set_xscale("log")
    for series in evidence.series:
        cells = [cell for cell in evidence.cells_of(series) if cell.done]
        for index, cell in enumerate(cells):
            curve = mean_curve(frame, cell, kind).dropna()
            late = curve[curve["tokens"] > HIDDEN_SHARE * float(frame["tokens"].max())]
            if curve.empty:
                continue
            shown = late if not late.empty else curve
            tops.append(float(shown["loss_nats"].max()))
            bottoms.append(float(shown["loss_nats"].min()))
            if clock.log:
                curve = curve[curve[clock.column] > 0]
            x, y = thin(curve[clock.column].to_numpy() * clock.factor, curve["loss_nats"].to_numpy())
            reach += list(x)
            axes.plot(
                x, y, color=styles[series].colour, alpha=_strength(index, len(cells)), linewidth=1.2,
                zorder=3 if series == evidence.reference else 2,
            )  # fmt: skip
    _limits(axes, clock, bottoms, tops, reach)


def _limits(axes: Axes, clock: Clock, bottoms: Sequence[float], tops: Sequence[float], reach: Sequence[float]) -> None:
    if not reach:
        return
    room = 0.06 * (max(tops) - min(bottoms) or 1.0)
    axes.set_ylim(min(bottoms) - room, max(tops) + room)
    ink.few_ticks(axes.yaxis, 4)
    if clock.log:
        axes.set_xlim(min(reach) / 1.2, max(reach) * 1.2)
        ink.log_ticks(axes.xaxis, min(reach) / 1.2, max(reach) * 1.2)
    else:
        axes.set_xlim(0, max(reach))
        ink.few_ticks(axes.xaxis, 4)


def _strength(index: int, size: int) -> float:
    """Opacity of the index-th x of a series: 1 for the smallest x, fainter for larger."""
    return 1.0 if size == 1 else 1.0 - 0.68 * index / (size - 1)


def _handles(evidence: Evidence) -> list[Line2D]:
    styles = ink.styles(evidence)
    return [Line2D([], [], color=styles[series].colour, linewidth=1.8) for series in evidence.series]
