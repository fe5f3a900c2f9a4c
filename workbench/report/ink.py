"""The look of every figure: colours and markers of the arms, type, axes, direct labels, SVG that follows the page.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; markers and labels carry the same distinction.
"""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from fontTools.ttLib import TTFont  # type: ignore[import-untyped]
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from workbench.report.document import Layout
from workbench.report.evidence import Evidence, Series
from workbench.report.labels import fitting_columns, width_pt, wrap
from workbench.report.printing import axis_value

TEMPLATES = Path(__file__).parent / "templates"
INK, MUTED, RULE, PAPER, HEAT = "#1c2127", "#606a76", "#dfe3e8", "#fefefe", "#0b4f8a"
"""Colours that the page replaces by its theme's own (see `THEME`)."""

ARM_COLOURS = ("#0072b2", "#d55e00", "#3f4854", "#cc79a7", "#009e73", "#e69f00", "#56b4e9", "#7a5195")
ARM_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<")
_METHOD_STYLE = {"spes": 0, "dilico": 1, "centralized": 2, "diloco": 3, "local": 4}

PART_COLOURS = {
    "weights": "#44566c", "gradients": "#8296ad", "moments": "#bccad8", "activations": "#d8b365",
    "sync buffers": "#8c6d46",
}  # fmt: skip
TIME_COLOURS = {
    "compute": "#8794a5", "data": "#c9d1da", "serialise": "#e6cf8b", "transfer": "#c8963e", "wait": "#a3584a",
    "aggregate": "#6f9478", "merge": "#3d6353", "step (compute and gradient exchange)": "#8f7fa8",
}  # fmt: skip

THEME = {
    colour: name
    for name, colour in (
        ("ink", INK),
        ("muted", MUTED),
        ("rule", RULE),
        ("paper", PAPER),
        ("heat", HEAT),
        *((f"arm-{index}", colour) for index, colour in enumerate(ARM_COLOURS)),
        *((f"part-{index}", colour) for index, colour in enumerate(PART_COLOURS.values())),
        *((f"time-{index}", colour) for index, colour in enumerate(TIME_COLOURS.values())),
    )
}
"""Colour in a figure -> CSS variable of the page."""

SANS = "Workbench Sans"
_FACES = {
    "sans-400": (SANS, 400),
    "sans-600": (SANS, 700),
    "sans-400-greek": (f"{SANS} Greek", 400),
    "sans-600-greek": (f"{SANS} Greek", 700),
}
"""File -> family and weight; the semibold stands for bold, the weight that matplotlib's fallback font has too."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one series is drawn."""

    colour: str
    marker: str
    hollow: bool = False


def styles(evidence: Evidence) -> dict[Series, Style]:
    """A fixed style per series: its method's where that is free, else the next one; other axes make it hollow."""
    taken: dict[str, int] = {}
    methods = {series.arm: series.method for series in evidence.series}
    for arm in evidence.arms:
        wanted = _METHOD_STYLE.get(methods.get(arm, arm))
        free = [index for index in range(len(ARM_COLOURS)) if index not in taken.values()]
        spare = [index for index in free if index not in _METHOD_STYLE.values()] or free or [len(taken)]
        taken[arm] = wanted if wanted in free and wanted is not None else spare[0]
    found: dict[Series, Style] = {}
    for series in evidence.series:
        index = taken[series.arm]
        siblings = [other for other in found if other.arm == series.arm]
        found[series] = Style(
            colour=ARM_COLOURS[index % len(ARM_COLOURS)],
            marker=ARM_MARKERS[(index + len(siblings)) % len(ARM_MARKERS)],
            hollow=bool(len(siblings) % 2),
        )
    return found


@cache
def register_fonts() -> None:
    """Make the page's own typeface known to matplotlib (which reads no WOFF2), under the name that the CSS gives it."""
    folder = Path(tempfile.mkdtemp(prefix="report-fonts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for stem, (family, weight) in _FACES.items():
        font = TTFont(TEMPLATES / f"{stem}.woff2")
        font.flavor = None
        font["OS/2"].usWeightClass = weight
        for name_id in (1, 16):
            font["name"].setName(family, name_id, 3, 1, 0x409)
            font["name"].setName(family, name_id, 1, 0, 0)
        font.save(folder / f"{stem}.ttf")
        font_manager.fontManager.addfont(folder / f"{stem}.ttf")


@contextmanager
def drawing(salt: str, more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Within it, matplotlib draws in the report's style; ``salt`` makes a figure's element ids its own."""
    register_fonts()
    style: Any = {**_SETTINGS, "svg.hashsalt": salt, **(more or {})}
    with mpl.rc_context(style):
        yield


_SETTINGS = {
        "font.family": [SANS, f"{SANS} Greek", "DejaVu Sans"],
        "font.size": 8.6, "axes.labelsize": 8.6, "xtick.labelsize": 8.2, "ytick.labelsize": 8.2,
        "axes.titlesize": 8.8, "axes.titleweight": 700, "axes.titlelocation": "left", "axes.titlepad": 7,
        "axes.labelcolor": MUTED, "axes.titlecolor": INK, "text.color": INK,
        "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
        "axes.edgecolor": MUTED, "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
        "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 3, "ytick.major.size": 0,
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": RULE, "grid.linewidth": 0.6, "axes.axisbelow": True,
        "axes.facecolor": "none", "figure.facecolor": "none", "savefig.facecolor": "none",
        "lines.linewidth": 1.6, "lines.markersize": 5.5, "lines.solid_capstyle": "round",
        "axes.unicode_minus": True, "axes.formatter.useoffset": False,
        "svg.fonttype": "none", "path.simplify": True, "path.simplify_threshold": 0.3,
        "figure.constrained_layout.use": True, "figure.constrained_layout.h_pad": 0.03,
        "figure.constrained_layout.w_pad": 0.03,
    }  # fmt: skip


def new_figure(layout: Layout, height_in: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Figure, Any]:
    """A figure of the layout's width with its axes in a 2-d array."""
    figure = Figure(figsize=(layout.width_in, height_in))
    return figure, figure.subplots(rows, columns, squeeze=False, **grid)


def marker_style(style: Style, size: float = 5.5) -> dict[str, Any]:
    """Arguments of ``plot`` for a marker with a thin rim of paper that keeps touching markers apart."""
    face = PAPER if style.hollow else style.colour
    return {
        "marker": style.marker, "markersize": size, "markerfacecolor": face,
        "markeredgecolor": style.colour if style.hollow else PAPER, "markeredgewidth": 1.2 if style.hollow else 0.7,
    }  # fmt: skip


CLOSE = 0.035
"""Share of an axis below which the labels of two neighbouring ticks would touch."""


def x_ticks(axes: Axes, positions: Sequence[float], values: Sequence[Any], *, log: bool) -> None:
    """Ticks at the tested values and nowhere else, thinned where they would touch."""
    if log:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(positions)))
    axes.xaxis.set_minor_locator(NullLocator())
    labels = {position: axis_value(value) for position, value in zip(positions, values, strict=True)}
    if not log:
        for before, position in pairwise(sorted(labels)):
            if position - before < CLOSE * (max(labels) - min(labels)) and labels[before]:
                labels[position] = ""
    labels = _fitting(axes, labels)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: labels.get(min(labels, key=lambda p: abs(p - x)), "")))


def column_pt(axes: Axes) -> float:
    """Width in points of a column of the figure's grid, with all that stands around its axes."""
    place = axes.get_subplotspec()
    return axes.figure.bbox.width * 72 / axes.figure.dpi / (place.get_gridspec().ncols if place else 1)


def _fitting(axes: Axes, labels: dict[float, str]) -> dict[float, str]:
    """Tick labels broken at spaces to stand side by side; turned where a single word is too wide for that."""
    size, room = 8.2, 0.72 * column_pt(axes) / max(1, len(labels))
    broken = {position: wrap(label, room, size) for position, label in labels.items()}
    if max((width_pt(label, size) for label in broken.values()), default=0.0) > 1.15 * room and len(labels) > 1:
        axes.tick_params(axis="x", labelrotation=30)
        for label in axes.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")
        return {position: wrap(label, 0.2 * column_pt(axes) + 20, size) for position, label in labels.items()}
    return broken


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, printed as plain numbers; only powers where the range is wide."""
    steps = (1.0, 2.0, 5.0) if high / low < 60 else ((1.0, 3.0) if high / low < 600 else (1.0,))
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def few_ticks(axis: Any, most: int = 5) -> None:
    """At most ``most`` + 1 round ticks, printed with separators."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}".replace("-", "−")))


def without_outliers(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest value, but for those so far out that they would squeeze the rest into a fifth of the room.

    "Far out": beyond five times the distance of the median from the other end, unless more than a quarter of them is.
    """
    ordered = sorted(values)
    low, middle, high = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    kept = [value for value in ordered if value <= low + 5 * (middle - low) or middle == low]
    kept = [value for value in kept if value >= high - 5 * (high - middle) or middle == high]
    return (kept[0], kept[-1]) if len(kept) >= max(2.0, 0.75 * len(ordered)) else (low, high)


@dataclass(frozen=True, kw_only=True)
class EndLabel:
    """A direct label right of a line's end: a name, and a quieter line below where it helps."""

    name: Annotation
    detail: Annotation | None

    @property
    def lines(self) -> int:
        """Lines of the name."""
        return self.name.get_text().count("\n") + 1

    @property
    def height_pt(self) -> float:
        """Room that the label needs."""
        return LINE_PT * (self.lines + bool(self.detail))


LINE_PT = 10.5
MOST_LABEL_SHARE = 0.27
"""Share of a figure's width that direct labels may take before their names break."""


def end_label(
    axes: Axes,
    y: float,
    name: str,
    colour: str,
    *,
    detail: str = "",
    bold: bool = True,
    x: float | None = None,
) -> EndLabel:
    """Name a line beside the right edge of the axes (or at ``x``); call `spread` when all labels are there."""
    place: dict[str, Any] = {
        "textcoords": "offset points",
        "ha": "left",
        "va": "center",
        "annotation_clip": False,
        "color": colour,
    }
    xy = (axes.get_xlim()[1] if x is None else x, y)
    page_pt = axes.figure.bbox.width * 72 / axes.figure.dpi
    name = wrap(name, MOST_LABEL_SHARE * page_pt, 8.6, bold=bold)
    return EndLabel(
        name=axes.annotate(name, xy, xytext=(6, 0), fontweight=700 if bold else 400, **place),
        detail=axes.annotate(detail, xy, xytext=(6, 0), fontsize=7.8, **place) if detail else None,
    )


def spread(figure: Figure, labels: Iterable[EndLabel]) -> None:
    """Shift labels vertically until none overlap, as little as possible and in order."""
    items = list(labels)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is done; labels only move up and down within it
    wanted = [_height_pt(figure, item.name) for item in items]
    order = sorted(range(len(items)), key=lambda index: wanted[index])
    placed = _relax([wanted[index] for index in order], [items[index].height_pt for index in order])
    placed = _within(placed, [items[index].height_pt for index in order], figure.bbox.height * 72 / figure.dpi)
    for index, height in zip(order, placed, strict=True):
        item, shift = items[index], height - wanted[index]
        up = LINE_PT / 2 if item.detail else 0.0
        item.name.set_position((6, shift + up))
        if item.detail:
            item.detail.set_position((6, shift - item.lines * up))


def _height_pt(figure: Figure, label: Annotation) -> float:
    """Height of the point that a label names, in points from the bottom of the figure."""
    assert label.axes is not None
    return float(label.axes.transData.transform(label.xy)[1]) * 72 / figure.dpi


def _relax(centres: list[float], heights: list[float]) -> list[float]:
    """Centres in the same order, moved so that items of these heights do not overlap; touching ones move as one."""
    blocks: list[list[int]] = []
    for index in range(len(centres)):
        blocks.append([index])
        while len(blocks) > 1 and _bottom(blocks[-1], centres, heights) < _top(blocks[-2], centres, heights):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    placed = [0.0] * len(centres)
    for block in blocks:
        edge = _bottom(block, centres, heights)
        for index in block:
            placed[index] = edge + heights[index] / 2
            edge += heights[index]
    return placed


def _within(centres: list[float], heights: list[float], top: float) -> list[float]:
    """The same without any beyond the page: pushed up from its lower edge, then down from ``top``."""
    placed, floor = list(centres), 2.0
    for index, height in enumerate(heights):
        placed[index] = max(placed[index], floor + height / 2)
        floor = placed[index] + height / 2
    ceiling = top - 2.0
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], ceiling - heights[index] / 2)
        ceiling = placed[index] - heights[index] / 2
    return placed


def _bottom(block: list[int], centres: list[float], heights: list[float]) -> float:
    return sum(centres[index] for index in block) / len(block) - sum(heights[index] for index in block) / 2


def _top(block: list[int], centres: list[float], heights: list[float]) -> float:
    return _bottom(block, centres, heights) + sum(heights[index] for index in block)


LEGEND_SIZE = 8.2


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int | None = None) -> None:
    """Keys above the axes, in as few rows as fit, for figures whose parts are too small to be named in place."""
    around = LEGEND_SIZE * (1.0 + 0.5 + 1.4)
    fitting = fitting_columns(labels, 72 * figure.get_figwidth() - 6, LEGEND_SIZE, around_pt=around)
    figure.legend(
        handles, labels, loc="outside upper left", ncols=min(columns or fitting, fitting), frameon=False,
        fontsize=LEGEND_SIZE, handlelength=1.0, handleheight=0.8, handletextpad=0.5, columnspacing=1.4,
        borderaxespad=0.2, borderpad=0.1,
    )  # fmt: skip
