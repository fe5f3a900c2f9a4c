"""A report over several studies: what each asked and found, and what their arms cost, side by side.

Every arm is compared with its own study's reference alone. Losses of two studies stand in one column, and are said to
be comparable only where model, data and budget are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import pandas as pd

from workbench.report import bandwidth, forest, ink, origins, words
from workbench.report.document import Block, Column, Document, Figure, Layout, Note, Section, Table
from workbench.report.evidence import Cell, Evidence, Trial
from workbench.report.findings import Analysis, analyse, cell_mean, row_label, seed_interval
from workbench.report.printing import (
    axis_symbol,
    axis_value,
    count,
    integer,
    join,
    loss,
    metric_name,
    percent,
    percent_interval,
    scale_for,
    sentence,
    significant,
)
from workbench.report.tables import text

MOST_ROWS = 60
"""Rows of the figure; above it the table alone shows the differences."""


def compose(studies: Sequence[Evidence], report_dir: Path) -> Document:
    """The comparison as a document."""
    names = _names(studies)
    analyses = [analyse(study) for study in studies]
    shared = _shared_table(studies, names)
    opening: list[Block | None] = [_warning(studies, names), _forest(analyses, names)]
    sections = [
        _section("findings", "What each study asked and found", _findings_table(analyses, names)),
        _section("arms", "All arms", _arms_table(analyses, names)),
        _section("shared", "The same trials in several studies", shared),
        _section("origin", "Where the numbers come from", _origin_table(studies, names, report_dir)),
    ]
    trials = sum(len(study.trials) for study in studies)
    done = sum(len(study.done) for study in studies)
    return Document(
        name=" + ".join(names),
        title=f"{sentence(join(names))} compared",
        byline=f"{count(len(studies), 'study', 'studies')} · {done} of {count(trials, 'trial')} finished",
        verdict=_verdict(analyses, names),
        opening=tuple(block for block in opening if block is not None),
        sections=tuple(section for section in sections if section is not None),
        formats=("html", "pdf", "csv", "latex"),
    )


def provenance(studies: Sequence[Evidence]) -> dict[str, Any]:
    """What the comparison was made from."""
    return {
        "schema": 1,
        "name": " + ".join(_names(studies)),
        "question": None,
        "command": f"python -m workbench.report {' '.join(f'results/{study.folder.name}' for study in studies)}",
        "started_at": max((origins.started_at(study) for study in studies), default="") or None,
        "studies": [
            {"name": name, "trials": [trial.id for trial in study.trials]}
            for name, study in zip(_names(studies), studies, strict=True)
        ],
    }


def _names(studies: Sequence[Evidence]) -> list[str]:
    """The studies' names; where two share one, with the folder that tells them apart."""
    names = [str(study.study.get("name") or study.folder.name) for study in studies]
    folders = [study.folder.name for study in studies]
    parents = [f"{study.folder.parent.name}/{study.folder.name}" for study in studies]
    for better in (folders, parents):
        names = [better[i] if names.count(name) > 1 else name for i, name in enumerate(names)]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _section(name: str, title: str, *blocks: Block | None) -> Section | None:
    kept = tuple(block for block in blocks if block is not None)
    return Section(id=name, title=title, blocks=kept) if kept else None


def _verdict(analyses: Sequence[Analysis], names: Sequence[str]) -> tuple[str, ...]:
    """One sentence a study, its own verdict's first."""
    found = []
    for analysis, name in zip(analyses, names, strict=True):
        first = bandwidth.finding(analysis) or words.verdict(analysis)[0]
        found.append(f"*{name}*: {sentence(first)}")
    return tuple(found)


def _findings_table(analyses: Sequence[Analysis], names: Sequence[str]) -> Table:
    rows = [
        {"study": name, "question": str(a.evidence.study.get("question") or ""), "found": " ".join(words.verdict(a))}
        for a, name in zip(analyses, names, strict=True)
    ]
    return Table(
        id="findings",
        title="Questions and verdicts",
        caption="As each study's own report gives them.",
        frame=pd.DataFrame(rows),
        columns=tuple(Column(key=key, heading=key, show=text, align="left") for key in ("study", "question", "found")),
    )


def _setting(evidence: Evidence) -> str:
    """What must be the same for losses to be comparable, as six hex digits; empty without a finished trial."""
    trial = next(iter(evidence.done), None)
    if trial is None:
        return ""
    parts = {
        "model": trial.config.get("model"), "budget_tokens": trial.config.get("budget_tokens"),
        "data": trial.part("data").get("digest"), "metric": evidence.metric,
        "sequences": (trial.config.get("data") or {}).get("global_batch_sequences"),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:6]


def _warning(studies: Sequence[Evidence], names: Sequence[str]) -> Note | None:
    groups: dict[str, list[str]] = {}
    for study, name in zip(studies, names, strict=True):
        groups.setdefault(_setting(study), []).append(name)
    items = [f"setting {key}: {join(members)}" for key, members in groups.items() if key]
    if empty := groups.get(""):
        items.append(f"no finished trial: {join(empty)}")
    codes = {code for study in studies for code in origins.codes(study)}
    if len(codes) > 1:
        items.append(f"the trials were run by {len(codes)} versions of the code")
    if len(groups) < 2 and len(codes) < 2:
        return None
    lead = (
        "Model, data, batch or budget differ between these studies, so their losses are no measure of one another; each"
        " arm is compared with its own study's reference."
        if len(groups) > 1
        else "The studies share model, data and budget."
    )
    return Note(text=lead, items=tuple(items))


def _forest(analyses: Sequence[Analysis], names: Sequence[str]) -> Figure | None:
    """All differences from the own reference in one forest plot."""
    rows = [
        forest.Row(label=f"{name}: {row_label(a.evidence, c.cell)}", comparison=c, style=styles[c.cell.series])
        for a, name in zip(analyses, names, strict=True)
        for styles in [ink.styles(a.evidence)]
        for c in a.comparisons
    ]
    metrics = {(a.evidence.metric, a.evidence.smaller_is_better) for a in analyses if a.comparisons}
    if not rows or len(rows) > MOST_ROWS or len(metrics) != 1:
        return None
    metric, smaller = metrics.pop()
    tolerances = {a.evidence.tolerance for a in analyses if a.comparisons}
    tolerance = tolerances.pop() if len(tolerances) == 1 else None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("across", {"axes.grid.axis": "x"}):
            return forest.draw_rows(rows, layout, metric_name(metric), tolerance, smaller=smaller)

    data = [
        {"row": row.label, "n": row.comparison.n, "mean": row.comparison.interval.mean,
         "low": row.comparison.interval.low, "high": row.comparison.interval.high}
        for row in rows
    ]  # fmt: skip
    told = [f"{row.label} {percent(row.comparison.interval.mean, signed=True)}" for row in rows]
    edge = "" if tolerance is None else f" Dashed: the tolerance of {percent(tolerance, digits=0)}."
    return Figure(
        id="across",
        title=f"Difference of the {metric_name(metric)} from each study's own reference, paired by seed",
        caption=f"Markers: mean over seeds; bars: 95 % t interval where there are several seeds.{edge} An arrow marks"
        " what lies beyond the frame.",
        alt=f"Forest plot over {count(len(analyses), 'study', 'studies')}. {'; '.join(told)}.",
        data=pd.DataFrame(data),
        draw=draw,
    )


def _arms_table(analyses: Sequence[Analysis], names: Sequence[str]) -> Table | None:
    rows = [
        _arm_row(analysis, name, cell)
        for analysis, name in zip(analyses, names, strict=True)
        for cell in analysis.evidence.cells
        if cell.done
    ]
    if not rows:
        return None
    wire = scale_for([row["uplink_gb"] for row in rows])
    memory = scale_for([row["trained_state_gb"] for row in rows])
    return Table(
        id="arms",
        title="Loss and cost of every arm",
        caption="Means over n seeds. Difference: from the own study's reference, paired by seed, positive is worse."
        " Setting: a digest of model, data, batch and budget; losses are comparable within one setting alone.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="study", heading="study", show=text, align="left"),
            Column(key="arm", heading="arm", show=text, align="left"),
            Column(key="x", heading="at", show=text, align="left"),
            Column(key="n", heading="n", show=integer),
            Column(key="mean", heading="primary metric", show=loss),
            Column(key="difference", heading="difference", show=lambda v: percent(v, signed=True, digits=2)),
            Column(key="interval", heading="95 % interval", show=text),
            Column(key="uplink_gb", heading=f"uplink ({wire.unit})", show=wire.show),
            Column(key="trained_state_gb", heading=f"trained state ({memory.unit})", show=memory.show),
            Column(key="tokens_per_s", heading="tokens/s", show=integer),
            Column(key="setting", heading="setting", show=text, align="left"),
        ),
        sortable=True,
    )


def _arm_row(analysis: Analysis, name: str, cell: Cell) -> dict[str, Any]:
    evidence = analysis.evidence
    comparison = next((c for c in analysis.comparisons if c.cell is cell), None)
    at = "" if cell.x is None else f"{axis_symbol(evidence.x_path or '')} = {axis_value(cell.x)}"
    return {
        "study": name,
        "arm": cell.series.label,
        "x": at,
        "n": len(cell.values(evidence.metric)),
        "mean": seed_interval(cell, evidence.metric)[0],
        "difference": comparison.interval.mean if comparison else None,
        "interval": percent_interval(comparison.interval) if comparison else "",
        "uplink_gb": cell_mean(cell, "comm/uplink_gb"),
        "trained_state_gb": cell_mean(cell, "mem/trained_state_gb"),
        "tokens_per_s": cell_mean(cell, "perf/tokens_per_s"),
        "setting": _setting(evidence),
    }


def _shared_table(studies: Sequence[Evidence], names: Sequence[str]) -> Table | None:
    """Trials of one identity that two studies both finished: the same run at two times, or by two versions of code."""
    rows = []
    for later in range(1, len(studies)):
        for earlier in range(later):
            pairs = _pairs(studies[earlier], studies[later])
            if not pairs:
                continue
            metric = studies[later].metric
            metrics = [(a.metrics, b.metrics) for a, b in pairs]
            both = [(one[metric], other[metric]) for one, other in metrics if metric in one and metric in other]
            speeds = [
                b.metrics["perf/tokens_per_s"] / a.metrics["perf/tokens_per_s"]
                for a, b in pairs
                if a.metrics.get("perf/tokens_per_s") and "perf/tokens_per_s" in b.metrics
            ]
            rows.append(
                {
                    "first": names[earlier], "second": names[later], "trials": len(pairs),
                    "same": sum(a == b for a, b in both),
                    "largest": max((abs(b - a) / abs(a) for a, b in both if a), default=None),
                    "speed": f"{significant(min(speeds))} to {significant(max(speeds))}" if speeds else "",
                }
            )  # fmt: skip
    if not rows:
        return None
    return Table(
        id="shared",
        title="Trials of the same identity",
        caption="Trials whose resolved settings and data are the same in both. Equal: the primary metric has the same"
        " bits. Speed: tokens per second of the second over the first, smallest to largest.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="first", heading="first", show=text, align="left"),
            Column(key="second", heading="second", show=text, align="left"),
            Column(key="trials", heading="trials", show=integer),
            Column(key="same", heading="equal", show=integer),
            Column(key="largest", heading="largest difference", show=lambda v: percent(v, digits=3)),
            Column(key="speed", heading="speed", show=text),
        ),
    )


def _pairs(one: Evidence, other: Evidence) -> list[tuple[Trial, Trial]]:
    by_id = {trial.id: trial for trial in one.done}
    return [(by_id[trial.id], trial) for trial in other.done if trial.id in by_id]


def _origin_table(studies: Sequence[Evidence], names: Sequence[str], report_dir: Path) -> Table:
    rows = []
    for study, name in zip(studies, names, strict=True):
        missing = len(study.trials) - len(study.done)
        neighbour = report_dir.parent / study.folder.name / "index.html"
        rows.append(
            {
                "study": name, "report": f"../{study.folder.name}/index.html" if neighbour.is_file() else "",
                "command": str(study.study.get("command") or ""), "started": origins.started_at(study)[:10],
                "trials": f"{len(study.done)} of {len(study.trials)}" + (f", {missing} without" if missing else ""),
                "codes": ", ".join(code[:12] for code in origins.codes(study)),
            }
        )  # fmt: skip
    return Table(
        id="origin",
        title="Studies",
        caption="The name links to the study's own report where one lies beside this one; that report traces every"
        " number to event files.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="study", heading="study", show=text, align="left", link="report"),
            Column(key="started", heading="started", show=text, align="left"),
            Column(key="trials", heading="finished", show=text, align="left"),
            Column(key="codes", heading="code", show=text, align="left"),
            Column(key="command", heading="command", show=text, align="left"),
        ),
    )
