"""Figures of a search: the best point so far, the objective along each setting, and which setting mattered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from workbench.report import ink
from workbench.report.document import Figure, Layout
from workbench.report.printing import (
    axis_label,
    axis_symbol,
    axis_value,
    count,
    join,
    metric_label,
    metric_name,
    percent,
    significant,
)

if TYPE_CHECKING:
    from workbench.report.search import SearchEvidence

_VALUE, _KEPT, _WINNER = "value", "keeps_limits", "winner"


def point_frame(search: SearchEvidence) -> pd.DataFrame:
    """One row for every point with results: its order, settings and the first objective; best so far beside it."""
    rows: list[dict[str, Any]] = []
    best: float | None = None
    smaller = search.objectives[0].goal == "minimize"
    for point in search.points:
        if point.scored is None:
            continue
        value = point.scored.values[0]
        if point.scored.feasible and (best is None or (value < best if smaller else value > best)):
            best = value
        rows.append(
            {"order": point.number, **{path: point.axes.get(path) for path in search.axes}, _VALUE: value,
             _KEPT: point.scored.feasible, _WINNER: point.is_winner, "best_so_far": best}
        )  # fmt: skip
    return pd.DataFrame(rows)


def path_figure(search: SearchEvidence) -> Figure | None:
    """The first objective of every point in the order of proposal, and the best so far."""
    frame = point_frame(search)
    if len(frame) < 2:
        return None
    metric = search.objectives[0].metric

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("search_path"):
            return _draw_path(frame, metric, layout)

    best = [row for row in frame.to_dict("records") if row[_WINNER]]
    won = [f"point {row['order']} at {significant(row[_VALUE])}" for row in best]
    found = f" Winners: {join(won)}." if won else ""
    limits = " Hollow: a constraint is broken." if search.constraints else ""
    return Figure(
        id="search_path",
        title=f"History of the search: {metric_name(metric)}",
        caption=f"Markers: each point's mean over {count(len(search.record['seeds']), 'seed')}, in the order of"
        f" proposal; line: the best so far that keeps every constraint; ringed: the winners.{limits}",
        alt=f"{metric_label(metric)} of {count(len(frame), 'point')} in order.{found}",
        data=frame,
        draw=draw,
    )


def _draw_path(frame: pd.DataFrame, metric: str, layout: Layout) -> matplotlib.figure.Figure:
    figure, grid = ink.new_figure(layout, 2.6)
    axes, colour = grid[0, 0], ink.ARM_COLOURS[0]
    axes.step(frame["order"], frame["best_so_far"].astype(float), where="post", color=colour, linewidth=1.3)
    _draw_points(axes, frame["order"], frame)
    _scale(axes, frame[_VALUE])
    ink.few_ticks(axes.xaxis, 8)
    axes.set_xlabel("point, in order of proposal")
    axes.set_ylabel(metric_label(metric))
    return figure


def slices_figure(search: SearchEvidence) -> Figure | None:
    """The first objective against each setting that was searched, all points."""
    frame = point_frame(search)
    axes_paths = [path for path in search.axes if len(frame) and frame[path].astype(str).nunique() > 1]
    if len(frame) < 2 or not axes_paths:
        return None
    metric = search.objectives[0].metric

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("search_slices"):
            return _draw_slices(frame, axes_paths, metric, layout)

    words = [
        f"along {axis_symbol(path)} from {axis_value(values[0])} to {axis_value(values[-1])}"
        for path in axes_paths
        if (values := _ordered(frame[path]))
    ]
    limits = " Hollow: a constraint is broken." if search.constraints else ""
    return Figure(
        id="search_slices",
        title=f"Slices of the search: {metric_name(metric)} along each setting",
        caption=f"All points with results; other settings differ from point to point.{limits} Ringed: the winners.",
        alt=f"{count(len(frame), 'point')} {join(words)}; {metric_name(metric)} from"
        f" {significant(frame[_VALUE].min())} to {significant(frame[_VALUE].max())}.",
        data=frame,
        draw=draw,
    )


def _draw_slices(frame: pd.DataFrame, paths: Sequence[str], metric: str, layout: Layout) -> matplotlib.figure.Figure:
    across = 1 if layout.narrow else min(3, len(paths))
    down = -(-len(paths) // across)
    figure, grid = ink.new_figure(layout, 2.3 * down + 0.2, down, across, sharey=True)
    for axes in grid.flat[len(paths) :]:
        axes.set_visible(False)
    for axes, path in zip(grid.flat, paths, strict=False):
        values = _ordered(frame[path])
        numeric = all(_is_number(value) for value in values)
        places = {str(v): float(v) if numeric else float(i) for i, v in enumerate(values)}
        if numeric and min(values) > 0 and max(values) >= 8 * min(values):
            axes.set_xscale("log")
        if len(values) <= 8:
            ink.x_ticks(axes, list(places.values()), values, log=axes.get_xscale() == "log")
        elif axes.get_xscale() == "log":
            ink.log_ticks(axes.xaxis, min(values), max(values))
        else:
            ink.few_ticks(axes.xaxis, 4)
        _draw_points(axes, frame[path].map(lambda value, places=places: places[str(value)]), frame)
        axes.margins(x=0.08)
        _scale(axes, frame[_VALUE])
        axes.set_xlabel(axis_label(path) if len(axis_label(path)) < 30 else axis_symbol(path))
        axes.set_ylabel(metric_label(metric) if axes.get_subplotspec().is_first_col() else "")
    return figure


def _draw_points(axes: Axes, places: pd.Series, frame: pd.DataFrame) -> None:
    colour = ink.ARM_COLOURS[0]
    for place, row in zip(places, frame.to_dict("records"), strict=True):
        style = ink.marker_style(ink.Style(colour=colour, marker="o", hollow=not row[_KEPT]), 6)
        axes.plot(place, row[_VALUE], linestyle="none", zorder=3, **style)
        if row[_WINNER]:
            axes.plot(place, row[_VALUE], marker="o", markersize=12, markerfacecolor="none", markeredgecolor=colour)


def _scale(axes: Axes, values: pd.Series) -> None:
    """A log axis where the values span more than a factor of eight."""
    low, high = float(values.min()), float(values.max())
    if low > 0 and high > 8 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
        ink.log_ticks(axes.yaxis, low / 1.3, high * 1.3)
    else:
        axes.margins(y=0.12)
        ink.few_ticks(axes.yaxis, 4)


def _ordered(column: pd.Series) -> list[Any]:
    """The distinct values: numbers ascending, words as they were first tried."""
    values = list(dict.fromkeys(column))
    return sorted(values) if all(_is_number(value) for value in values) else values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def importances_figure(search: SearchEvidence) -> Figure | None:
    """Which setting mattered, as bars; None for a search along one setting."""
    rows = search.record["importances"]
    if len({row["setting"] for row in rows}) < 2:
        return None
    frame = pd.DataFrame(rows)

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("search_importances", {"axes.grid.axis": "x"}):
            return _draw_importances(frame, layout)

    words = [f"{axis_symbol(row['setting'])} {percent(row['importance'])} of {metric_name(row['objective'])}"
             for row in rows]  # fmt: skip
    return Figure(
        id="search_importances",
        title="Which setting mattered",
        caption="Shares of 1 for each objective (PED-ANOVA over the distinct points); with few points a hint, no"
        " measurement.",
        alt=f"Importances: {join(words)}.",
        data=frame,
        draw=draw,
    )


def _draw_importances(frame: pd.DataFrame, layout: Layout) -> matplotlib.figure.Figure:
    objectives = list(dict.fromkeys(frame["objective"]))
    settings = list(dict.fromkeys(frame["setting"]))
    shape = (len(objectives), 1) if layout.narrow else (1, len(objectives))
    height = 0.3 * len(settings) + 0.75
    figure, grid = ink.new_figure(layout, height * shape[0], *shape, sharey=True)
    for axes, objective in zip(grid.flat, objectives, strict=True):
        own = frame[frame["objective"] == objective].set_index("setting")["importance"].reindex(settings).fillna(0)
        axes.barh(range(len(settings)), own, height=0.62, color=ink.ARM_COLOURS[0], linewidth=0)
        axes.set_yticks(range(len(settings)), [axis_symbol(path) for path in settings])
        axes.set_ylim(len(settings) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        axes.set_title(metric_name(objective))
        axes.spines["left"].set_visible(False)
        for row, value in enumerate(own):
            axes.annotate(percent(value, digits=0), (value, row), xytext=(5, 0), textcoords="offset points",
                          va="center", fontsize=8.2)  # fmt: skip
    return figure
