"""The verdict and the key numbers, composed from the data.

A sentence says only what its numbers allow: without an interval it says so, and where a rule fails it says that.
"""

from __future__ import annotations

from workbench.report.document import KeyNumber
from workbench.report.evidence import Cell, Evidence, Series
from workbench.report.findings import (
    Analysis,
    Comparison,
    baseline,
    best,
    cell_mean,
    frugal,
    ratio,
    same_x,
    subject,
)
from workbench.report.printing import (
    axis_symbol,
    axis_value,
    count,
    join,
    loss,
    metric_name,
    metric_unit,
    minus,
    percent,
    sample_size,
    sentence,
    setting,
    significant,
)
from workbench.statistics import (
    SpotInterval,
    SweetSpot,
    mean,
    noise_floor,
    paired_differences,
    standard_deviation,
)


def verdict(analysis: Analysis) -> tuple[str, ...]:
    """The finding in one to four sentences; the first carries the numbers."""
    evidence = analysis.evidence
    if not evidence.done:
        return (_nothing(evidence),)
    chosen = subject(evidence)
    if evidence.reference is None or not analysis.comparisons:
        return _without_reference(analysis)
    sentences: list[str] = []
    if chosen is not None and (comparison := headline(analysis, chosen)) is not None:
        sentences.append(_finding(analysis, comparison))
    else:
        sentences.append(f"No seed of {evidence.reference.arm} and another arm finished, so nothing can be compared.")
    sentences += [_spots_sentence(analysis), _frugal_sentence(analysis), _between_methods(analysis), _trust(analysis)]
    return tuple(sentence(text) for text in sentences if text)


def headline(analysis: Analysis, series: Series) -> Comparison | None:
    """The comparison that stands for a series: at its sweet spot; where the study is about bytes, the one that sends
    least within the tolerance; or where its loss is closest to the reference.
    """
    spot = analysis.spots.get(series)
    if spot is not None:
        return next(c for c in analysis.comparisons if c.cell.series == series and c.cell.x == spot.x)
    evidence, comparisons = analysis.evidence, analysis.comparisons
    cheapest = frugal(evidence, comparisons, series) if evidence.leads_with_bytes else None
    return cheapest or best(evidence, comparisons, series)


def _nothing(evidence: Evidence) -> str:
    failed = sum(trial.status not in ("missing", "done", "set aside") for trial in evidence.trials)
    missing = sum(trial.status == "missing" for trial in evidence.trials)
    parts = [f"{failed} failed"] if failed else []
    parts += [f"{missing} left no result"] if missing else []
    detail = f" ({join(parts)})" if parts else ""
    return (
        f"None of the {count(len(evidence.trials), 'trial')} finished{detail}, so this report has no numbers; the"
        " reasons are listed below."
        if evidence.trials
        else "The study has no trials, so this report has no numbers."
    )


def _without_reference(analysis: Analysis) -> tuple[str, ...]:
    evidence = analysis.evidence
    means = [(cell, value) for cell in evidence.cells if (value := cell_mean(cell, evidence.metric)) is not None]
    if not means:
        return (f"No finished trial reports {evidence.metric}.",)
    pick = min if evidence.smaller_is_better else max
    cell, value = pick(means, key=lambda item: item[1])
    lead = f"The {'lowest' if evidence.smaller_is_better else 'highest'} {metric_name(evidence.metric)} was"
    why = (
        "the study has no reference arm"
        if evidence.reference is None
        else f"no trial of the reference arm {evidence.reference.arm} shares a finished seed with another arm"
    )
    first = (
        f"{lead} {loss(value)} {metric_unit(evidence.metric)}, by {cell.series.label}{_at(evidence, cell)}"
        f" ({sample_size(len(cell.values(evidence.metric)))})."
    )
    second = f"Nothing is compared with a reference here: {why}."
    return tuple(sentence(text) for text in (first, second, _between_methods(analysis)) if text)


def _at(evidence: Evidence, cell: Cell) -> str:
    return "" if cell.x is None else f" at {setting(evidence.x_path, cell.x)}"


def _finding(analysis: Analysis, comparison: Comparison) -> str:
    evidence, cell = analysis.evidence, comparison.cell
    reference = evidence.reference_cell(cell)
    difference = comparison.interval
    bounds = "" if difference.low is None or difference.high is None else _bounds(difference.low, difference.high)
    verb = "lost" if difference.mean >= 0 else "gained"
    ours, theirs = cell_mean(cell, evidence.metric), cell_mean(reference, evidence.metric)
    where = "" if cell.x is None else f"At {setting(evidence.x_path, cell.x)}, "
    text = (
        f"{where}{cell.series.label} {verb} {percent(abs(difference.mean))}{bounds} of"
        f" {metric_name(evidence.metric)} against {reference.series.arm if reference else ''}"
        f" ({loss(ours)} against {loss(theirs)} {metric_unit(evidence.metric)})"
    )
    costs = _costs(analysis, cell)
    interval = "paired by seed, 95 % t interval" if bounds else "one seed, so no interval"
    judged = _JUDGED[comparison.verdict].format(tolerance=percent(evidence.tolerance, digits=0))
    return f"{text}{costs} ({sample_size(comparison.n)}, {interval}): {judged}."


_JUDGED = {
    "within": "within the tolerance of {tolerance}",
    "outside": "outside the tolerance of {tolerance}",
    "inconclusive": "inconclusive at a tolerance of {tolerance}",
    "point within": "the point lies within the tolerance of {tolerance}",
    "point outside": "the point lies outside the tolerance of {tolerance}",
}


def _bounds(low: float, high: float) -> str:
    return minus(f" [{100 * low:.2f}, {100 * high:.2f}]")


def _costs(analysis: Analysis, cell: Cell) -> str:
    """ ", sent 34 % of dilico's uplink bytes and held 61 % of its trained-state memory"."""
    evidence = analysis.evidence
    against = baseline(evidence) or evidence.reference
    other = same_x(evidence, against, cell.x) if against is not None else None
    if other is None or against is None:
        return ""
    parts, name = [], f"{against.arm}'s"
    if (sent := ratio(cell, other, "comm/uplink_gb")) is not None:
        parts.append(f"sent {_share(sent)} of {name} uplink bytes")
        name = "its"
    if (held := ratio(cell, other, "mem/trained_state_gb")) is not None:
        parts.append(f"held {_share(held)} of {name} trained-state memory")
    return f", {join(parts)}" if parts else ""


def _share(fraction: float) -> str:
    return percent(fraction, digits=0 if fraction >= 0.1 else 1)


def _spots_sentence(analysis: Analysis) -> str:
    evidence = analysis.evidence
    if not analysis.spots:
        return ""
    symbol = axis_symbol(evidence.x_path or "")
    rule = "loss" if len(evidence.seeds) == 1 else "upper bound"
    few = len(analysis.spots) <= 3  # of more, the spread over resamples would bury the finding
    found = [
        f"{setting(evidence.x_path, spot.x)} for {series.label}"
        f"{_spot_remarks(spot, symbol, analysis.spot_intervals.get(series) if few else None)}"
        for series, spot in analysis.spots.items()
        if spot is not None
    ]
    lost = [series.label for series, spot in analysis.spots.items() if spot is None]
    lead = f"The sweet spot, the largest {symbol} whose {rule} stays within {percent(evidence.tolerance, digits=0)}, is"
    parts = ([join(found)] if found else []) + ([f"not identified for {join(lost)}"] if lost else [])
    return f"{lead} {', and '.join(parts)}."


def _frugal_sentence(analysis: Analysis) -> str:
    """Which point sends least within the tolerance, where the study is about bytes."""
    evidence = analysis.evidence
    if not evidence.leads_with_bytes:
        return ""
    chosen = {s: frugal(evidence, analysis.comparisons, s) for s in evidence.series if s != evidence.reference}
    found = [_named(evidence, comparison.cell) for comparison in chosen.values() if comparison is not None]
    lost = [series.label for series, comparison in chosen.items() if comparison is None]
    rule = "loss" if len(evidence.seeds) == 1 else "upper bound"
    lead = f"The fewest bytes whose {rule} stays within {percent(evidence.tolerance, digits=0)} are those of"
    if not found:
        return f"No point of {join(lost)} has its {rule} within {percent(evidence.tolerance, digits=0)}."
    return f"{lead} {join(found)}{f'; none of {join(lost)} does' if lost else ''}."


def _named(evidence: Evidence, cell: Cell) -> str:
    return f"{cell.series.label}{_at(evidence, cell)}"


def _spot_remarks(spot: SweetSpot, symbol: str, redrawn: SpotInterval | None) -> str:
    remarks = [f"the largest {symbol} tested"] if spot.at_edge else []
    if spot.exceptions:
        remarks.append(f"although {join([axis_value(x) for x in spot.exceptions])} did not qualify")
    if redrawn is not None:
        bounds = ["not identified" if bound is None else axis_value(bound) for bound in (redrawn.low, redrawn.high)]
        span = f"{symbol} {bounds[0]} to {bounds[1]}" if bounds[0] != bounds[1] else f"{symbol} {bounds[0]}"
        remarks.append(f"95 % bootstrap over seeds: {span}; the same in {percent(redrawn.same, digits=0)} of resamples")
    return f" ({'; '.join(remarks)})" if remarks else ""


def _between_methods(analysis: Analysis) -> str:
    """The subject against the full-model baseline at equal x, as a range of paired differences."""
    evidence, ours, theirs = analysis.evidence, subject(analysis.evidence), baseline(analysis.evidence)
    if ours is None or theirs is None or theirs == evidence.reference:
        return ""
    sign = 1.0 if evidence.smaller_is_better else -1.0
    gaps: list[float] = []
    for cell in evidence.cells_of(ours):
        other = same_x(evidence, theirs, cell.x)
        if other is not None:
            pairs = paired_differences(cell.values(evidence.metric), other.values(evidence.metric), relative=True)
            gaps += [sign * mean(list(pairs.values()))] if pairs else []
    if not gaps:
        return ""
    lead = f"At equal {axis_symbol(evidence.x_path or '')}, " if evidence.x_values else ""
    metric = metric_name(evidence.metric)
    span = f"{ours.label}'s {metric} ended {_span(gaps, evidence)} {theirs.label}'s"
    return f"{lead}{span} (means of paired differences)."


def _span(gaps: list[float], evidence: Evidence) -> str:
    """ "0.1 % to 1.7 % above", "0.2 % below to 1.1 % above": positive gaps are worse."""
    worse, better = ("above", "below") if evidence.smaller_is_better else ("below", "above")
    low, high = min(gaps), max(gaps)
    if len(gaps) == 1 or low == high:
        return f"{percent(abs(low))} {worse if low >= 0 else better}"
    if low < 0 <= high:
        return f"between {percent(-low)} {better} and {percent(high)} {worse}"
    near, far = sorted((abs(low), abs(high)))
    return f"{percent(near)} to {percent(far)} {worse if low >= 0 else better}"


def _trust(analysis: Analysis) -> str:
    """What the sample can carry: one seed, or the reference's own spread over seeds."""
    evidence = analysis.evidence
    sizes = {comparison.n for comparison in analysis.comparisons}
    if sizes == {1}:
        return (
            "With one seed no interval can be given, and a difference smaller than the spread between seeds cannot be"
            " told from chance."
        )
    reference = evidence.reference
    values = list(evidence.cells_of(reference)[0].values(evidence.metric).values()) if reference else []
    spread = standard_deviation(values)
    smallest = min((c.test.smallest_p for c in analysis.comparisons), default=1.0)
    floor = noise_floor(values)
    noise = (
        f"Seeds of {reference.arm} alone differ by {percent(spread / abs(mean(values)))} (standard deviation), so that"
        f" another {count(len(values), 'seed')} of it could differ by {percent(floor / abs(mean(values)))} (noise floor"
        " of an unpaired comparison); "
        if spread is not None and floor is not None and reference is not None
        else ""
    )
    return f"{noise}with {max(sizes, default=0)} seeds no sign-flip p below {significant(smallest, 2)} can be reached."


def key_numbers(analysis: Analysis) -> tuple[KeyNumber, ...]:
    """At most five numbers to take away; none when nothing finished."""
    evidence, chosen = analysis.evidence, subject(analysis.evidence)
    if not evidence.done or chosen is None:
        return ()
    numbers: list[KeyNumber] = []
    comparison = headline(analysis, chosen)
    cell = comparison.cell if comparison else next((c for c in evidence.cells_of(chosen) if c.done), None)
    if comparison is not None and evidence.reference is not None:
        where = f"{chosen.label} against {evidence.reference.arm}{_at(evidence, comparison.cell)}"
        value = percent(comparison.interval.mean, signed=True)
        numbers.append(KeyNumber(value=value, meaning=f"{metric_name(evidence.metric)}, {where}"))
    if chosen in analysis.spots:
        spot = analysis.spots[chosen]
        value = "not identified" if spot is None else setting(evidence.x_path, spot.x)
        meaning = f"sweet spot of {chosen.label} at {percent(evidence.tolerance, digits=0)} tolerance"
        numbers.append(KeyNumber(value=value, meaning=meaning))
    against = baseline(evidence) or evidence.reference
    other = same_x(evidence, against, cell.x) if against is not None and cell is not None else None
    if cell is not None and against is not None:
        for metric, what in (
            ("comm/uplink_gb", "uplink bytes"),
            ("mem/trained_state_gb", "trained-state memory"),
        ):
            if (share := ratio(cell, other, metric)) is not None:
                numbers.append(
                    KeyNumber(value=_share(share), meaning=f"of {against.arm}'s {what}{_at(evidence, cell)}")
                )
    done, n = len(evidence.done), len(evidence.seeds)
    numbers.append(KeyNumber(value=f"{done}/{len(evidence.trials)}", meaning=f"trials finished, {count(n, 'seed')}"))
    return tuple(numbers)
