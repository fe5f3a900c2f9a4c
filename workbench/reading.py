"""A study's results on a terminal: how far it is, a table of trials, and arms compared over seeds."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import StudyError
from workbench.metrics import METRICS, is_metric, unit
from workbench.summaries import Summary, read_study_file, summaries
from workbench.sweep import axis_label, value_text
from workbench.terminal import print_table

LOG_LINES = 3
"""Last lines of the log that are shown of a trial that failed."""
_ALWAYS = ("eval/loss", "comm/uplink_gb", "mem/trained_state_gb", "perf/tokens_per_s", "perf/wall_time_s")
_UNFINISHED = ("new", "pending", "running", "interrupted")


def show_status(study_dir: Path) -> None:
    """Print how many trials have which status, then one line a trial and the last words of those that failed."""
    trials, study = summaries(study_dir), read_study_file(study_dir)
    counts = Counter(trial.status for trial in trials)
    primary = study["metrics"]["primary"]["name"]
    rows = [[trial.name, trial.status, _step(trial), _number(trial, primary), trial.error or ""] for trial in trials]
    title = f"{study['name']}: {len(trials)} trials, " + ", ".join(f"{n} {status}" for status, n in counts.items())
    print_table(title, ["trial", "status", "step", primary, "why"], rows, ["step", primary])
    for trial in trials:
        if trial.log_tail:
            print(f"\n{trial.name}, last words of its log:")
            print("\n".join(f"  {line}" for line in trial.log_tail[-LOG_LINES:]))
    if counts.keys() & set(_UNFINISHED) - {"pending", "running"}:
        print("\nThe command that ran the study continues it.")


def show_table(study_dir: Path, metrics: Sequence[str], *, as_csv: bool = False) -> None:
    """Print one row a trial: arm, axes, seed, status and metrics. Raises StudyError for an unknown metric."""
    trials = summaries(study_dir)
    axes = _axes(trials)
    names = _chosen(study_dir, metrics)
    labels = [axis_label(path, axes) for path in axes]
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["trial", "arm", *axes, "seed", "status", *names])
        for trial in trials:
            values = [trial.metrics.get(name, "") for name in names]
            writer.writerow([trial.name, trial.arm, *_point(trial, axes, ""), trial.seed, trial.status, *values])
        return
    rows = [
        [trial.arm, *_point(trial, axes), str(trial.seed), *(_number(trial, name) for name in names), trial.status]
        for trial in trials
    ]
    columns = ["arm", *labels, "seed", *names, "status"]
    print_table(read_study_file(study_dir)["question"], columns, rows, [*labels, "seed", *names])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm at one point of its axes, over its seeds."""

    arm: str
    axes: dict[str, Any]
    trials: tuple[Summary, ...]

    def values(self, metric: str) -> dict[int, float]:
        """The metric by seed, of trials that are done."""
        done = (trial for trial in self.trials if trial.status == "done" and metric in trial.metrics)
        return {trial.seed: trial.metrics[metric] for trial in done}


def show_comparison(study_dir: Path, metric: str | None, against: str | None) -> None:
    """Print each arm and point over its seeds, and its paired difference from the reference. Raises StudyError."""
    study, trials = read_study_file(study_dir), summaries(study_dir)
    name = _chosen(study_dir, [metric] if metric else [])[0]
    reference = against or next((arm["name"] for arm in study["arms"] if arm["role"] == "reference"), None)
    arms = [arm["name"] for arm in study["arms"]]
    if reference is not None and reference not in arms:
        raise StudyError([f"--against ({reference}) must be an arm of the study: {', '.join(arms)}"])
    axes, found = _axes(trials), cells(trials)
    labels = [axis_label(path, axes) for path in axes]
    columns = ["arm", *labels, "seeds", name, f"{name} - {reference}", "relative"]
    rows = [
        [
            cell.arm,
            *_point(cell, axes),
            str(len(cell.values(name))),
            *_mean_and_difference(cell, found, reference, name),
        ]
        for cell in found
    ]
    if reference is None:
        columns, rows = columns[:-2], [row[:-2] for row in rows]
    title = f"{name} ({unit(name)}): mean over seeds, 95 % interval; differences are paired by seed"
    print_table(title, columns, rows, columns[1:])
    if reference is None:
        print("No arm has the role of reference; --against ARM names one to subtract.")


def cells(trials: Sequence[Summary]) -> list[Cell]:
    """The trials grouped by arm and point, in their order."""
    groups: dict[tuple[str, str], list[Summary]] = {}
    for trial in trials:
        groups.setdefault((trial.arm, repr(sorted(trial.axes.items()))), []).append(trial)
    return [Cell(arm=group[0].arm, axes=group[0].axes, trials=tuple(group)) for group in groups.values()]


def counterpart(cell: Cell, found: Sequence[Cell], reference: str) -> Cell | None:
    """The cell of the reference arm that a cell is compared with: at the same point of the axes that both have."""
    matching = [
        other
        for other in found
        if other.arm == reference and all(cell.axes.get(path, value) == value for path, value in other.axes.items())
    ]
    return matching[0] if len(matching) == 1 else None


def _mean_and_difference(cell: Cell, found: Sequence[Cell], reference: str | None, metric: str) -> list[str]:
    from workbench.statistics import paired_differences

    values = cell.values(metric)
    shown = _interval(list(values.values()))
    if reference is None or cell.arm == reference or (other := counterpart(cell, found, reference)) is None:
        return [shown, "-", "-"]
    base = other.values(metric)
    absolute = list(paired_differences(values, base).values())
    has_zero = any(value == 0 for value in base.values())
    relative = [] if has_zero else list(paired_differences(values, base, relative=True).values())
    return [shown, _interval(absolute, "{:+.4g}"), _interval(relative, "{:+.2%}")]


def _interval(values: Sequence[float], form: str = "{:.5g}") -> str:
    from workbench.statistics import t_interval

    if not values:
        return "-"
    interval = t_interval(values)
    if interval.low is None or interval.high is None:
        return form.format(interval.mean)
    return f"{form.format(interval.mean)} [{form.format(interval.low)}, {form.format(interval.high)}]"


def _chosen(study_dir: Path, metrics: Sequence[str]) -> list[str]:
    from spes_core.structure import nearest

    unknown = [name for name in metrics if not is_metric(name)]
    if unknown:
        raise StudyError([f"({name}) is not a metric{nearest(name, METRICS)}" for name in unknown])
    primary = read_study_file(study_dir)["metrics"]["primary"]["name"]
    return list(metrics) or list(dict.fromkeys((primary, *_ALWAYS)))


def _axes(trials: Sequence[Summary]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for trial in trials for path in trial.axes))


def _point(item: Summary | Cell, axes: Sequence[str], nothing: str = "-") -> list[str]:
    point: Mapping[str, Any] = item.axes
    return [value_text(point[path]) if path in point else nothing for path in axes]


def _number(trial: Summary, metric: str) -> str:
    value = trial.metrics.get(metric)
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"


def _step(trial: Summary) -> str:
    return "" if trial.step is None else f"{trial.step}/{trial.total_steps or '?'}"
