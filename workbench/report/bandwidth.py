"""The figure of time against bandwidth, in studies whose x is the bandwidth of the nodes' links."""

from __future__ import annotations

import matplotlib.figure
import pandas as pd

from workbench.report import captions, ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Evidence
from workbench.report.figures import axis_of, frame_x
from workbench.report.findings import Analysis, cell_mean, ratio
from workbench.report.printing import axis_symbol, axis_value, percent, sample_size

_TIME, _PREDICTED = "perf/round_time_s", "perf/round_time_predicted_s"


def bandwidth_figure(analysis: Analysis) -> Figure | None:
    """A node's time in one round against bandwidth: measured as markers over what the bytes alone need."""
    evidence = analysis.evidence
    rows = [
        {
            "arm": cell.series.label, "x": cell.x, "seed": trial.seed,
            "round_time_s": trial.metrics.get(_TIME), "round_time_predicted_s": trial.metrics.get(_PREDICTED),
        }
        for cell in evidence.cells for trial in cell.done if cell.x is not None and _TIME in trial.metrics
    ]  # fmt: skip
    if not rows or evidence.x_path not in ("link.uplink_mbps", "link.downlink_mbps"):
        return None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("bandwidth"):
            return _draw(evidence, layout)

    return Figure(
        id="bandwidth",
        title=f"Time of one round against {axis_symbol(evidence.x_path)}",
        caption="Markers: measured on the nodes, mean over nodes, rounds and seeds, with encoding, waiting and the"
        " server's work. Lines: what the bytes alone need on such a link, by arithmetic. Logarithmic scales.",
        alt=captions.alt_by_x(evidence, _TIME, "Seconds of one round"),
        data=pd.DataFrame(rows),
        draw=draw,
    )


FREE = 0.05
"""Share of the speed of computing alone that exchange may cost and still be called free."""


def finding(analysis: Analysis) -> str:
    """From which bandwidth on an arm trains about as fast as the reference, and what the slowest link leaves of it."""
    evidence = analysis.evidence
    reference = evidence.reference
    if evidence.x_path not in ("link.uplink_mbps", "link.downlink_mbps") or reference is None:
        return ""
    parts = []
    for series in evidence.series:
        shares = [
            (cell.x, share)
            for cell in evidence.cells_of(series)
            if series != reference
            and (other := evidence.reference_cell(cell)) is not None
            and (share := ratio(cell, other, "perf/tokens_per_s")) is not None
        ]
        if not shares:
            continue
        enough = [x for index, (x, _) in enumerate(shares) if all(share >= 1 - FREE for _, share in shares[index:])]
        kept, slowest = percent(shares[0][1], digits=0), axis_value(shares[0][0])
        lead = f"{series.label} keeps {kept} of {reference.label}'s speed at {slowest}"
        ending = (
            f"and at least {percent(1 - FREE, digits=0)} from {axis_value(enough[0])} Mbit/s on"
            if enough
            else f"and {percent(shares[-1][1], digits=0)} at {axis_value(shares[-1][0])} Mbit/s, the fastest tested"
        )
        parts.append(f"{lead} {ending}")
    n = max((len(cell.done) for cell in evidence.cells), default=0)
    return f"{'; '.join(parts)} (speed in tokens per second, {sample_size(n)})." if parts else ""


def _draw(evidence: Evidence, layout: Layout) -> matplotlib.figure.Figure:
    axis, styles = axis_of(evidence), ink.styles(evidence)
    figure, grid = ink.new_figure(layout, 3.0)
    axes, labels, heights = grid[0, 0], [], []
    frame_x(axes, axis)
    axes.set_yscale("log")
    for series in evidence.series:
        points = [
            (place, measured_s, cell_mean(cell, _PREDICTED))
            for cell in evidence.cells_of(series)
            if (place := axis.position(cell)) is not None and (measured_s := cell_mean(cell, _TIME))
        ]
        if not points:
            continue
        colour = styles[series].colour
        needed = [(place, predicted_s) for place, _, predicted_s in points if predicted_s]
        axes.plot(*zip(*needed, strict=True), color=colour, linewidth=1.3, zorder=1.5)
        places, measured = [point[0] for point in points], [point[1] for point in points]
        axes.plot(places, measured, linestyle="none", **ink.marker_style(styles[series], 6.5))
        heights += [*measured, *(predicted_s for _, predicted_s in needed)]
        labels.append(ink.end_label(axes, measured[-1], series.label, colour))
    axes.set_ylim(min(heights) / 1.4, max(heights) * 1.4)
    ink.log_ticks(axes.yaxis, min(heights) / 1.4, max(heights) * 1.4)
    axes.set_ylabel("seconds per round")
    ink.spread(figure, labels)
    return figure
