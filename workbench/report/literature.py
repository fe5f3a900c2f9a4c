"""Published values beside the study's own: the same quantity, where each comes from, and what differs.

The published numbers are those of the SPES paper (arXiv 2602.11543) and its public summaries, and never part of a mean.
Where models and machines differ in size, quantities are ratios, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from workbench.report.document import Column, Table
from workbench.report.evidence import Cell, Evidence, Series
from workbench.report.findings import Analysis, cell_mean, same_x
from workbench.report.printing import axis_value, integer, percent
from workbench.report.tables import text
from workbench.statistics import mean
from workbench.trees import lookup

PAPER = "arXiv 2602.11543"


def literature_table(analysis: Analysis) -> Table | None:
    """One row for every published value that the study has a counterpart of; None without any."""
    found = [row for build in _COUNTERPARTS for row in build(analysis)]
    if not found:
        return None
    return Table(
        id="literature",
        title="Published values and ours",
        caption=f"Published values: {PAPER} and its public summaries. Ours: computed from this study's trials. They are"
        " set side by side, not tested against one another.",
        frame=pd.DataFrame(found),
        columns=tuple(
            Column(key=key, heading=heading, show=text, align="left")
            for key, heading in (
                ("quantity", "quantity"), ("published", "published"), ("ours", "here"), ("differs", "what differs"),
            )
        ),
    )  # fmt: skip


def _row(quantity: str, published: str, ours: str, differs: str) -> dict[str, str]:
    return {"quantity": quantity, "published": published, "ours": ours, "differs": differs, "source": PAPER}


def _of_method(evidence: Evidence, method: str) -> list[Series]:
    return [series for series in evidence.series if series.method == method and _plain(evidence, series)]


def _plain(evidence: Evidence, series: Series) -> bool:
    """Whether its trials send float32 and no node is made to misbehave, as in the published runs."""
    configs = [trial.config for cell in evidence.cells_of(series) for trial in cell.done]
    return all(
        (lookup(config, "wire.dtype") or "float32") == "float32" and (lookup(config, "faults.kind") or "none") == "none"
        for config in configs
    )


def _scale(evidence: Evidence) -> str:
    """ "4 nodes, 16 experts, 2 layers of width 64 on a CPU": what our runs are."""
    trial = next((t for t in evidence.done), None)
    if trial is None:
        return ""
    model, nodes = trial.config.get("model") or {}, trial.config.get("nodes")
    hardware = trial.part("provenance").get("hardware") or {}
    device = "GPU" if hardware.get("gpus") else "CPU"
    size = f"{model.get('num_layers')} layers of width {model.get('d_model')} and {model.get('num_experts')} experts"
    return f"{nodes} nodes, {size} on a {device}"


def _pair_ratios(evidence: Evidence, metric: str) -> list[float]:
    """SPES over full-model averaging of a metric, at every x that both have."""
    ratios = []
    for ours in _of_method(evidence, "spes"):
        for theirs in _of_method(evidence, "dilico")[:1]:
            for cell in evidence.cells_of(ours):
                top, bottom = cell_mean(cell, metric), cell_mean(same_x(evidence, theirs, cell.x), metric)
                ratios += [top / bottom] if top is not None and bottom else []
    return ratios


def _span(values: list[float], show: Callable[[float], str]) -> str:
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def _uplink(analysis: Analysis) -> list[dict[str, str]]:
    evidence = analysis.evidence
    ratios = _pair_ratios(evidence, "comm/uplink_gb")
    if not ratios:
        return []
    return [
        _row(
            "uplink of SPES over full-model averaging, float32",
            f"{percent(9.8 / 28.6, digits=0)} (9.8 of 28.6 GB per node and round; 7B, 4 nodes)",
            _span(ratios, lambda value: percent(value, digits=0)),
            f"shared and expert parameters are in another proportion: here {_scale(evidence)}",
        )
    ]


def _memory(analysis: Analysis) -> list[dict[str, str]]:
    evidence = analysis.evidence
    state, whole = _pair_ratios(evidence, "mem/trained_state_gb"), _pair_ratios(evidence, "mem/rss_peak_gb")
    if not state:
        return []
    ours = f"{_span(state, lambda v: percent(v, digits=0))} of weights, gradients and moments"
    if whole:
        ours += f"; {_span(whole, lambda v: percent(v, digits=0))} of the process's peak"
    return [
        _row(
            "memory of a SPES node over full-model training",
            f"{percent(35 / 55, digits=0)} to {percent(40 / 55, digits=0)} (35–40 against about 55 GB per GPU; 2.1B,"
            " 16 nodes, 0.7B trained on each)",
            ours,
            f"theirs is the peak of a GPU with activations; here {_scale(evidence)}",
        )
    ]


def _speed(analysis: Analysis) -> list[dict[str, str]]:
    evidence = analysis.evidence
    ratios = _pair_ratios(evidence, "perf/tokens_per_s")
    if not ratios:
        return []
    return [
        _row(
            "speed of SPES over full-model averaging",
            f"{percent(3.67 / 3.79, digits=0)} (3.67k against 3.79k tokens/s/GPU at H = 50)",
            _span(ratios, lambda value: percent(value, digits=0)),
            f"nodes share one machine's cores and a loopback; here {_scale(evidence)}",
        )
    ]


def _interval(analysis: Analysis) -> list[dict[str, str]]:
    evidence = analysis.evidence
    if evidence.x_path != "sync.interval_steps":
        return []
    rows = []
    for series in _of_method(evidence, "spes"):
        if series not in analysis.spots:
            continue
        spot = analysis.spots[series]
        at = "no sweet spot identified" if spot is None else f"sweet spot H = {axis_value(spot.x)}"
        steps = max((point["step"] for t in evidence.done for point in t.part("curves").get("train") or []), default=0)
        rows.append(
            _row(
                "H from which quality falls",
                "200 to 400 steps between rounds",
                f"{at} at {percent(evidence.tolerance, digits=0)} tolerance; largest H tested"
                f" {axis_value(evidence.x_values[-1])}",
                f"a run here has {integer(steps)} steps, so that H = 200 would leave it few rounds",
            )
        )
    return rows


def _merging(analysis: Analysis) -> list[dict[str, str]]:
    """Arms that merge against the arm that does not, where nothing but the merge differs in method."""
    evidence = analysis.evidence
    merging = [s for s in _of_method(evidence, "spes") if _merges(evidence, s) is True]
    reference = evidence.reference
    if reference is None or reference.method != "spes" or _merges(evidence, reference) is not False or not merging:
        return []
    gaps = [
        f"{percent(c.interval.mean, signed=True, digits=2)} ({c.cell.series.label}{_at(c.cell, evidence)})"
        for c in analysis.comparisons
        if c.cell.series in merging
    ]
    return (
        [
            _row(
                "merge warm-up against none",
                "average score 51.3 against 50.5 (K = 4, α = 0.1, every 500 steps for 12,500 steps)",
                f"loss {', '.join(gaps)}; positive is worse",
                f"theirs are downstream scores after long training, ours a validation loss; {_scale(evidence)}",
            )
        ]
        if gaps
        else []
    )


def _at(cell: Cell, evidence: Evidence) -> str:
    return "" if cell.x is None else f", {axis_value(cell.x)}"


def _merges(evidence: Evidence, series: Series) -> bool | None:
    flags = {lookup(t.config, "merge.enabled") for cell in evidence.cells_of(series) for t in cell.done}
    return bool(flags.pop()) if len(flags) == 1 else None


def _nodes(analysis: Analysis) -> list[dict[str, str]]:
    """Trained share of the model by number of nodes: the same arithmetic as the published node counts."""
    evidence = analysis.evidence
    if evidence.x_path != "nodes":
        return []
    shares = []
    for series in _of_method(evidence, "spes"):
        for cell in evidence.cells_of(series):
            if cell.x is not None and (share := _trained_share(cell)) is not None:
                shares.append(f"{percent(share, digits=0)} on {cell.x} nodes")
    if not shares:
        return []
    return [
        _row(
            "share of the parameters that a node trains",
            f"{percent(0.7 / 2.1, digits=0)} on 16 nodes (0.7 of 2.1B); by arithmetic {percent(2.5 / 7.33, digits=0)}"
            " on 4 nodes (7B)",
            ", ".join(shares),
            f"shared parameters weigh more in a small model; here {_scale(evidence)}",
        )
    ]


def _trained_share(cell: Cell) -> float | None:
    """Bytes of gradients over bytes of weights, both in float32: the share that is trained."""
    values = []
    for trial in cell.done:
        nodes: list[dict[str, Any]] = trial.part("memory").get("predicted") or []
        frozen = lookup(trial.config, "frozen.dtype")
        if nodes and frozen in (None, "float32"):
            values.append(mean([node["gradients_bytes"] / node["weights_bytes"] for node in nodes]))
    return mean(values) if values else None


_COUNTERPARTS = (_memory, _uplink, _speed, _interval, _merging, _nodes)
