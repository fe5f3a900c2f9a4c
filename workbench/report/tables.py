"""Tables of results: per arm, paired differences, per trial, and what is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.mirrored import DATABASE, LOCAL_UI
from workbench.report.document import Column, Table
from workbench.report.evidence import Cell, Evidence, Trial
from workbench.report.findings import Analysis, Comparison, cell_mean, seed_interval
from workbench.report.printing import (
    DASH,
    Scale,
    axis_symbol,
    axis_value,
    duration,
    integer,
    loss,
    metric_name,
    metric_unit,
    minus,
    missing,
    p_value,
    percent,
    percent_interval,
    scale_for,
    significant,
)
from workbench.report.versions import SET_ASIDE
from workbench.statistics import bootstrap_interval

LEAST_RESAMPLED = 5
"""Below this many seeds a percentile bootstrap is much too narrow, and is not given."""
MOST_SEED_COLUMNS = 5
"""Above this many seeds the differences by seed are left to the CSV."""


def text(value: Any) -> str:
    """A cell of words; a dash where there is none."""
    return DASH if missing(value) or value == "" else str(value)


def x_text(value: Any) -> str:
    """A value of x as it stands in a frame, where a column with gaps has turned whole numbers into floats."""
    if missing(value):
        return DASH
    return axis_value(int(value)) if isinstance(value, float) and value == int(value) else axis_value(value)


def arm_columns(evidence: Evidence) -> tuple[Column, ...]:
    """The columns that name a cell: arm, and x where the study has one."""
    arm = Column(key="arm", heading="arm", show=text, align="left")
    if not evidence.x_values:
        return (arm,)
    return (arm, Column(key="x", heading=axis_symbol(evidence.x_path or ""), show=x_text))


def scales(evidence: Evidence) -> tuple[Scale, Scale]:
    """Units for bytes on the wire and for memory, the same in every table."""
    wire = scale_for([t.metrics.get(f"comm/{way}_gb", 0.0) for t in evidence.done for way in ("uplink", "downlink")])
    memory = scale_for([t.metrics.get("mem/trained_state_gb", 0.0) for t in evidence.done])
    return wire, memory


def summary_table(analysis: Analysis) -> Table | None:
    """One row per cell: loss with interval, bytes, memory, speed."""
    evidence = analysis.evidence
    rows = [_summary_row(evidence, cell) for cell in evidence.cells if cell.done]
    if not rows:
        return None
    mixed = (
        " Marked: rows of which trials were run by different code or data and set aside."
        if any(row["mixed_code"] for row in rows)
        else ""
    )
    wire, memory = scales(evidence)
    unit = metric_unit(evidence.metric)
    return Table(
        id="summary",
        title="Results per arm",
        caption=f"Means over n seeds; interval: 95 % t interval of the mean {metric_name(evidence.metric)}. Bytes are"
        " per node and whole run, payload and framing. Trained state: weights, gradients and optimizer moments of the"
        f" largest node.{mixed}",
        mark="mixed_code",
        frame=pd.DataFrame(rows),
        columns=(
            *arm_columns(evidence),
            Column(key="n", heading="n", show=integer),
            Column(key="mean", heading=f"{metric_name(evidence.metric)}{f' ({unit})' if unit else ''}", show=loss),
            Column(key="interval", heading="95 % interval", show=text),
            Column(key="uplink_gb", heading=f"uplink ({wire.unit})", show=wire.show),
            Column(key="downlink_gb", heading=f"downlink ({wire.unit})", show=wire.show),
            Column(key="trained_state_gb", heading=f"trained state ({memory.unit})", show=memory.show),
            Column(key="tokens_per_s", heading="tokens/s", show=integer),
            Column(key="merges", heading="merges", show=integer),
        ),
    )


def _summary_row(evidence: Evidence, cell: Cell) -> dict[str, Any]:
    centre, low, high = seed_interval(cell, evidence.metric)
    return {
        "arm": cell.series.label,
        "x": cell.x,
        "n": len(cell.values(evidence.metric)),
        "mean": centre,
        "low": low,
        "high": high,
        "interval": "" if low is None or high is None else minus(f"[{low:.3f}, {high:.3f}]"),
        "uplink_gb": cell_mean(cell, "comm/uplink_gb"),
        "downlink_gb": cell_mean(cell, "comm/downlink_gb"),
        "trained_state_gb": cell_mean(cell, "mem/trained_state_gb"),
        "tokens_per_s": cell_mean(cell, "perf/tokens_per_s"),
        "merges": cell_mean(cell, "merge/count"),
        "mixed_code": any(trial.status == SET_ASIDE for trial in cell.trials),
    }


def differences_table(analysis: Analysis) -> Table | None:
    """Every cell against the reference, by seed, with interval, verdict and permutation p."""
    evidence = analysis.evidence
    if not analysis.comparisons or evidence.reference is None:
        return None
    seeds = evidence.seeds
    several = len(seeds) > 1
    by_seed = seeds if several and len(seeds) <= MOST_SEED_COLUMNS else []
    columns = [
        *arm_columns(evidence),
        Column(key="n", heading="n", show=integer),
        *(Column(key=f"seed_{seed}", heading=f"seed {seed}", show=_signed) for seed in by_seed),
        Column(
            key="mean_nats",
            heading=f"mean ({metric_unit(evidence.metric).split(' ')[0] or 'absolute'})",
            show=_signed_number,
        ),
        Column(key="mean", heading="mean", show=_signed),
        *((Column(key="interval", heading="95 % interval", show=text),) if several else ()),
        *((Column(key="bootstrap", heading="bootstrap", show=text),) if _resampled(analysis) else ()),
        Column(
            key="verdict",
            heading=f"{percent(evidence.tolerance, digits=0)} tolerance",
            show=text,
            align="left",
        ),
        *(
            (
                Column(key="p", heading="p", show=p_value),
                Column(key="holm_p", heading="p, Holm", show=p_value),
            )
            if several
            else ()
        ),
    ]
    return Table(
        id="differences",
        title=f"Differences from {evidence.reference.label}, paired by seed",
        caption=_differences_caption(analysis),
        frame=pd.DataFrame([_difference_row(comparison) for comparison in analysis.comparisons]),
        columns=tuple(columns),
    )


def _difference_row(comparison: Comparison) -> dict[str, Any]:
    interval = comparison.interval
    return {
        "arm": comparison.cell.series.label,
        "x": comparison.cell.x,
        "n": comparison.n,
        **{f"seed_{seed}": value for seed, value in comparison.relative.items()},
        "mean_nats": comparison.absolute_interval.mean,
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "interval": percent_interval(interval),
        "bootstrap": percent_interval(bootstrap_interval(list(comparison.relative.values())))
        if comparison.n >= LEAST_RESAMPLED
        else "",
        "verdict": comparison.verdict,
        "p": comparison.test.p if comparison.n > 1 else None,
        "holm_p": comparison.holm_p if comparison.n > 1 else None,
    }


def _resampled(analysis: Analysis) -> bool:
    return any(comparison.n >= LEAST_RESAMPLED for comparison in analysis.comparisons)


def _differences_caption(analysis: Analysis) -> str:
    evidence = analysis.evidence
    worse = "higher" if evidence.smaller_is_better else "lower"
    name = metric_name(evidence.metric)
    text = f"In per cent of the reference's {name} with the same seed; positive is {worse}, that is worse."
    if len(evidence.seeds) < 2:
        return f"{text} One seed: a point can lie within or outside the tolerance, but carries no interval."
    smallest = min(comparison.test.smallest_p for comparison in analysis.comparisons)
    resampled = (
        f" Bootstrap: 95 % percentile interval, given from {LEAST_RESAMPLED} seeds on." if _resampled(analysis) else ""
    )
    return (
        f"{text} Interval: 95 % t interval of the mean difference.{resampled} Within: all of it at or below the"
        " tolerance; outside: all of it above; otherwise inconclusive. p: two-sided sign-flip permutation test,"
        f" smallest reachable {significant(smallest, 2)}; Holm: adjusted over the"
        f" {axis_symbol(evidence.x_path or 'rows')} of an arm."
    )


def _signed(value: Any) -> str:
    return percent(value, signed=True, digits=2)


def _signed_number(value: Any) -> str:
    return DASH if missing(value) else minus(f"{value:+.4f}")


def trials_table(evidence: Evidence, report_dir: Path) -> Table | None:
    """One row per trial, whatever became of it, linked to its folder where there is one."""
    if not evidence.trials:
        return None
    rows = []
    for cell in evidence.cells:
        for trial in cell.trials:
            rows.append(
                {
                    "arm": cell.series.label, "x": cell.x, "seed": trial.seed, "status": trial.status,
                    "primary": trial.metrics.get(evidence.metric), "trial": trial.name, "id": trial.id,
                    "folder": _link(evidence.folder / "trials" / trial.name, report_dir), "failed": not trial.done,
                    "code": code_of(trial)[:8], "events": "events",
                    "events_folder": _link(evidence.folder / "trials" / trial.name / "events", report_dir),
                    "run": trial.run[:8], "run_page": trial.run_page, **trial.metrics,
                }
            )  # fmt: skip
    wire, memory = scales(evidence)
    frame = pd.DataFrame(rows)
    numbers = (
        ("comm/uplink_gb", f"uplink ({wire.unit})", wire.show),
        ("mem/trained_state_gb", f"trained state ({memory.unit})", memory.show),
        ("perf/tokens_per_s", "tokens/s", integer),
        ("perf/wall_time_s", "wall-clock", duration),
    )
    return Table(
        id="trials",
        title="All trials",
        caption="The name links to the trial's folder where that lies near the report: result.json holds the numbers,"
        " events/*.jsonl what they were computed from. In MLflow a trial is the run of its name in the study's"
        f" experiment{_where_runs_are(evidence)}. Wall-clock: from the first step's start to the end.",
        frame=frame,
        columns=(
            *arm_columns(evidence),
            Column(key="seed", heading="seed", show=integer),
            Column(key="status", heading="status", show=text, align="left"),
            Column(key="primary", heading=metric_name(evidence.metric), show=loss),
            *(Column(key=key, heading=head, show=show) for key, head, show in numbers if key in frame),
            Column(
                key="id",
                heading="trial",
                show=lambda identity: str(identity)[:8],
                align="left",
                link="folder",
            ),
            *((Column(key="code", heading="code", show=text, align="left"),) if frame["code"].nunique() > 1 else ()),
            *(
                (Column(key="events", heading="events", show=text, align="left", link="events_folder"),)
                if (frame["events_folder"] != "").any()
                else ()
            ),
            *(
                (Column(key="run", heading="MLflow run", show=text, align="left", link="run_page"),)
                if (frame["run"] != "").any()
                else ()
            ),
        ),
        sortable=True,
        mark="failed",
    )


def _where_runs_are(evidence: Evidence) -> str:
    """How the linked pages of runs come to answer: the local store's need a command."""
    if not any(trial.run_page.startswith(LOCAL_UI) for trial in evidence.trials):
        return ""
    store = f"sqlite:///{evidence.folder.absolute().parent.name}/{DATABASE}"
    return f"; its link answers while ```mlflow ui --backend-store-uri {store}``` runs in the folder above"


def code_of(trial: Trial) -> str:
    """Digest of the code that ran a trial; empty where it is not known."""
    return str(trial.part("provenance").get("code_digest") or "")


def _link(folder: Path, report_dir: Path) -> str:
    """The folder's address relative to the report; empty when there is no folder, or they share no folder."""
    shared = Path(os.path.commonpath([folder, report_dir]))
    if not folder.is_dir() or shared == Path(shared.anchor):
        return ""
    return Path(os.path.relpath(folder, report_dir)).as_posix() + "/"


def missing_table(evidence: Evidence) -> Table | None:
    """Trials that gave no primary metric, with the reason and the last line they wrote."""
    rows = []
    for cell in evidence.cells:
        for trial in cell.trials:
            if trial.done and evidence.metric in trial.metrics:
                continue
            reason = trial.reason or (
                f"{evidence.metric} is missing or not finite" if trial.done else "no reason given"
            )
            rows.append(
                {
                    "arm": cell.series.label, "x": cell.x, "seed": trial.seed, "status": trial.status, "reason": reason,
                    "last_line": trial.log_tail[-1] if trial.log_tail else "", "trial": trial.name,
                }
            )  # fmt: skip
    if not rows:
        return None
    return Table(
        id="missing",
        title="Failed and missing trials",
        caption="They are left out of every mean, and no other trial stands in for them.",
        frame=pd.DataFrame(rows),
        columns=(
            *arm_columns(evidence),
            Column(key="seed", heading="seed", show=integer),
            Column(key="status", heading="status", show=text, align="left"),
            Column(key="reason", heading="reason", show=text, align="left"),
        ),
    )
