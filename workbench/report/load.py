"""The figure of expert load: which experts the tokens went to, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import pandas as pd
from matplotlib.patches import Rectangle

from workbench.report import captions, ink
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Cell, Evidence
from workbench.report.findings import Analysis, best, row_label
from workbench.report.labels import wrap
from workbench.report.printing import significant
from workbench.statistics import mean


def load_figure(analysis: Analysis) -> Figure | None:
    """Expert load by layer and expert, one panel per series at its sweet spot (or its best x)."""
    evidence = analysis.evidence
    chosen = [(cell, load) for cell in shown_cells(analysis) if (load := cell.done[0].result.get("expert_load"))]
    if not chosen:
        return None
    rows = [
        {
            "arm": cell.series.label,
            "x": cell.x,
            "seed": cell.done[0].seed,
            "layer": layer,
            "expert": expert,
            "share": s,
        }
        for cell, load in chosen
        for layer, shares in enumerate(load)
        for expert, s in enumerate(shares)
    ]
    top = max(share * len(shares) for _, load in chosen for shares in load for share in shares)

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("load", {"axes.grid": False}):
            return _draw_load(evidence, chosen, top, layout)

    titles = [f"{row_label(evidence, cell)}: {_imbalance(load):.2f}" for cell, load in chosen]
    return Figure(
        id="load",
        title="Load of the experts",
        caption=captions.load(evidence, top),
        alt=f"Heat maps of expert load. Largest over mean, mean over layers: {'; '.join(titles)}.",
        data=pd.DataFrame(rows),
        draw=draw,
    )


def shown_cells(analysis: Analysis) -> list[Cell]:
    """One finished cell of each series: its sweet spot, or else its best x."""
    shown = []
    for series in analysis.evidence.series:
        spot, top = analysis.spots.get(series), best(analysis.evidence, analysis.comparisons, series)
        cells = [cell for cell in analysis.evidence.cells_of(series) if cell.done]
        wanted = spot.x if spot is not None else (top.cell.x if top is not None else None)
        shown += [next((cell for cell in cells if cell.x == wanted), cells[0])] if cells else []
    return shown


def _imbalance(load: Sequence[Sequence[float]]) -> float:
    """Mean over layers of largest over mean load."""
    return mean([max(shares) * len(shares) / (sum(shares) or 1.0) for shares in load])


def _draw_load(
    evidence: Evidence, chosen: Sequence[tuple[Cell, Any]], top: float, layout: Layout
) -> matplotlib.figure.Figure:
    columns = min(len(chosen), 1 if layout.narrow else 3)
    rows = -(-len(chosen) // columns)
    layers, experts = len(chosen[0][1]), len(chosen[0][1][0])
    cell_in = min(0.24, (layout.width_in - 0.5 * columns) / columns / experts)
    room_pt = 72 * (layout.width_in / columns - 0.35)
    titles = [wrap(f"{row_label(evidence, c)}: {_imbalance(load):.2f}", room_pt, 8.8, bold=True) for c, load in chosen]
    lines = max(title.count("\n") for title in titles)
    height_in = rows * (max(0.9, layers * cell_in) + 0.62 + 0.14 * lines) + 0.25
    figure, grid = ink.new_figure(layout, height_in, rows, columns)
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    for axes, (_, load), title in zip(grid.flat, chosen, titles, strict=False):
        for layer, shares in enumerate(load):
            for expert, share in enumerate(shares):
                strength = max(0.03, share * len(shares) / top)
                box = Rectangle((expert - 0.47, layer - 0.45), 0.94, 0.9, facecolor=ink.HEAT, alpha=strength, lw=0)
                axes.add_patch(box)
        axes.set_xlim(-0.6, len(load[0]) - 0.4)
        axes.set_ylim(len(load) - 0.4, -0.6)
        axes.set_xticks(_few(len(load[0])))
        axes.set_yticks(_few(len(load)))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_title(title)
        axes.set_xlabel("expert")
        axes.set_ylabel("layer" if axes.get_subplotspec().is_first_col() else "")
    step = next(size for size in (0.5, 1.0, 2.0, 5.0, 10.0, float(top)) if top / size < 5)
    steps = [step * count for count in range(1, int(top / step) + 1)]
    steps += [top] if top > 1.1 * steps[-1] else []
    handles = [Rectangle((0, 0), 1, 1, facecolor=ink.HEAT, alpha=value / top, linewidth=0) for value in steps]
    ink.legend(figure, handles, [f"{significant(value, 2)} × uniform" for value in steps])
    return figure


def _few(size: int) -> list[int]:
    """At most nine evenly spaced indices from 0."""
    return list(range(0, size, max(1, -(-size // 9))))
