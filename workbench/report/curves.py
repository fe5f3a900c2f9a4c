"""The figure of learning curves: loss against tokens, wall-clock and bytes sent, as small multiples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from workbench.report import captions, ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Evidence, Trial
from workbench.report.findings import Analysis
from workbench.report.printing import Scale, scale_for

MOST_POINTS = 400
"""Points of one drawn line; longer curves keep the smallest and largest value of each bucket."""
HIDDEN_SHARE = 0.1
"""Share of training, from the start, that may lie above the frame."""
KINDS = ("validation", "train")
ALONE: dict[str, Any] = {"marker": "o", "markersize": 4}
"""How a curve of one point is drawn."""


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
    curves = read_curves(evidence)
    if curves.frame.empty:
        return None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("curves"):
            return _draw(evidence, curves, layout)

    return Figure(
        id="curves",
        title="Learning curves against tokens, time and bytes",
        caption=captions.curves(evidence),
        alt=captions.alt_curves(evidence),
        data=curves.frame,
        draw=draw,
    )


_NUMBERS = ("step", "tokens", "elapsed_s", "uplink_bytes", "loss_nats")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The learning curves of a study."""

    frame: pd.DataFrame
    """Every logged point of every finished trial, one row each."""
    means: dict[tuple[str, Any, str], pd.DataFrame]
    """By series label, x and kind: the mean over seeds at each step."""


def read_curves(evidence: Evidence) -> Curves:
    """The curves of all finished trials."""
    frames: list[pd.DataFrame] = []
    means: dict[tuple[str, Any, str], pd.DataFrame] = {}
    for cell in evidence.cells:
        for kind in KINDS:
            own = [frame for trial in cell.done if (frame := _trial_curve(trial, kind)) is not None]
            if own:
                together = pd.concat(own, ignore_index=True)
                means[cell.series.label, cell.x, kind] = together.groupby("step")[list(_NUMBERS[1:])].mean()
                frames.append(together.assign(arm=cell.series.label, x=cell.x, curve=kind))
    if not frames:
        return Curves(frame=pd.DataFrame(), means={})
    whole = pd.concat(frames, ignore_index=True)
    return Curves(frame=whole[["arm", "x", "seed", "curve", *_NUMBERS]], means=means)


def _trial_curve(trial: Trial, kind: str) -> pd.DataFrame | None:
    rows = trial.part("curves").get(kind)
    if not rows:
        return None
    frame = pd.DataFrame({name: [row.get(name) for row in rows] for name in _NUMBERS})
    return frame.assign(loss_nats=pd.to_numeric(frame["loss_nats"], errors="coerce"), seed=trial.seed)


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


def _draw(evidence: Evidence, curves: Curves, layout: Layout) -> matplotlib.figure.Figure:
    frame = curves.frame
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
        _draw_panel(axes, evidence, curves, clock, kind)
        if layout.narrow:
            axes.set_title(f"{kind} loss" if clock is clocks[0] else "")
        elif clock is clocks[0]:
            axes.set_ylabel(f"{kind} loss (nats per token)")
        if layout.narrow or kind == KINDS[-1]:
            axes.set_xlabel(clock.label)
    ink.legend(figure, _handles(evidence), [series.label for series in evidence.series])
    return figure


def _draw_panel(axes: Axes, evidence: Evidence, curves: Curves, clock: Clock, kind: str) -> None:
    most_tokens = float(curves.frame["tokens"].max())
    styles, tops, bottoms, reach = ink.styles(evidence), [], [], []
    if clock.log:
        axes.set_xscale("log")
    for series in evidence.series:
        cells = [cell for cell in evidence.cells_of(series) if cell.done]
        for index, cell in enumerate(cells):
            mean_curve = curves.means.get((series.label, cell.x, kind))
            if mean_curve is None or (curve := mean_curve.dropna()).empty:
                continue
            late = curve[curve["tokens"] > HIDDEN_SHARE * most_tokens]
            shown = late if not late.empty else curve
            tops.append(float(shown["loss_nats"].max()))
            bottoms.append(float(shown["loss_nats"].min()))
            if clock.log:
                curve = curve[curve[clock.column] > 0]
            x, y = thin(curve[clock.column].to_numpy() * clock.factor, curve["loss_nats"].to_numpy())
            reach += list(x)
            axes.plot(
                x, y, color=styles[series].colour, alpha=strength(index, len(cells)), linewidth=1.2,
                zorder=3 if series == evidence.reference else 2, **(ALONE if len(x) == 1 else {}),
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


def strength(index: int, size: int) -> float:
    """Opacity of the index-th x of a series: 1 for the smallest x, fainter for larger."""
    return 1.0 if size == 1 else 1.0 - 0.68 * index / (size - 1)


def _handles(evidence: Evidence) -> list[Line2D]:
    styles = ink.styles(evidence)
    return [Line2D([], [], color=styles[series].colour, linewidth=1.8) for series in evidence.series]
