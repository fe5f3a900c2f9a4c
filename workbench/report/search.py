"""The section of a search: its points in order, the Pareto front, what mattered, and the winners on fresh seeds.

search.json says which trials are which point's; every number is computed here from the trials' results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.figure
import pandas as pd

from workbench.points import Scored, confirmed_spot, difference, front, score
from workbench.report import ink, searchfigures
from workbench.report.document import Block, Column, Figure, Layout, Paragraph, Section, Table
from workbench.report.evidence import Evidence, Trial
from workbench.report.printing import (
    axis_symbol,
    axis_value,
    count,
    integer,
    join,
    metric_label,
    metric_name,
    metric_unit,
    missing,
    percent,
    percent_interval,
    setting,
    significant,
)
from workbench.report.tables import text
from workbench.searchspace import Constraint, Objective
from workbench.statistics import Interval


@dataclass(frozen=True, kw_only=True)
class Found:
    """One point of the search with its results."""

    number: int
    axes: dict[str, Any]
    state: str
    reason: str
    repeats: int
    seeds: int
    scored: Scored | None
    on_front: bool
    is_winner: bool
    fresh: Interval | None
    """Relative difference of the primary metric from the reference over the fresh seeds alone; positive is worse."""

    @property
    def label(self) -> str:
        """Its settings: "H = 50"."""
        return ", ".join(setting(path, value) for path, value in self.axes.items())


class SearchEvidence:
    """A search's record joined with the results of its trials."""

    def __init__(self, evidence: Evidence, record: dict[str, Any]) -> None:
        self.evidence, self.record = evidence, record
        self.axes: list[str] = list(record["axes"])
        self.objectives = [Objective(**objective) for objective in record["objectives"]]
        self.constraints = [Constraint(**constraint) for constraint in record["constraints"]]
        self.tolerance = next((c.tolerance for c in self.constraints if c.tolerance is not None), evidence.tolerance)
        self._trials = {trial.name: trial for trial in evidence.trials}
        self._reference = self._sample(record["references"].values())
        self.points = self._read()

    def _read(self) -> list[Found]:
        rows = self.record["points"]
        scores = [self._score(row) for row in rows]
        scored = [index for index, found in enumerate(scores) if found is not None]
        best = {scored[place] for place in front([s for s in scores if s is not None], self.objectives)}
        return [
            Found(
                number=order,
                axes=dict(row["axes"]),
                state=row["state"],
                reason=row["reason"],
                repeats=row["repeats"],
                seeds=len(self._sample(row["trials"])),
                scored=scores[order - 1],
                on_front=order - 1 in best,
                is_winner=row["number"] in self.record["winners"],
                fresh=self._fresh(row["confirmed_by"]),
            )
            for order, row in enumerate(rows, start=1)
        ]

    def _score(self, row: dict[str, Any]) -> Scored | None:
        """A point that was pruned or has failed has no score."""
        if row["state"] != "done":
            return None
        try:
            return score(self._sample(row["trials"]), self._reference, self.objectives, self.constraints)
        except ValueError:
            return None

    def _fresh(self, names: Sequence[str]) -> Interval | None:
        sign = 1.0 if self.evidence.smaller_is_better else -1.0
        return difference(self._sample(names), self._reference, self.evidence.metric, sign)

    def _sample(self, names: Any) -> dict[int, dict[str, float]]:
        trials: list[Trial] = [self._trials[name] for name in names if name in self._trials]
        return {trial.seed: trial.metrics for trial in trials if trial.done}


def read(evidence: Evidence) -> SearchEvidence | None:
    """The search of a study; None where there is none, or its record is of another form."""
    try:
        record = json.loads((evidence.folder / "search" / "search.json").read_text(encoding="utf-8"))
        return SearchEvidence(evidence, record) if evidence.study.get("search") else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def without_losers(evidence: Evidence, search: SearchEvidence) -> Evidence:
    """The evidence for figures along one axis: of a search over several, the winners alone."""
    if len(search.axes) < 2:
        return evidence
    won = [row for row in search.record["points"] if row["number"] in search.record["winners"]]
    kept = {name for row in won for name in (*row["trials"], *row["confirmed_by"])}
    trials = tuple(t for t in evidence.trials if t.arm != search.record["arm"] or t.name in kept)
    return replace(evidence, trials=trials)


def section(evidence: Evidence, search: SearchEvidence) -> Section | None:
    """All that is said of the search; None before its first point."""
    if not search.points:
        return None
    blocks: list[Block | None] = [
        Paragraph(text=_summary(search)),
        Paragraph(text=confirmation(search)),
        _confirmation_table(search),
        searchfigures.path_figure(search),
        _front_figure(search),
        searchfigures.slices_figure(search),
        _history_table(search),
        searchfigures.importances_figure(search),
        _importance_table(search),
    ]
    return Section(id="search", title="Search", blocks=tuple(block for block in blocks if block is not None))


def _summary(search: SearchEvidence) -> str:
    record, points = search.record, search.points
    goals = join([f"{'least' if o.goal == 'minimize' else 'most'} {metric_name(o.metric)}" for o in search.objectives])
    limits = f", with {join([constraint.text() for constraint in search.constraints])}" if search.constraints else ""
    states = [(sum(point.state == state for point in points), state) for state in ("pruned", "failed", "open")]
    rest = "".join(f", {number} {state}" for number, state in states if number)
    kept = sum(point.scored is not None and point.scored.feasible for point in points)
    scored = sum(point.scored is not None for point in points)
    space = "a continuum" if record["size"] is None else f"a space of {count(record['size'], 'point')}"
    limits = limits.replace(search.evidence.metric, metric_name(search.evidence.metric))
    return (
        f"Searched in {record['arm']}: the {goals}{limits}. Of {space} ({'; '.join(record['space'])}),"
        f" {count(len(points), 'point')} of {record['n_trials']} asked for were tried{rest}, proposed by"
        f" {record['sampler']}; {kept} of {scored} with results keep every constraint, by their mean over"
        f" {count(len(record['seeds']), 'seed')}."
    )


def confirmation(search: SearchEvidence) -> str:
    """Whether the winners hold on seeds that no choice was made by, and the sweet spot by them."""
    seeds, winners = search.record["confirm"]["seeds"], [point for point in search.points if point.is_winner]
    if not winners:
        return "No point keeps every constraint, so there is no winner; a sweet spot is not identified."
    if not seeds:
        names = join([point.label for point in winners])
        return f"Best: {names}. No fresh seeds were asked for, so the choice is not confirmed."
    x_path = search.axes[0]
    fresh = [
        (float(point.axes[x_path]), point.fresh)
        for point in winners
        if point.fresh is not None and _is_number(point.axes.get(x_path))
    ]
    rule = (
        f"the largest {axis_symbol(x_path)} among the winners whose upper 95 % bound of the difference from the"
        f" reference, over the fresh seeds alone, is at most {percent(search.tolerance)}"
    )
    if len(search.axes) > 1 or not fresh:
        held = [point.label for point in winners if point.fresh is not None and _holds(search, point.fresh)]
        verdict = f"Within {percent(search.tolerance)} of the reference: {join(held) if held else 'none'}."
        return f"The winners ran again with the fresh seeds {join([str(seed) for seed in seeds])}. {verdict}"
    spot = confirmed_spot(fresh, search.tolerance)
    if spot is None:
        return f"Sweet spot not identified: no winner qualifies ({rule})."
    interval = next(interval for x, interval in fresh if x == spot.x)
    value = int(spot.x) if spot.x == int(spot.x) else spot.x
    return f"Sweet spot {setting(x_path, value)}, {percent_interval(interval)}: {rule}."


def _holds(search: SearchEvidence, interval: Interval) -> bool:
    """Whether all of an interval is within the tolerance; one seed gives none."""
    return interval.high is not None and interval.high <= search.tolerance


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _confirmation_table(search: SearchEvidence) -> Table | None:
    rows = [
        {
            "point": point.label, "n": point.fresh.n, "mean": point.fresh.mean, "low": point.fresh.low,
            "high": point.fresh.high, "interval": percent_interval(point.fresh),
            "holds": "yes" if _holds(search, point.fresh) else "not shown",
        }
        for point in search.points if point.fresh is not None
    ]  # fmt: skip
    if not rows:
        return None
    return Table(
        id="search_confirmation",
        title="Winners on fresh seeds",
        caption=f"Difference of the {metric_name(search.evidence.metric)} from the reference, paired by seed, over"
        " seeds that the search did not choose by; positive is worse. Tables and figures elsewhere in this report use"
        " all seeds together, in which those of the choice favour the winner.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="point", heading="winner", show=text, align="left"),
            Column(key="n", heading="n", show=integer),
            Column(key="mean", heading="mean", show=lambda value: percent(value, signed=True, digits=2)),
            Column(key="interval", heading="95 % interval", show=text),
            Column(key="holds", heading=f"at most {percent(search.tolerance)}", show=text, align="left"),
        ),
    )


def _history_table(search: SearchEvidence) -> Table:
    rows = []
    for point in search.points:
        row: dict[str, Any] = {"order": point.number, **{path: point.axes.get(path) for path in search.axes}}
        for index, objective in enumerate(search.objectives):
            row[objective.metric] = point.scored.values[index] if point.scored else None
        row["worst_violation"] = max(point.scored.violations, default=None) if point.scored else None
        row["kept"] = "" if point.scored is None else "yes" if point.scored.feasible else "no"
        row |= {"n": point.seeds, "repeats": point.repeats, "on_front": "yes" if point.on_front else ""}
        row |= {"state": point.reason or point.state, "winner": point.is_winner}
        rows.append(row)
    several = len(search.objectives) > 1
    return Table(
        id="search_history",
        title="Points in the order of their proposal",
        caption="Means over n seeds. Repeats: how often the point was proposed again, answered from its stored results."
        " Marked: the winners.",
        frame=pd.DataFrame(rows).astype(dict.fromkeys(search.axes, object)),
        columns=(
            Column(key="order", heading="point", show=integer),
            *(Column(key=path, heading=axis_symbol(path), show=_axis_text) for path in search.axes),
            *(Column(key=o.metric, heading=_heading(o.metric), show=significant) for o in search.objectives),
            *((Column(key="kept", heading="keeps limits", show=text, align="left"),) if search.constraints else ()),
            *((Column(key="on_front", heading="on the front", show=text, align="left"),) if several else ()),
            Column(key="n", heading="n", show=integer),
            Column(key="repeats", heading="repeats", show=integer),
            Column(key="state", heading="state", show=text, align="left"),
        ),
        sortable=True,
        mark="winner",
    )


def _axis_text(value: Any) -> str:
    return text(value) if missing(value) else axis_value(value)


def _heading(metric: str) -> str:
    unit = metric_unit(metric)
    return f"{metric_name(metric)} ({unit})" if unit else metric_name(metric)


def _importance_table(search: SearchEvidence) -> Table | None:
    rows = search.record["importances"]
    if not rows:
        return None
    return Table(
        id="search_importances",
        title="Which setting mattered",
        caption="PED-ANOVA over the distinct points: how far a setting's values among the best quarter differ from"
        " those among all; shares of 1 for each objective. With few points it is a hint, no measurement.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="objective", heading="objective", show=metric_name, align="left"),
            Column(key="setting", heading="setting", show=axis_symbol, align="left"),
            Column(key="importance", heading="importance", show=percent),
        ),
    )


def _front_figure(search: SearchEvidence) -> Figure | None:
    """The first two of: objectives, metrics of constraints, the primary metric; each point, the front marked."""
    named = [o.metric for o in search.objectives] + [c.metric for c in search.constraints] + [search.evidence.metric]
    metrics = list(dict.fromkeys(named))[:2]
    rows = []
    for point, record in zip(search.points, search.record["points"], strict=True):
        sample = search._sample(record["trials"])
        means = [[m[metric] for m in sample.values() if metric in m] for metric in metrics]
        if point.scored is not None and all(means):
            values = {metric: sum(found) / len(found) for metric, found in zip(metrics, means, strict=True)}
            rows.append({"point": point.label, **values, "on_front": point.on_front, "winner": point.is_winner})
    if len(metrics) < 2 or len(rows) < 2:
        return None
    frame = pd.DataFrame(rows)
    filled = "on the Pareto front of the points" if len(search.objectives) > 1 else "the best of the points"

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("search"):
            return _draw_front(frame, metrics, layout)

    return Figure(
        id="search",
        title=f"Points of the search: {metric_name(metrics[1])} against {metric_name(metrics[0])}",
        caption=f"Means over the search's seeds. Filled: {filled} that keep every constraint; ringed: the winners.",
        alt=f"{len(rows)} points; {int(frame['on_front'].sum())} on the front: "
        + join([str(row["point"]) for row in rows if row["on_front"]]),
        data=frame,
        draw=draw,
    )


def _draw_front(frame: pd.DataFrame, metrics: Sequence[str], layout: Layout) -> matplotlib.figure.Figure:
    figure, grid = ink.new_figure(layout, 3.0)
    axes, colour = grid[0, 0], ink.ARM_COLOURS[0]
    for row in frame.to_dict("records"):
        style = ink.marker_style(ink.Style(colour=colour, marker="o", hollow=not row["on_front"]), 6)
        axes.plot(row[metrics[0]], row[metrics[1]], linestyle="none", **style)
        if row["winner"]:
            axes.plot(
                row[metrics[0]], row[metrics[1]], marker="o", markersize=12, markerfacecolor="none",
                markeredgecolor=colour,
            )  # fmt: skip
            axes.annotate(str(row["point"]), (row[metrics[0]], row[metrics[1]]), (9, 3), textcoords="offset points")
    if frame[metrics[0]].min() > 0 and frame[metrics[0]].max() > 8 * frame[metrics[0]].min():
        axes.set_xscale("log")
    axes.set_xlabel(metric_label(metrics[0]))
    axes.set_ylabel(metric_label(metrics[1]))
    axes.margins(0.1)
    return figure
