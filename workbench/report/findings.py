"""The comparisons that sentences, tables and figures share: each cell against the reference, and the sweet spots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from workbench.report.evidence import Cell, Evidence, Series
from workbench.report.printing import setting
from workbench.statistics import (
    Interval,
    SignFlip,
    SpotInterval,
    SweetSpot,
    Verdict,
    equivalence,
    holm,
    mean,
    paired_differences,
    sign_flip_test,
    sweet_spot,
    sweet_spot_interval,
    t_interval,
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One cell against the reference, paired by seed. Positive differences are worse, whatever the metric's goal."""

    cell: Cell
    absolute: dict[int, float]
    relative: dict[int, float]
    interval: Interval
    """Of the relative difference."""
    absolute_interval: Interval
    verdict: Verdict
    test: SignFlip
    holm_p: float

    @property
    def n(self) -> int:
        """Seeds that both sides have."""
        return len(self.relative)


def compare(evidence: Evidence) -> list[Comparison]:
    """Every cell that shares a finished seed with the reference; p values are Holm-adjusted within a series."""
    found: list[Comparison] = []
    for series in evidence.series:
        group = [c for cell in evidence.cells_of(series) if (c := _compare_cell(evidence, cell)) is not None]
        adjusted = holm([comparison.test.p for comparison in group])
        found += [replace(c, holm_p=p) for c, p in zip(group, adjusted, strict=True)]
    return found


def _compare_cell(evidence: Evidence, cell: Cell) -> Comparison | None:
    reference = evidence.reference_cell(cell)
    if reference is None:
        return None
    sign = 1.0 if evidence.smaller_is_better else -1.0
    ours, theirs = cell.values(evidence.metric), reference.values(evidence.metric)
    absolute = {seed: sign * d for seed, d in paired_differences(ours, theirs).items()}
    relative = {seed: sign * d for seed, d in paired_differences(ours, theirs, relative=True).items()}
    if not absolute:
        return None
    interval, test = t_interval(list(relative.values())), sign_flip_test(list(relative.values()))
    return Comparison(
        cell=cell,
        absolute=absolute,
        relative=relative,
        interval=interval,
        absolute_interval=t_interval(list(absolute.values())),
        verdict=equivalence(interval, evidence.tolerance),
        test=test,
        holm_p=test.p,
    )


def sweet_spots(evidence: Evidence, comparisons: Sequence[Comparison]) -> dict[Series, SweetSpot | None]:
    """The sweet spot of every series with at least two numeric x; None where the rule identifies none.

    A series has one only if a larger x sends fewer bytes. Of a bandwidth or a learning rate the largest is no aim.
    """
    spots: dict[Series, SweetSpot | None] = {}
    for series in evidence.series:
        points = [(float(c.cell.x), c.interval) for c in _numeric(comparisons, series)]
        if len(points) >= 2 and _growing_saves_bytes(evidence.cells_of(series)):
            spots[series] = sweet_spot(points, evidence.tolerance)
    return spots


def spot_intervals(
    evidence: Evidence, comparisons: Sequence[Comparison], spots: Iterable[Series]
) -> dict[Series, SpotInterval]:
    """Where each series' sweet spot lands when its seeds are drawn anew; only for series with several seeds."""
    found = {
        series: sweet_spot_interval(
            {float(c.cell.x): c.relative for c in _numeric(comparisons, series)}, evidence.tolerance
        )
        for series in spots
    }
    return {series: interval for series, interval in found.items() if interval is not None}


def _numeric(comparisons: Sequence[Comparison], series: Series) -> list[Comparison]:
    return [
        c
        for c in comparisons
        if c.cell.series == series and isinstance(c.cell.x, int | float) and not isinstance(c.cell.x, bool)
    ]


def _growing_saves_bytes(cells: Sequence[Cell]) -> bool:
    sent = [value for cell in cells if (value := cell_mean(cell, "comm/uplink_gb")) is not None]
    return len(sent) >= 2 and sent[-1] < 0.999 * sent[0]


def best(evidence: Evidence, comparisons: Sequence[Comparison], series: Series) -> Comparison | None:
    """The comparison of ``series`` with the smallest mean difference."""
    own = [comparison for comparison in comparisons if comparison.cell.series == series]
    return min(own, key=lambda comparison: comparison.interval.mean, default=None)


def frugal(evidence: Evidence, comparisons: Sequence[Comparison], series: Series) -> Comparison | None:
    """The comparison of ``series`` that sent the fewest bytes of those within the tolerance; None without any.

    As for a sweet spot, points alone decide only where none has an interval.
    """
    own = [comparison for comparison in comparisons if comparison.cell.series == series]
    wanted = "within" if any(comparison.n > 1 for comparison in own) else "point within"
    sent = {
        index: bytes_gb
        for index, comparison in enumerate(own)
        if comparison.verdict == wanted and (bytes_gb := cell_mean(comparison.cell, "comm/uplink_gb")) is not None
    }
    return own[min(sent, key=lambda index: sent[index])] if sent else None


def cell_mean(cell: Cell | None, metric: str) -> float | None:
    """Mean of a metric over the finished trials of a cell; None without any."""
    values = list(cell.values(metric).values()) if cell is not None else []
    return mean(values) if values else None


def reference_level(evidence: Evidence) -> float | None:
    """The reference's mean, where it has one that does not depend on x."""
    cells = evidence.cells_of(evidence.reference) if evidence.reference else []
    return cell_mean(cells[0], evidence.metric) if len(cells) == 1 else None


def tolerance_edge(evidence: Evidence, level: float) -> float:
    """The worst value of the primary metric that counts as equal to the reference's ``level``."""
    return level + (1 if evidence.smaller_is_better else -1) * evidence.tolerance * abs(level)


def seed_interval(cell: Cell, metric: str) -> tuple[float | None, float | None, float | None]:
    """Mean, lower and upper bound of a metric over the seeds of a cell."""
    values = list(cell.values(metric).values())
    if not values:
        return None, None, None
    interval = t_interval(values)
    return interval.mean, interval.low, interval.high


def subject(evidence: Evidence) -> Series | None:
    """The series that the verdict is about: the first of role "treatment", or else the first but the reference."""
    others = [series for series in evidence.series if series != evidence.reference]
    return next((series for series in others if series.role == "treatment"), others[0] if others else None)


def baseline(evidence: Evidence) -> Series | None:
    """What bytes and memory are measured against: the first series of role "baseline" that is not the subject."""
    others = [series for series in evidence.series if series != subject(evidence)]
    return next((series for series in others if series.role == "baseline"), None)


def same_x(evidence: Evidence, series: Series, x: object) -> Cell | None:
    """The cell of ``series`` at ``x``, or its only one where x does not apply to it."""
    cells = evidence.cells_of(series)
    return next((cell for cell in cells if cell.x == x), cells[0] if len(cells) == 1 and cells[0].x is None else None)


def ratio(ours: Cell, theirs: Cell | None, metric: str) -> float | None:
    """ours / theirs of a metric's means; None where one is missing or theirs is 0."""
    top, bottom = cell_mean(ours, metric), cell_mean(theirs, metric)
    return top / bottom if top is not None and bottom else None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The evidence with what was computed from it once."""

    evidence: Evidence
    comparisons: tuple[Comparison, ...]
    spots: dict[Series, SweetSpot | None]
    spot_intervals: dict[Series, SpotInterval]


def analyse(evidence: Evidence) -> Analysis:
    """Everything that sentences, tables and figures share."""
    comparisons = compare(evidence)
    spots = sweet_spots(evidence, comparisons)
    return Analysis(
        evidence=evidence,
        comparisons=tuple(comparisons),
        spots=spots,
        spot_intervals=spot_intervals(evidence, comparisons, spots),
    )


def row_label(evidence: Evidence, cell: Cell) -> str:
    """ "spes, H = 50"."""
    return cell.series.label if cell.x is None else f"{cell.series.label}, {setting(evidence.x_path, cell.x)}"
