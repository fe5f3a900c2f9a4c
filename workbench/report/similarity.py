"""The figure of how alike experts are over training: what merging keeps together, and training apart divides."""

from __future__ import annotations

from typing import Any

import matplotlib.figure
import pandas as pd
from matplotlib.lines import Line2D

from workbench.report import ink
from workbench.report.curves import ALONE, strength, thin
from workbench.report.document import Figure, Layout
from workbench.report.evidence import Cell, Evidence
from workbench.report.findings import Analysis, row_label
from workbench.report.printing import axis_symbol, sample_size, significant
from workbench.trees import lookup

_DASHES = (0, (4, 2))
"""How an arm is drawn whose experts are not merged."""


def similarity_figure(analysis: Analysis) -> Figure | None:
    """Mean cosine over pairs of experts against tokens, a line for each series and x; None where no trial has it."""
    evidence = analysis.evidence
    frames = {(cell.series, cell.x): _frame(cell) for cell in evidence.cells}
    frames = {key: frame for key, frame in frames.items() if not frame.empty}
    if not frames:
        return None
    cells = [cell for cell in evidence.cells if (cell.series, cell.x) in frames]
    means = {key: frame.groupby("tokens")["similarity"].mean().dropna() for key, frame in frames.items()}

    def draw(layout: Layout) -> matplotlib.figure.Figure:
        with ink.drawing("similarity"):
            return _draw(evidence, cells, means, layout)

    return Figure(
        id="similarity",
        title="Similarity of experts over training",
        caption=_caption(evidence, cells, frames),
        alt=_alt(evidence, cells, means),
        data=pd.concat(frames.values(), ignore_index=True),
        draw=draw,
    )


def _frame(cell: Cell) -> pd.DataFrame:
    """Every point of every finished trial, one row each, with a column for each layer."""
    rows = [
        {
            "arm": cell.series.label, "x": cell.x, "seed": trial.seed, "merged": _merges(cell),
            "step": point["step"], "tokens": point["tokens"], "similarity": point["similarity"],
            **{f"layer_{layer}": value for layer, value in enumerate(point["similarity_by_layer"])},
        }
        for trial in cell.done for point in trial.part("curves").get("experts") or []
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    return frame if frame.empty else frame.assign(similarity=pd.to_numeric(frame["similarity"], errors="coerce"))


def _merges(cell: Cell) -> bool:
    """Whether the experts of a cell are merged, by its first trial's configuration."""
    return bool(lookup(cell.done[0].config, "merge.enabled"))


def _caption(evidence: Evidence, cells: list[Cell], frames: dict[Any, pd.DataFrame]) -> str:
    sizes = sorted({frame["seed"].nunique() for frame in frames.values()})
    n = sample_size(sizes[0]) if len(sizes) == 1 else f"n = {sizes[0]} to {sizes[-1]}"
    lines = f"Lines: mean over seeds ({n})." if sizes[-1] > 1 else f"One seed a line ({n})."
    shade = f" Within an arm, larger {axis_symbol(evidence.x_path)} is fainter." if evidence.x_path else ""
    kinds = {_merges(cell) for cell in cells}
    merged = "Solid: experts are merged; dashed: they are not."
    if len(kinds) == 1:
        merged = (
            "In all of these arms experts are merged." if True in kinds else "In none of these arms are they merged."
        )
    absent = " Arms that are not shown recorded none." if any(c.done and c not in cells for c in evidence.cells) else ""
    return (
        "Cosine of the input projections of two experts of a layer of the global model, mean over pairs and layers: 1"
        f" is equal, 0 unrelated. {lines}{shade} {merged}{absent}"
    )


def _alt(evidence: Evidence, cells: list[Cell], means: dict[Any, pd.Series[float]]) -> str:
    ends = []
    for cell in cells:
        curve = means[cell.series, cell.x]
        if not curve.empty:
            first, final = (significant(float(curve.iloc[place]), 2) for place in (0, -1))
            ends.append(f"{row_label(evidence, cell)} {first} to {final}")
    return f"Mean cosine over pairs of experts, first and last: {'; '.join(ends)}."


def _draw(
    evidence: Evidence, cells: list[Cell], means: dict[Any, pd.Series[float]], layout: Layout
) -> matplotlib.figure.Figure:
    figure, grid = ink.new_figure(layout, 2.9)
    axes, styles = grid[0, 0], ink.styles(evidence)
    million = max((float(curve.index.max()) for curve in means.values() if not curve.empty), default=0.0) >= 1e5
    drawn: dict[str, Line2D] = {}
    for series in evidence.series:
        own = [cell for cell in cells if cell.series == series]
        for index, cell in enumerate(own):
            curve = means[series, cell.x]
            if curve.empty:
                continue
            x, y = thin(curve.index.to_numpy() * (1e-6 if million else 1.0), curve.to_numpy())
            dashes: Any = "-" if _merges(cell) else _DASHES
            colour = styles[series].colour
            axes.plot(x, y, color=colour, linestyle=dashes, linewidth=1.3, alpha=strength(index, len(own)),
                      **(ALONE if len(x) == 1 else {}))  # fmt: skip
            drawn.setdefault(series.label, Line2D([], [], color=colour, linestyle=dashes, linewidth=1.8))
    axes.set_xlabel(f"tokens{' (million)' if million else ''}")
    axes.set_ylabel("mean cosine of experts")
    axes.set_xlim(left=0)
    ink.few_ticks(axes.xaxis, 5)
    ink.few_ticks(axes.yaxis, 5)
    ink.legend(figure, list(drawn.values()), list(drawn))
    return figure
