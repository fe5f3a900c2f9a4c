"""Tables that let a reader check the study: equal budgets, settings that differ, predictions, provenance, sources."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from workbench.report.document import Column, Table
from workbench.report.evidence import Cell, Evidence, Trial
from workbench.report.findings import cell_mean
from workbench.report.printing import DASH, axis_value, integer, missing, percent
from workbench.report.resources import PARTS, largest_node
from workbench.report.tables import arm_columns, text
from workbench.statistics import mean
from workbench.trees import leaves, lookup

_SHOWN_LEAVES = 8
"""Settings of a matched group that are spelled out; the digest covers the rest."""


def budget_table(evidence: Evidence) -> Table | None:
    """What must be equal across arms, side by side, with whether it is."""
    trials = [trial for trial in evidence.trials if trial.config]
    if not trials:
        return None
    quantities: list[tuple[str, dict[str, str]]] = [
        ("training tokens", _by_arm(trials, _trained_tokens)),
        ("optimizer steps", _by_arm(trials, lambda t: _last_point(t, "step"))),
        ("data digest", _by_arm(trials, lambda t: str(t.part("data").get("digest", DASH))[:12])),
        ("seeds", _by_arm(trials, lambda t: str(t.seed))),
    ]
    quantities += [
        (path, _by_arm(trials, lambda trial, path=path: _describe(lookup(trial.config, path))))
        for path in evidence.study.get("equal") or []
    ]
    rows = [{"quantity": name, "value": _side_by_side(by_arm), "equal": _same(by_arm)} for name, by_arm in quantities]
    return Table(
        id="budget",
        title="Matched budget",
        caption="What the arms must share to be comparable, read from the trials themselves, not from the study file."
        " Of a group of settings the first are spelled out; the digest covers all of them.",
        frame=pd.DataFrame(rows).assign(differs=lambda frame: frame["equal"] == "differs"),
        columns=(
            Column(key="quantity", heading="quantity", show=text, align="left"),
            Column(key="value", heading="value in every arm", show=text, align="left"),
            Column(key="equal", heading="across arms", show=text, align="left"),
        ),
        mark="differs",
    )


def _side_by_side(by_arm: Mapping[str, str]) -> str:
    """The common value, or each arm's where they differ."""
    if _same(by_arm) != "differs":
        return next((value for value in by_arm.values() if value != DASH), DASH)
    return "; ".join(f"{arm}: {value}" for arm, value in by_arm.items())


def _by_arm(trials: Iterable[Trial], read: Any) -> dict[str, str]:
    """The values that the trials of each arm have, joined where they differ."""
    seen: dict[str, dict[str, None]] = {}
    for trial in trials:
        seen.setdefault(trial.arm, {})[str(read(trial))] = None
    return {arm: ", ".join(key for key in values if key != DASH or len(values) == 1) for arm, values in seen.items()}


def _same(by_arm: Mapping[str, str]) -> str:
    known = set(by_arm.values()) - {DASH}
    return "differs" if len(known) > 1 else ("equal" if known else "unknown")


def _trained_tokens(trial: Trial) -> str:
    return _last_point(trial, "tokens")


def _last_point(trial: Trial, column: str) -> str:
    points = [*(trial.part("curves").get("train") or []), *(trial.part("curves").get("validation") or [])]
    return integer(max(point[column] for point in points)) if points else DASH


def _describe(value: Any) -> str:
    if not isinstance(value, Mapping):
        return DASH if value is None else (integer(value) if isinstance(value, int) else axis_value(value))
    leaves = [f"{key} {axis_value(item)}" for key, item in value.items() if not isinstance(item, Mapping | list)]
    whole = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:6]
    more = ", …" if len(leaves) > _SHOWN_LEAVES else ""
    return f"{', '.join(leaves[:_SHOWN_LEAVES])}{more} (digest {whole})"


def settings_table(evidence: Evidence) -> Table | None:
    """Every setting in which the arms differ, apart from x and the seed."""
    by_arm: dict[str, dict[str, dict[str, None]]] = {}
    for trial in evidence.trials:
        for path, value in leaves(trial.config):
            if path not in ("seed", evidence.x_path):
                by_arm.setdefault(path, {}).setdefault(trial.arm, {})[axis_value(value)] = None
    arms = [arm for arm in evidence.arms if any(arm in values for values in by_arm.values())]
    rows = [
        {"setting": path, **{arm: ", ".join(values.get(arm, {DASH: None})) for arm in arms}}
        for path, values in by_arm.items()
        if len({tuple(values.get(arm, ())) for arm in arms}) > 1
    ]
    if not rows or len(arms) < 2:
        return None
    return Table(
        id="settings",
        title="Settings in which the arms differ",
        caption="All of them, apart from the swept setting and the seed; everything else is the same in every trial.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="setting", heading="setting", show=text, align="left"),
            *(Column(key=arm, heading=arm, show=text, align="left") for arm in arms),
        ),
    )


def prediction_bytes_table(evidence: Evidence) -> Table | None:
    """Payload bytes counted at the transport beside those predicted; they must agree exactly when all took part."""
    rows = [row for cell in evidence.cells if (row := _bytes_row(cell))]
    if not rows:
        return None
    agree = all(row["uplink_difference"] == 0 and row["downlink_difference"] == 0 for row in rows)
    verdict = "They agree to the byte." if agree else "Where the difference is not 0, one of the two is wrong."
    if not agree and any(_had_absent_nodes(trial) for trial in evidence.done):
        verdict = "Predictions assume that every node takes part in every round; some were absent."
    return Table(
        id="predicted_bytes",
        title="Payload bytes, counted and predicted",
        caption=f"Per node and whole run, mean over nodes and seeds, without framing. {verdict} Framing: its share of"
        " all bytes on the wire.",
        frame=pd.DataFrame(rows).assign(
            differs=lambda f: (f["uplink_difference"].fillna(0) != 0) | (f["downlink_difference"].fillna(0) != 0)
        ),
        columns=(
            *arm_columns(evidence),
            Column(key="rounds", heading="rounds", show=integer),
            Column(key="uplink_bytes", heading="uplink", show=integer),
            Column(key="uplink_difference", heading="− predicted", show=integer),
            Column(key="downlink_bytes", heading="downlink", show=integer),
            Column(key="downlink_difference", heading="− predicted", show=integer),
            Column(key="framing_fraction", heading="framing", show=lambda value: percent(value, digits=2)),
        ),
        mark="differs",
    )


def _bytes_row(cell: Cell) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": cell.series.label, "x": cell.x}
    counted = [trial for trial in cell.done if trial.part("rounds")]
    if not counted:
        return {}
    for way in ("uplink", "downlink"):
        measured = mean([_payload_bytes(trial, way) for trial in counted])
        predicted = cell_mean(cell, f"comm/{way}_predicted_gb")
        row[f"{way}_bytes"] = measured
        row[f"{way}_difference"] = None if predicted is None else round(measured - predicted * 1e9)
    row["rounds"] = mean([float(len(trial.part("rounds"))) for trial in counted])
    row["framing_fraction"] = cell_mean(cell, "comm/framing_fraction")
    return row


def _had_absent_nodes(trial: Trial) -> bool:
    return any(count is None for row in trial.part("rounds") for count in row["uplink_payload_bytes"])


def _payload_bytes(trial: Trial, way: str) -> float:
    """Payload of one node over all rounds, mean over nodes; an absent node (null) sent nothing."""
    return math.fsum(mean([count or 0 for count in row[f"{way}_payload_bytes"]]) for row in trial.part("rounds"))


def prediction_memory_table(evidence: Evidence) -> Table | None:
    """Measured memory of the largest node per part, with the deviation from the prediction."""
    rows = []
    for series in evidence.series:
        trials = [trial for cell in evidence.cells_of(series) for trial in cell.done]
        trial = next((t for t in trials if t.part("memory").get("measured")), None)
        if trial is None:
            continue
        measured, predicted = largest_node(trial, "measured"), largest_node(trial, "predicted")
        row: dict[str, Any] = {"arm": series.label}
        for part, key in PARTS.items():
            ours, theirs = measured.get(key), predicted.get(key)
            row[part] = ours
            row[f"{part} shown"] = _with_deviation(ours, theirs)
        rows.append(row)
    if not rows:
        return None
    return Table(
        id="predicted_memory",
        title="Memory of one node, measured and predicted",
        caption="MB of the largest node of one trial per arm, measured; in brackets the deviation from the prediction.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="arm", heading="arm", show=text, align="left"),
            *(Column(key=f"{part} shown", heading=part, show=text) for part in PARTS),
        ),
    )


def _with_deviation(measured: float | None, predicted: float | None) -> str:
    if measured is None or missing(measured):
        return DASH
    shown = f"{measured / 1e6:,.2f}"
    if predicted is None:
        return shown
    if not predicted:
        return f"{shown} (predicted 0)" if measured else "0"
    return f"{shown} ({percent(measured / predicted - 1, signed=True) if measured != predicted else 'exact'})"
