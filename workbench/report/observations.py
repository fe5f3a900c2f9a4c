"""What was trained, and the sentences under a heading that say what its figures show; composed from the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.report.captions import GRADIENTS_INSIDE, unigram_entropy
from workbench.report.evidence import Evidence, Series
from workbench.report.findings import Analysis, baseline, cell_mean, ratio, row_label, same_x, subject
from workbench.report.printing import (
    axis_value,
    count,
    integer,
    join,
    loss,
    metric_name,
    percent,
    scale_for,
    sentence,
    setting,
    significant,
)
from workbench.statistics import mean
from workbench.trees import lookup

_LARGEST_SHARE = 100.0
"""A node that is alone receives only what answers its own messages: no share of that tells anything."""


def communication(analysis: Analysis) -> str:
    """Bytes of the subject against the full-model baseline and against the reference."""
    evidence, ours = analysis.evidence, subject(analysis.evidence)
    parts = []
    for theirs in dict.fromkeys([baseline(evidence), evidence.reference]):
        if theirs is None or ours is None or theirs == ours:
            continue
        ways = {"sends": "uplink", "receives": "downlink"}
        shares = {verb: _share_range(evidence, ours, theirs, f"comm/{way}_gb") for verb, way in ways.items()}
        if told := [f"{verb} {share}" for verb, share in shares.items() if share]:
            parts.append(f"against {theirs.label}, a node of {ours.label} {' and '.join(told)}")
    text = "; ".join(parts)
    return f"{sentence(text)} of the bytes." if text else ""


def _share_range(evidence: Evidence, ours: Series, theirs: Series, metric: str) -> str:
    """ "59 %", or "0.2 % to 4.0 %" where the share depends on x; "" where theirs is next to nothing."""
    shares = [
        share
        for cell in evidence.cells_of(ours)
        if (share := ratio(cell, same_x(evidence, theirs, cell.x), metric)) is not None
    ]
    if not shares or max(shares) > _LARGEST_SHARE:
        return ""
    low, high = (percent(share, digits=0 if share >= 0.1 else 1) for share in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def memory(analysis: Analysis) -> str:
    """Trained state per series, smallest first."""
    evidence = analysis.evidence
    held = {
        series: mean(values)
        for series in evidence.series
        if (values := [v for c in evidence.cells_of(series) for v in c.values("mem/trained_state_gb").values()])
    }
    if not held:
        return ""
    unit = scale_for(held.values())
    parts = [
        f"{unit.show(amount)} {unit.unit} in {series.label}"
        for series, amount in sorted(held.items(), key=lambda item: item[1])
    ]
    return f"Weights, gradients and optimizer moments of the largest node take {join(parts)}."


def throughput(analysis: Analysis) -> str:
    """What synchronization costs in speed, for each series that has rounds at its ends; of the others, that no clock
    can tell."""
    evidence = analysis.evidence
    parts = []
    for series in evidence.series:
        costs = [
            (cell, 1 - share)
            for cell in evidence.cells_of(series)
            if not cell.exchanges_gradients
            and (
                share := _ratio_of_means(
                    cell_mean(cell, "perf/tokens_per_s"), cell_mean(cell, "perf/tokens_per_s_compute")
                )
            )
        ]
        if not costs:
            continue
        (first, high), (last, low) = costs[0], costs[-1]
        span = percent(high)
        if first != last:
            span += f" ({setting(evidence.x_path, first.x)}) to {percent(low)} ({setting(evidence.x_path, last.x)})"
        parts.append(f"{span} in {series.label}")
    lead = "Synchronization and data loading cost, of the speed of computing alone,"
    sentences = [f"{lead} {'; '.join(parts)}."] if parts else []
    if evidence.gradient_series:
        arms = join([series.label for series in evidence.gradient_series])
        sentences.append(f"{GRADIENTS_INSIDE.format(arms=arms)}, and no cost of it is given.")
    return " ".join(sentences)


def _ratio_of_means(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None


def result(analysis: Analysis) -> str:
    """The reference's level and the range of the others, for a reader who skips the figure."""
    evidence = analysis.evidence
    level = cell_mean(evidence.cells_of(evidence.reference)[0], evidence.metric) if evidence.reference else None
    if level is None or evidence.reference is None:
        return ""
    parts = []
    for series in evidence.series:
        values = [v for cell in evidence.cells_of(series) if (v := cell_mean(cell, evidence.metric)) is not None]
        if series != evidence.reference and values:
            low, high = significant(min(values), 4), significant(max(values), 4)
            parts.append(f"{series.label} {f'between {low} and {high}' if low != high else f'at {low}'}")
    others = f"; {'; '.join(parts)}" if parts else ""
    lead = f"{sentence(evidence.reference.label)} ends at a {metric_name(evidence.metric)} of {significant(level, 4)}"
    return f"{lead}{others}."


def _corpus(data: Mapping[str, Any]) -> str:
    """What the run read, in words."""
    if domains := data.get("domains"):
        return f"a mixture of {join([f'*{name}*' for name in domains])}"
    return f"*{axis_value(data.get('corpus', 'unknown'))}*"


def setup(evidence: Evidence) -> str:
    """What was trained on what, from the first finished trial's configuration."""
    trial = next(iter(evidence.done), next((t for t in evidence.trials if t.config), None))
    if trial is None:
        return ""
    config = trial.config
    model, data, nodes = config.get("model") or {}, config.get("data") or {}, _span(evidence, "nodes")
    batch, length = (_span(evidence, f"data.{name}") for name in ("global_batch_sequences", "sequence_length"))
    parts = [
        f"Every trial trains a Mixture-of-Experts decoder of {_shape(model)}",
        f"on {_span(evidence, 'budget_tokens')} tokens of {_corpus(data)}",
        f"({batch} sequences of {length} tokens per step)",
        f"over {nodes} {'node' if nodes == '1' else 'nodes'}",
    ]
    text = " ".join(part for part in parts if part) + "."
    arms = join([f"*{arm}*" for arm in evidence.arms])
    text += f" Arms: {arms}; {count(len(evidence.seeds), 'seed')}, the same for all arms, so that runs pair."
    return text + _learned(evidence)


def _span(evidence: Evidence, path: str) -> str:
    """A setting over all trials that have it: its value, or its least and greatest ("2 to 8")."""
    values = {value for trial in evidence.trials if isinstance(value := lookup(trial.config, path, None), int)}
    ends = [integer(value) for value in (min(values), max(values))] if values else ["?", "?"]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _shape(model: dict[str, Any]) -> str:
    return (
        f"{count(int(model.get('num_layers') or 0), 'layer')}, width {model.get('d_model')} and"
        f" {model.get('num_experts')} experts per layer (top-{model.get('top_k')})"
    )


def _learned(evidence: Evidence) -> str:
    """Whether every arm got below the unigram entropy."""
    entropy = unigram_entropy(evidence)
    if entropy is None or evidence.metric != "eval/loss":
        return ""
    if not all(cell.values("eval/loss") for cell in evidence.cells):
        return ""  # a cell without a loss has learned nothing that could be told
    above = [
        row_label(evidence, cell)
        for cell in evidence.cells
        if any(value >= entropy for value in cell.values("eval/loss").values())
    ]
    baseline_words = f"the unigram entropy of the corpus ({loss(entropy)} nats per token)"
    if above:
        return f" These did not get below {baseline_words}, so they learned nothing of use: {join(above)}."
    return f" Every finished trial ended below {baseline_words}."
