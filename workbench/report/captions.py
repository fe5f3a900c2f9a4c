"""What stands under a figure, and what a screen reader says instead of it; both composed from the data."""

from __future__ import annotations

from workbench.report.evidence import Evidence
from workbench.report.findings import Analysis, cell_mean, reference_level
from workbench.report.ink import without_outliers
from workbench.report.printing import (
    axis_symbol,
    axis_value,
    count,
    join,
    loss,
    metric_name,
    percent,
    sample_size,
    setting,
    significant,
)

GRADIENTS_INSIDE = "In {arms} gradients are exchanged inside the step, which is not separable from computing"
"""What is said of arms whose exchange no clock can tell from compute."""


def sample(evidence: Evidence) -> str:
    """What a point is: n and the kind of interval."""
    sizes = sorted({len(cell.values(evidence.metric)) for cell in evidence.cells} - {0})
    if not sizes:
        return "No finished trials."
    if sizes == [1]:
        return f"One seed per point ({sample_size(1)}), so no interval can be given."
    n = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"Markers: mean over {sample_size(n)} seeds; bars: 95 % t interval of the mean; small dots: the seeds."


def loss_against_x(analysis: Analysis) -> str:
    """Caption of the hero figure."""
    evidence = analysis.evidence
    parts = [sample(evidence)]
    if evidence.reference is not None:
        band = " with its interval as a band" if len(evidence.seeds) > 1 else ""
        parts.append(f"Level line: the reference {evidence.reference.arm}{band}; dashed: {tolerance_line(evidence)}.")
    if analysis.spots:
        rule = "point" if len(evidence.seeds) == 1 else "upper bound of the paired difference"
        symbol = axis_symbol(evidence.x_path or "")
        parts.append(f"Ring: sweet spot, the largest {symbol} whose {rule} stays within the tolerance.")
    parts.append("An arrow with its value marks a mean beyond the frame." if _far_out(evidence) else "")
    if (entropy := unigram_entropy(evidence)) is not None and evidence.metric == "eval/loss":
        parts.append(
            f"Trivial baseline, off the scale: the unigram entropy of the corpus, {loss(entropy)} nats per token,"
            " the loss of a model that knows only how often each token occurs."
        )
    return " ".join(part for part in parts if part)


def _far_out(evidence: Evidence) -> bool:
    means = [value for cell in evidence.cells if (value := cell_mean(cell, evidence.metric)) is not None]
    return bool(means) and without_outliers(means) != (min(means), max(means))


def tolerance_line(evidence: Evidence) -> str:
    """The line that loss may not cross."""
    sign = "+" if evidence.smaller_is_better else "−"
    return f"the reference {sign}{percent(evidence.tolerance, digits=0)} (tolerance)"


def unigram_entropy(evidence: Evidence) -> float | None:
    """The corpus's unigram entropy in nats; None when no trial recorded it or trials differ in it.

    None also for several domains: it is theirs by size, the validation loss that of as many sequences of each.
    """
    if any(trial.part("data").get("domains") for trial in evidence.done):
        return None
    values = {trial.part("data").get("unigram_entropy_nats") for trial in evidence.done} - {None}
    return float(values.pop()) if len(values) == 1 else None


def uplink(evidence: Evidence) -> str:
    """Caption of the bytes figure."""
    text = (
        "Markers: counted at the transport, payload and framing, mean over nodes and seeds; lines: predicted from the"
        " model's shape, the partition and the type on the wire."
    )
    level = [s for s in evidence.series if any(c.x is None for c in evidence.cells_of(s)) and evidence.x_values]
    if plain := [series.label for series in level if series not in evidence.gradient_series]:
        text += f" Level line: {join(plain)}."
    if rings := [series.label for series in level if series in evidence.gradient_series]:
        text += (
            f" Level line: {join(rings)}, which exchanges gradients at every step (bytes by the formula of the ring"
            " all-reduce where the transport is not ours)."
        )
    return text + " Logarithmic scale."


def pareto(evidence: Evidence) -> str:
    """Caption of the Pareto figure."""
    symbol = axis_symbol(evidence.x_path) if evidence.x_path else ""
    what = "Words" if any(isinstance(value, str) for value in evidence.x_values) else "Numbers"
    labels = f" {what}: {symbol}." if evidence.x_values else ""
    better = "Lower left" if evidence.smaller_is_better else "Upper left"
    edge = f" Dashed: {tolerance_line(evidence)}." if reference_level(evidence) is not None else ""
    if edge and len(evidence.seeds) > 1:
        edge += " A seed moves all arms alike: the differences within seeds, under *Result*, decide."
    return f"{better} is better.{labels}{edge} {sample(evidence)} The horizontal axis is logarithmic."


def curves(evidence: Evidence) -> str:
    """Caption of the learning curves."""
    values = [value for value in evidence.x_values if isinstance(value, str)]
    shade = f" Within an arm, larger {axis_symbol(evidence.x_path)} is fainter." if evidence.x_path else ""
    if len(values) > 1:
        shade = f" Within an arm, lines get fainter from {axis_value(values[0])} to {axis_value(values[-1])}."
    mean = " Lines: mean over seeds at the same step." if len(evidence.seeds) > 1 else ""
    return (
        f"Upper row: validation loss of the global model; lower row: training loss.{mean}{shade} Bytes are per node and"
        " on a logarithmic axis. The first tenth of training lies above the frame."
    )


def memory(evidence: Evidence) -> str:
    """Caption of the memory figure."""
    text = (
        "Left: bytes of the largest node by part, each at its peak and measured on its own; diamonds: the predicted"
        " total; lines at 24, 48 and 80 GB where bars come near. Right: peak resident memory of the process, which also"
        " holds the interpreter, the libraries and the data."
    )
    if evidence.gradient_series:
        arms = join([series.label for series in evidence.gradient_series])
        text += (
            f" In {arms} a node holds shards; while it computes it also gathers one unit (a layer) at a time, which"
            " the parts do not count."
        )
    return text


def throughput(evidence: Evidence) -> str:
    """Caption of the throughput figure."""
    text = (
        "Left: global training tokens per second with synchronization (filled) and counting compute time only (hollow)."
        " Right: shares of a node's time without validation, mean over nodes and seeds."
    )
    if evidence.gradient_series:
        arms = join([series.label for series in evidence.gradient_series])
        text += f" {GRADIENTS_INSIDE.format(arms=arms)}: one piece for both, and no hollow marker."
    return text


def load(evidence: Evidence, top: float) -> str:
    """Caption of the expert-load figure."""
    return (
        "Share of the tokens that each expert received since the previous log line, as a multiple of the uniform share"
        f" (1 = balanced; darkest = {significant(top, 2)}), at the end of training. Title: mean over layers of largest"
        " over mean load."
    )


def alt_by_x(evidence: Evidence, metric: str, what: str) -> str:
    """A figure against x in words: every series with its means."""
    lines = []
    for series in evidence.series:
        cells = [(cell, cell_mean(cell, metric)) for cell in evidence.cells_of(series)]
        points = [
            f"{significant(value, 4)}" + (f" at {setting(evidence.x_path, cell.x)}" if cell.x is not None else "")
            for cell, value in cells
            if value is not None
        ]
        lines.append(f"{series.label}: {', '.join(points) or 'no finished trial'}")
    return f"{what}. {'; '.join(lines)}."


def alt_pareto(evidence: Evidence) -> str:
    """The Pareto figure in words."""
    lines = []
    for series in evidence.series:
        points = [
            f"{significant(value, 4)} for {significant(sent)} GB"
            for cell in evidence.cells_of(series)
            if (value := cell_mean(cell, evidence.metric)) is not None and (sent := cell_mean(cell, "comm/uplink_gb"))
        ]
        if points:
            lines.append(f"{series.label}: {', '.join(points)}")
    return f"{metric_name(evidence.metric).capitalize()} against uplink per node. {'; '.join(lines)}."


def alt_curves(evidence: Evidence) -> str:
    """The learning curves in words: how many and where they end."""
    ends = [
        f"{series.label} {significant(min(values), 4)} to {significant(max(values), 4)}"
        for series in evidence.series
        if (values := [v for cell in evidence.cells_of(series) for v in cell.values(evidence.metric).values()])
    ]
    return f"Learning curves of {count(len(evidence.done), 'trial')}. Final losses: {'; '.join(ends)}."
