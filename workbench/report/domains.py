"""Validation by domain, where a corpus has several: a table, and a figure with a panel for each domain."""

from __future__ import annotations

from typing import Any

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from spes_core.config import from_dict
from spes_core.data.mixture import shares
from spes_core.errors import ConfigError
from workbench.metrics import domain_of
from workbench.report import ink
from workbench.report.document import Block, Column, Figure, Layout, Paragraph, Section, Table
from workbench.report.evidence import Cell, Evidence
from workbench.report.findings import Analysis, cell_mean, row_label, seed_interval
from workbench.report.load import shown_cells
from workbench.report.printing import DASH, integer, loss, minus, missing, percent, percent_interval, significant
from workbench.report.tables import arm_columns, text
from workbench.statistics import mean, paired_differences, t_interval


def section(analysis: Analysis) -> Section | None:
    """The section of a study whose trials were validated on several domains."""
    names = domains_of(analysis.evidence)
    if len(names) < 2:
        return None
    blocks: list[Block | None] = [
        Paragraph(text=_introduction(names)), domains_figure(analysis), domains_table(analysis.evidence),
    ]  # fmt: skip
    return Section(id="domains", title="Domains", blocks=tuple(block for block in blocks if block is not None))


def domains_of(evidence: Evidence) -> list[str]:
    """Every domain that finished trials were validated on, in the order of the results."""
    found = (domain_of(metric) for trial in evidence.done for metric in trial.metrics)
    return list(dict.fromkeys(name for name in found if name is not None))


def _introduction(names: list[str]) -> str:
    return (
        f"The global model was validated on each of {len(names)} domains, on the same sequences in all arms, whatever"
        " an arm was trained on. The validation loss above is that of all these sequences together, of which each"
        " domain has as many where it has enough. Losses per token compare arms within a domain; between domains,"
        " whose tokens stand for more or less text, only bits per byte compare."
    )


def domains_table(evidence: Evidence) -> Table | None:
    """One row for each domain and cell, domains together."""
    names = domains_of(evidence)
    rows = [_row(evidence, cell, name) for name in names for cell in evidence.cells if cell.done]
    if not rows:
        return None
    reference = evidence.reference
    return Table(
        id="domains",
        title="Validation by domain",
        caption="Share: the domain's part of all training sequences. Loss: mean over n seeds, with its 95 % t interval."
        + (f" Difference: from {reference.label}, relative, paired by seed." if reference else ""),
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="domain", heading="domain", show=text, align="left"),
            *arm_columns(evidence),
            Column(key="share", heading="share", show=_share),
            Column(key="n", heading="n", show=integer),
            Column(key="mean", heading="loss (nats per token)", show=loss),
            Column(key="interval", heading="95 % interval", show=text),
            *(
                (
                    Column(key="difference", heading="difference", show=_signed),
                    Column(key="difference_interval", heading="95 % interval", show=text),
                )
                if reference
                else ()
            ),
            Column(key="bits_per_byte", heading="bits per byte", show=significant),
        ),
        sortable=True,
    )


def _row(evidence: Evidence, cell: Cell, name: str) -> dict[str, Any]:
    metric = f"eval/loss/{name}"
    centre, low, high = seed_interval(cell, metric)
    reference = evidence.reference_cell(cell)
    theirs = reference.values(metric) if reference is not None else {}
    differences = list(paired_differences(cell.values(metric), theirs, relative=True).values())
    interval = t_interval(differences) if differences else None
    return {
        "domain": name, "arm": cell.series.label, "x": cell.x, "share": _trained_shares(cell).get(name),
        "n": len(cell.values(metric)), "mean": centre, "low": low, "high": high,
        "interval": "" if low is None or high is None else minus(f"[{low:.3f}, {high:.3f}]"),
        "difference": interval.mean if interval else None,
        "difference_interval": percent_interval(interval) if interval else "",
        "bits_per_byte": cell_mean(cell, f"eval/bits_per_byte/{name}"),
        **{f"seed_{seed}": value for seed, value in cell.values(metric).items()},
    }  # fmt: skip


def _trained_shares(cell: Cell) -> dict[str, float]:
    """Domain -> its part of a cell's training sequences, from the first trial's configuration."""
    trial = cell.done[0]
    tokens = {name: int(part["train_tokens"]) for name, part in (trial.part("data").get("domains") or {}).items()}
    try:
        return shares(from_dict(trial.config).data, tokens)
    except ConfigError:
        return {}  # a result of another version, whose settings no longer are any


def _share(value: Any) -> str:
    return DASH if missing(value) else percent(value, digits=0)


def _signed(value: Any) -> str:
    return DASH if missing(value) else minus(f"{100 * value:+.2f} %")


def domains_figure(analysis: Analysis) -> Figure | None:
    """Loss of each series (at its sweet spot, or best x): a panel for each domain, each with a scale of its own."""
    evidence, names = analysis.evidence, domains_of(analysis.evidence)
    cells = [cell for cell in shown_cells(analysis) if any(cell.values(f"eval/loss/{name}") for name in names)]
    rows = [
        {"domain": name, "arm": cell.series.label, "x": cell.x, "seed": seed, "loss_nats": value}
        for name in names for cell in cells for seed, value in cell.values(f"eval/loss/{name}").items()
    ]  # fmt: skip
    if not rows:
        return None

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("domains", {"axes.grid.axis": "x"}):
            return _draw(evidence, cells, names, layout)

    best = {
        name: min((m, row_label(evidence, c)) for c in cells if (m := _mean(c, name)) is not None) for name in names
    }
    several = any(len(cell.done) > 1 for cell in cells)
    return Figure(
        id="domains",
        title="Validation loss by domain",
        caption="One panel a domain, each with a scale of its own."
        + (" Large marks: means over seeds; small dots: seeds; lines: 95 % intervals." if several else ""),
        alt="Lowest loss by domain: " + "; ".join(f"{n}: {label} {value:.3f}" for n, (value, label) in best.items()),
        data=pd.DataFrame(rows),
        draw=draw,
    )


def _mean(cell: Cell, name: str) -> float | None:
    return cell_mean(cell, f"eval/loss/{name}")


def _draw(evidence: Evidence, cells: list[Cell], names: list[str], layout: Layout) -> matplotlib.figure.Figure:
    columns = min(len(names), 2 if layout.narrow or len(names) == 4 else 3)
    rows = -(-len(names) // columns)
    figure, grid = ink.new_figure(layout, rows * (0.62 + 0.21 * len(cells)) + 0.2, rows, columns, sharey=True)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(grid.flat, names, strict=False):
        _draw_panel(axes, evidence, cells, name)
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(cells)), [row_label(evidence, cell) for cell in cells])
    figure.supxlabel("validation loss (nats per token)", fontsize=8.6)
    return figure


def _draw_panel(axes: Axes, evidence: Evidence, cells: list[Cell], name: str) -> None:
    styles = ink.styles(evidence)
    for index, cell in enumerate(cells):
        values = list(cell.values(f"eval/loss/{name}").values())
        if not values:
            continue
        style, interval = styles[cell.series], t_interval(values)
        if interval.low is not None and interval.high is not None:
            axes.plot([interval.low, interval.high], [index] * 2, color=style.colour, linewidth=1.1, zorder=1.5)
            axes.plot(
                values, [index + 0.28] * len(values), linestyle="none", marker="o", markersize=2.8, markeredgewidth=0,
                color=style.colour, alpha=0.55, zorder=2,
            )  # fmt: skip
        axes.plot([mean(values)], [index], linestyle="none", zorder=2.5, **ink.marker_style(style, 5.5))
    axes.set_title(name)
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)
    ink.few_ticks(axes.xaxis, 3)
