"""Where words in a figure go: how wide they are, where they break, and beside which point they hide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

Box = tuple[float, float, float, float]
"""Left, bottom, right, top in points."""

LINE = 1.28
"""Height of a line of text over its size."""


def width_pt(text: str, size: float, *, bold: bool = False) -> float:
    """Width of the widest line in points, in the typeface that figures use now."""
    if "\n" in text:
        return max(width_pt(line, size, bold=bold) for line in text.split("\n"))
    font = FontProperties(family=rcParams["font.family"], size=size, weight=700 if bold else 400)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def wrap(text: str, room_pt: float, size: float, *, bold: bool = False) -> str:
    """The text with line breaks at spaces such that no line is wider than ``room_pt``, unless one word is."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width_pt(longer, size, bold=bold) > room_pt:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def fitting_columns(labels: Sequence[str], room_pt: float, size: float, *, around_pt: float) -> int:
    """Most columns of a legend whose entries, with ``around_pt`` for key and gap, fit side by side."""
    widths = np.array([width_pt(label, size) + around_pt for label in labels])
    for columns in range(len(labels), 1, -1):
        if sum(float(column.max()) for column in np.array_split(widths, columns)) <= room_pt:  # as a legend splits them
            return columns
    return 1


@dataclass(frozen=True, kw_only=True)
class PointLabel:
    """Words that belong to a point in data coordinates."""

    text: str
    x: float
    y: float
    colour: str
    size: float
    bold: bool = False


_SIDES = ((1, 1), (-1, -1), (1, -1), (-1, 1), (0, 1), (0, -1), (1, 0), (-1, 0))
_MARKER_PT = 4.0


def place(axes: Axes, labels: Sequence[PointLabel], points: Sequence[tuple[float, float]], paper: str) -> None:
    """Write every label beside its point where it covers no other label and no other point, as near as it can.

    The layout of the figure must be done: positions are found in points on the page.
    """
    scale, frame = 72 / axes.figure.dpi, axes.bbox
    inside: Box = (frame.x0 * scale, frame.y0 * scale, frame.x1 * scale + 6, frame.y1 * scale + 4)
    on_page = np.asarray(axes.transData.transform(np.array(points, dtype=float))) * scale
    marks = [_around(x, y, _MARKER_PT, _MARKER_PT) for x, y in on_page]
    taken: list[Box] = []
    for label in labels:
        centre = np.asarray(axes.transData.transform(np.array([[label.x, label.y]])))[0] * scale
        half_w = width_pt(label.text, label.size, bold=label.bold) / 2
        half_h = label.size * LINE * (label.text.count("\n") + 1) / 2
        best: tuple[float, float, float, Box] | None = None
        for distance in (4.0, 11.0, 19.0, 28.0):
            for side, (right, up) in enumerate(_SIDES):
                across = right * (half_w + distance)
                along = up * (half_h + (distance - 3 if right else distance))
                box = _around(centre[0] + across, centre[1] + along, half_w, half_h)
                cost = sum(_overlap(box, other) for other in (*taken, *marks)) + 3 * _outside(box, inside)
                cost += 2.0 * distance + 0.1 * side
                if best is None or cost < best[0]:
                    best = (cost, across, along, box)
        assert best is not None
        taken.append(best[3])
        axes.annotate(
            label.text, (label.x, label.y), xytext=best[1:3], textcoords="offset points", ha="center", va="center",
            color=label.colour, fontsize=label.size, fontweight=700 if label.bold else 400, annotation_clip=False,
            bbox={"facecolor": paper, "edgecolor": "none", "alpha": 0.8, "pad": 0.4}, zorder=1.6,
        )  # fmt: skip


def _around(x: float, y: float, half_w: float, half_h: float) -> Box:
    return (float(x) - half_w, float(y) - half_h, float(x) + half_w, float(y) + half_h)


def _overlap(a: Box, b: Box) -> float:
    """Area that two boxes share, in square points."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _outside(box: Box, frame: Box) -> float:
    """Area of a box beyond the frame, in square points."""
    return (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, frame)
