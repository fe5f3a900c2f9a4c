"""A figure as one SVG element that a page can carry: text kept as text, small, deterministic, in the page's colours."""

from __future__ import annotations

import io
import re
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from workbench.report.ink import THEME, drawing

_DECIMALS = re.compile(r"-?\d+\.\d{3,}")


def to_svg(figure: Figure, salt: str) -> str:
    """The figure as an SVG element with text kept as text, without size, dates or unused ids."""
    buffer = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    with drawing(salt):
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<[^>]+>", lambda tag: _DECIMALS.sub(_rounded, tag[0]), svg)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)
    for name in sorted(used):
        svg = re.sub(rf'(id="|#){re.escape(name)}(?=["\)])', rf"\g<1>{salt}-{name}", svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def themed(svg: str) -> str:
    """The SVG with its colours replaced by the page's variables, so that it follows light and dark."""
    return re.sub("|".join(THEME), lambda found: f"var(--{THEME[found[0]]},{found[0]})", svg, flags=re.IGNORECASE)


def _rounded(found: re.Match[str]) -> str:
    """A coordinate to a hundredth of a point."""
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
