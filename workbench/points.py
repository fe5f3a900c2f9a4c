"""What the trials of a search's points say together: means over seeds, constraints, ranks, the Pareto front. Pure.

A sample maps seeds to the ``metrics`` of a result. Everything is about the seeds that a point has finished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.statistics import Interval, SweetSpot, mean, paired_differences, sweet_spot, t_interval

if TYPE_CHECKING:
    from workbench.searchspace import Constraint, Objective

Sample = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A point's objectives and its constraints, in the search's order."""

    values: tuple[float, ...]
    violations: tuple[float, ...]
    """How far each constraint is broken; 0 or below where it is kept."""

    @property
    def feasible(self) -> bool:
        """Whether every constraint is kept."""
        return all(violation <= 0 for violation in self.violations)


def score(
    sample: Sample, reference: Sample, objectives: Sequence[Objective], constraints: Sequence[Constraint]
) -> Scored:
    """The scores of a point. Raises ValueError, with the reason, where the results do not hold what is asked for."""
    return Scored(
        values=tuple(mean(_numbers(sample, objective.metric)) for objective in objectives),
        violations=tuple(_violation(constraint, sample, reference) for constraint in constraints),
    )


def front(scores: Sequence[Scored], objectives: Sequence[Objective]) -> list[int]:
    """Indices of the feasible points that no other feasible point beats in one objective and equals in the rest."""
    ours = [(index, _signed(scored, objectives)) for index, scored in enumerate(scores) if scored.feasible]
    return [
        index
        for index, values in ours
        if not any(
            other != values and all(a <= b for a, b in zip(other, values, strict=True))
            for _, other in ours
        )
    ]  # fmt: skip


def winners(scores: Sequence[Scored], objectives: Sequence[Objective], top: int) -> list[int]:
    """Indices of the best feasible points: by their mean, or of several objectives spread along the front."""
    if len(objectives) == 1:
        feasible = [index for index, scored in enumerate(scores) if scored.feasible]
        return sorted(feasible, key=lambda index: _signed(scores[index], objectives))[:top]
    ordered = sorted(front(scores, objectives), key=lambda index: _signed(scores[index], objectives))
    if len(ordered) <= top:
        return ordered
    if top == 1:
        return [ordered[len(ordered) // 2]]
    return [ordered[round(place * (len(ordered) - 1) / (top - 1))] for place in range(top)]


def difference(sample: Sample, reference: Sample, metric: str, sign: float = 1.0) -> Interval | None:
    """The relative difference from the reference, paired by seed; None without a common seed."""
    ours, theirs = (
        {seed: metrics[metric] for seed, metrics in side.items() if metric in metrics} for side in (sample, reference)
    )
    paired = paired_differences(ours, theirs, relative=True)
    return t_interval([sign * value for value in paired.values()]) if paired else None


def confirmed_spot(differences: Sequence[tuple[float, Interval]], tolerance: float) -> SweetSpot | None:
    """The sweet spot among confirmed points; None: not identified. One seed is no interval, so it confirms nothing."""
    return sweet_spot([item for item in differences if item[1].high is not None], tolerance)


def _violation(constraint: Constraint, sample: Sample, reference: Sample) -> float:
    if constraint.tolerance is not None:
        interval = difference(sample, reference, constraint.metric)
        if interval is None or not math.isfinite(interval.mean):
            raise ValueError(f"{constraint.metric} cannot be compared: the reference has no result with these seeds")
        return interval.mean - constraint.tolerance
    value = mean(_numbers(sample, constraint.metric))
    if constraint.at_most is not None:
        return value - constraint.at_most
    assert constraint.at_least is not None
    return constraint.at_least - value


def _numbers(sample: Sample, metric: str) -> list[float]:
    """The metric with every seed."""
    numbers = [float(metrics[metric]) for metrics in sample.values() if metric in metrics]
    if len(numbers) < len(sample) or not all(map(math.isfinite, numbers)) or not numbers:
        raise ValueError(f"the results hold no finite {metric}")
    return numbers


def _signed(scored: Scored, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """The objectives such that smaller is better."""
    return tuple(
        value if objective.goal == "minimize" else -value
        for value, objective in zip(scored.values, objectives, strict=True)
    )
