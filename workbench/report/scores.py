"""Scores of the final weights on evaluation tasks: a table, a figure of dots, and what could not be evaluated.

Two kinds of error stand apart everywhere. The spread over seeds says how much training varies; the item standard error
says how much a score would vary with other items of the same task. Neither contains the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from workbench.evaluating_tasks import expand
from workbench.report import ink
from workbench.report.document import Block, Column, Figure, Layout, Paragraph, Section, Table
from workbench.report.evidence import Cell, Evidence, Trial
from workbench.report.findings import Analysis, row_label
from workbench.report.load import shown_cells
from workbench.report.printing import DASH, count, integer, join, minus, missing
from workbench.report.tables import arm_columns, text
from workbench.statistics import mean, standard_deviation
from workbench.trees import lookup

AVERAGE = "mean of the tasks"


@dataclass(frozen=True, kw_only=True)
class Score:
    """One task in one cell, under one metric."""

    task: str
    entry: Mapping[str, Any]
    """What a trial's evaluation says of the task beside its scores; {} for the mean of tasks."""
    metric: str
    by_seed: dict[int, float]
    item_error: float | None
    """Standard error over items, mean over seeds."""
    chance: float | None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over seeds."""
        return standard_deviation(list(self.by_seed.values()))


def section(analysis: Analysis) -> Section | None:
    """The section of a study that evaluates its trials, or has trials that were evaluated by hand."""
    evidence = analysis.evidence
    asked = tasks_of(evidence)
    if not asked:
        return None
    blocks: list[Block | None] = [
        _introduction(evidence, asked), scores_figure(analysis), scores_table(evidence), missing_scores_table(evidence),
    ]  # fmt: skip
    return Section(id="scores", title="Evaluation tasks", blocks=tuple(block for block in blocks if block is not None))


def tasks_of(evidence: Evidence) -> list[str]:
    """The tasks that the study asks for, then any others that trials were evaluated on."""
    asked = expand(lookup(evidence.study, "composed.evaluation.tasks") or ())
    found = [label for trial in evidence.done for label in _entries(trial)]
    return list(dict.fromkeys([*asked, *found]))


def scores_of(evidence: Evidence, cell: Cell) -> list[Score]:
    """The headline score of every task in a cell, in the study's order, and their mean where there are several."""
    found = [score for task in tasks_of(evidence) for score in _scores(cell, task) if _is_headline(score)]
    averaged = _average(found) if {score.task for score in found} == _scored_tasks(evidence) else None
    return [*found, averaged] if averaged is not None else found


def _scored_tasks(evidence: Evidence) -> set[str]:
    """Tasks of which some trial has a score: what a mean must be over to be compared with another."""
    entries = [item for trial in evidence.done for item in _entries(trial).items()]
    return {task for task, entry in entries if entry["status"] == "done"}


def _entries(trial: Trial) -> dict[str, Any]:
    return dict(trial.part("evaluation").get("tasks") or {})


def _scores(cell: Cell, task: str) -> list[Score]:
    """The task's scores under each metric that its trials have."""
    entries = {trial.seed: entry for trial in cell.done if (entry := _entries(trial).get(task))}
    entries = {seed: entry for seed, entry in entries.items() if entry["status"] == "done"}
    metrics = dict.fromkeys(name for entry in entries.values() for name in entry["metrics"])
    scores = []
    for metric in metrics:
        having = {seed: entry for seed, entry in entries.items() if metric in entry["metrics"]}
        first = next(iter(having.values()))
        errors = [entry["metrics"][metric]["stderr"] for entry in having.values()]
        scores.append(
            Score(
                task=task,
                entry=first,
                metric=metric,
                by_seed={seed: entry["metrics"][metric]["value"] for seed, entry in having.items()},
                item_error=None if None in errors else mean(errors),
                chance=first["chance"] if metric.startswith("acc") else None,
            )
        )
    return scores


def _is_headline(score: Score) -> bool:
    names = list(score.entry["metrics"])
    wanted = score.entry["headline"]
    return bool(score.metric == (wanted if wanted in names else names[0]))


def _average(scores: Sequence[Score]) -> Score | None:
    """The mean over tasks of the seeds that have them all; only accuracies have a mean that means something."""
    accuracies = [score for score in scores if score.metric.startswith("acc")]
    seeds = set.intersection(*(set(score.by_seed) for score in accuracies)) if accuracies else set()
    if len(accuracies) < 2 or len(accuracies) < len(scores) or not seeds:
        return None
    errors = [score.item_error for score in accuracies if score.item_error is not None]
    chances = [score.chance for score in accuracies if score.chance is not None]
    number = len(accuracies)
    return Score(
        task=AVERAGE,
        entry={},
        metric="accuracy",
        by_seed={seed: mean([score.by_seed[seed] for score in accuracies]) for seed in sorted(seeds)},
        item_error=math.hypot(*errors) / number if len(errors) == number else None,
        chance=mean(chances) if len(chances) == number else None,
    )


def _introduction(evidence: Evidence, asked: Sequence[str]) -> Paragraph:
    entries = [entry for trial in evidence.done for entry in _entries(trial).values() if entry["status"] == "done"]
    versions = sorted({str(entry["lm_eval"]) for entry in entries})
    words = f"{count(len(asked), 'task')} of lm-eval {join(versions)}" if versions else count(len(asked), "task")
    words = f"Final weights were scored on {words}."
    if limits := sorted({int(entry["limit"]) for entry in entries if entry["limit"]}):
        words += f" Only the first {join([f'{limit:,}' for limit in limits])} items of each task were used."
    cut = sorted(
        {label for trial in evidence.done for label, entry in _entries(trial).items() if entry.get("truncated")}
    )
    if cut:
        contexts = join(sorted({f"{entry['context']:,}" for entry in entries}))
        words += f" Prompts longer than the context of {contexts} tokens lost their beginning: some in {join(cut)}."
    return Paragraph(text=words)


def scores_table(evidence: Evidence) -> Table | None:
    """One row for each task and cell, tasks together."""
    order = {task: index for index, task in enumerate([*tasks_of(evidence), AVERAGE])}
    rows = [_row(cell, score) for cell in evidence.cells for score in scores_of(evidence, cell)]
    rows.sort(key=lambda row: order[row["task"]])
    if not rows:
        return None
    return Table(
        id="scores",
        title="Scores on evaluation tasks",
        caption="Mean over n seeds of each arm's final weights. s.d. over seeds: sample standard deviation, that is how"
        " much training varies. s.e. over items: standard error of one evaluation, that is how much it would vary"
        " with other items; all arms and seeds answer the same items, so it does not shrink with n. Guessing: expected"
        " accuracy of a random choice. The mean of the tasks is over all that any arm has a score of, for arms and"
        " seeds with every one. acc_norm divides an answer's log-likelihood by its length in characters.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="task", heading="task", show=text, align="left"),
            Column(key="shots", heading="shots", show=integer),
            Column(key="metric", heading="metric", show=text, align="left"),
            *arm_columns(evidence),
            Column(key="n", heading="n", show=integer),
            Column(key="mean", heading="score", show=_fraction),
            Column(key="seed_sd", heading="s.d. over seeds", show=_fraction),
            Column(key="item_se", heading="s.e. over items", show=_fraction),
            Column(key="chance", heading="guessing", show=_fraction),
            Column(key="items", heading="items", show=integer),
        ),
        sortable=True,
    )


def _row(cell: Cell, score: Score) -> dict[str, Any]:
    return {
        "task": score.task, "shots": score.entry.get("shots"), "metric": score.metric, "arm": cell.series.label,
        "x": cell.x, "n": len(score.by_seed), "mean": mean(list(score.by_seed.values())), "seed_sd": score.spread,
        "item_se": score.item_error, "chance": score.chance, "items": score.entry.get("n"),
        "version": score.entry.get("version"), "split": score.entry.get("split"),
        **{f"seed_{seed}": value for seed, value in score.by_seed.items()},
    }  # fmt: skip


def _fraction(value: Any) -> str:
    return DASH if missing(value) else minus(f"{value:.3f}")


def missing_scores_table(evidence: Evidence) -> Table | None:
    """Tasks that finished trials have no score of, with reasons; trials with the same reason share a row."""
    grouped: dict[tuple[str, str, Any, str], list[int]] = {}
    for cell in evidence.cells:
        for trial in cell.done:
            entries = _entries(trial)
            for task in tasks_of(evidence):
                entry = entries.get(task, {"status": "missing", "reason": "not evaluated; the study's next run does"})
                if entry["status"] != "done":
                    key = (task, cell.series.label, cell.x, str(entry["reason"]))
                    grouped.setdefault(key, []).append(trial.seed)
    if not grouped:
        return None
    rows = [
        {"task": task, "arm": arm, "x": x, "seeds": ", ".join(map(str, seeds)), "reason": reason}
        for (task, arm, x, reason), seeds in grouped.items()
    ]
    order = {task: index for index, task in enumerate(tasks_of(evidence))}
    rows.sort(key=lambda row: order[str(row["task"])])
    return Table(
        id="missing-scores",
        title="Scores that are missing",
        caption="The trials are complete; only these scores are not there, and no mean contains them.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="task", heading="task", show=text, align="left"),
            *arm_columns(evidence),
            Column(key="seeds", heading="seeds", show=text),
            Column(key="reason", heading="reason", show=text, align="left"),
        ),
    )


def scores_figure(analysis: Analysis) -> Figure | None:
    """Headline scores: a row for each task, a dot for each series (at its sweet spot, or best x)."""
    evidence = analysis.evidence
    chosen = [(cell, scores) for cell in shown_cells(analysis) if (scores := scores_of(evidence, cell))]
    if not chosen:
        return None
    rows = [
        {"task": row["task"], "metric": score.metric, "arm": cell.series.label, "x": cell.x, "seed": seed,
         "score": value, "item_se": score.item_error, "chance": score.chance}
        for cell, scores in chosen for score in scores for row in [_row(cell, score)]
        for seed, value in score.by_seed.items()
    ]  # fmt: skip
    several = any(len(score.by_seed) > 1 for _, scores in chosen for score in scores)

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("scores", {"axes.grid.axis": "x"}):
            return _draw(evidence, chosen, layout)

    best = {
        task: max(((mean(list(s.by_seed.values())), row_label(evidence, c)) for c, ss in chosen for s in ss
                   if s.task == task))
        for task in dict.fromkeys(score.task for _, scores in chosen for score in scores)
    }  # fmt: skip
    return Figure(
        id="scores",
        title="Scores on evaluation tasks",
        caption=f"{'Large marks: means over seeds, small dots: seeds. ' if several else ''}Grey line: one item standard"
        " error to either side, from one evaluation. Vertical tick: guessing."
        + (" Of a swept arm: its sweet spot, or else its best point." if evidence.x_values else ""),
        alt="Scores by task. Highest: "
        + "; ".join(f"{task}: {label} {value:.3f}" for task, (value, label) in best.items()),
        data=pd.DataFrame(rows),
        draw=draw,
    )


def _draw(evidence: Evidence, chosen: Sequence[tuple[Cell, list[Score]]], layout: Layout) -> matplotlib.figure.Figure:
    styles = ink.styles(evidence)
    tasks = list(dict.fromkeys(score.task for _, scores in chosen for score in scores))
    pitch = 1.0 / (len(chosen) + 1)
    height_in = max(0.24, 0.11 * (len(chosen) + 1)) * len(tasks) + 0.75
    figure, grid = ink.new_figure(layout, height_in)
    axes: Axes = grid[0, 0]
    for index, (cell, scores) in enumerate(chosen):
        style = styles[cell.series]
        for score in scores:
            y = tasks.index(score.task) + (index - (len(chosen) - 1) / 2) * pitch
            values = list(score.by_seed.values())
            centre = mean(values)
            if score.item_error is not None:
                ends = [centre - score.item_error, centre + score.item_error]
                axes.plot(ends, [y, y], color=ink.MUTED, linewidth=0.9, alpha=0.6, solid_capstyle="butt", zorder=1.5)
            if len(values) > 1:
                dots: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 3.2, "markeredgewidth": 0}
                axes.plot(values, [y] * len(values), color=style.colour, alpha=0.55, zorder=2, **dots)
            axes.plot([centre], [y], linestyle="none", zorder=2.5, **ink.marker_style(style, 5.0))
    for index, task in enumerate(tasks):
        chance = next((s.chance for _, scores in chosen for s in scores if s.task == task and s.chance), None)
        if chance is not None:
            axes.plot([chance, chance], [index - 0.42, index + 0.42], color=ink.INK, linewidth=1.0, zorder=1.2)
        if index:
            axes.axhline(index - 0.5, color=ink.RULE, linewidth=0.5, zorder=0.5)
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.set_yticks(range(len(tasks)), [_task_name(task, chosen) for task in tasks])
    axes.spines["left"].set_visible(False)
    ink.few_ticks(axes.xaxis, 5)
    axes.set_xlabel("score")
    handles = [Line2D([], [], linestyle="none", **ink.marker_style(styles[cell.series], 5.0)) for cell, _ in chosen]
    labels = [row_label(evidence, cell) for cell, _ in chosen]
    ink.legend(figure, handles, labels, columns=2 if layout.narrow else min(4, len(labels)))
    return figure


def _task_name(task: str, chosen: Sequence[tuple[Cell, list[Score]]]) -> str:
    """The task with the metric where that is not plain accuracy."""
    metric = next(score.metric for _, scores in chosen for score in scores if score.task == task)
    return task if metric in ("acc", "accuracy") else f"{task}, {metric}"
