"""The document that every output is rendered from: sections of paragraphs, notes, key numbers, figures and tables.

Text is plain except for two marks that each output translates: ``*emphasis*`` and ```code```. Figures and tables
hold their data as data frames with true units in the column names; a table's columns say how to print them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.figure
import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The room a figure is drawn for."""

    width_in: float
    narrow: bool


PAGE = Layout(width_in=6.9, narrow=False)
"""A text column on a desktop, or an A4 page."""
PHONE = Layout(width_in=3.7, narrow=True)
"""A telephone held upright."""


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something the reader must not overlook: failed trials, mixed code, a missing reference."""

    text: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to copy."""

    text: str
    label: str


@dataclass(frozen=True, kw_only=True)
class KeyNumber:
    """One number of the abstract: "34 %", "of dilico's uplink bytes"."""

    value: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class KeyNumbers:
    """The numbers that a reader takes away."""

    numbers: tuple[KeyNumber, ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture with what is needed to check it. ``draw`` may be called once for every layout."""

    id: str
    title: str
    caption: str
    alt: str
    data: pd.DataFrame
    draw: Callable[[Layout], matplotlib.figure.Figure]


@dataclass(frozen=True, kw_only=True)
class Column:
    """How one column of a table's frame is printed."""

    key: str
    heading: str
    show: Callable[[Any], str] = str
    align: Literal["left", "right"] = "right"
    link: str | None = None
    """Column of the frame that holds the address of each cell's link; an empty address is no link."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of raw values; ``columns`` choose, order and print them."""

    id: str
    title: str
    caption: str
    frame: pd.DataFrame
    columns: tuple[Column, ...]
    sortable: bool = False
    mark: str | None = None
    """Boolean column of the frame: the rows to set apart."""


Block = Paragraph | Note | Command | KeyNumbers | Figure | Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what stands under it."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    name: str
    title: str
    byline: str
    verdict: tuple[str, ...]
    """Sentences; the first is the finding."""
    opening: tuple[Block, ...]
    sections: tuple[Section, ...]
    formats: tuple[str, ...]

    @property
    def figures(self) -> list[Figure]:
        """All figures in reading order."""
        return [block for block in self.blocks if isinstance(block, Figure)]

    @property
    def tables(self) -> list[Table]:
        """All tables in reading order."""
        return [block for block in self.blocks if isinstance(block, Table)]

    @property
    def blocks(self) -> list[Block]:
        """All blocks in reading order."""
        return [*self.opening, *(block for section in self.sections for block in section.blocks)]
