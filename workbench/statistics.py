"""What a report says about seeds: intervals, paired differences, permutation tests, the sweet spot. Pure functions.

A sample is one number per seed. An interval is about the mean over seeds and says nothing about the error of one
evaluation. Percentages are fractions here (0.02 is 2 %).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal, TypeVar

import numpy as np

Verdict = Literal["within", "outside", "inconclusive", "point within", "point outside"]
Key = TypeVar("Key", bound=Hashable)

EXACT_SIGN_FLIPS = 16
"""Largest sample whose 2ⁿ sign flips are all enumerated."""
EXACT_BOOTSTRAP = 6
"""Largest sample whose nⁿ resamples are all enumerated."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over n seeds with its interval; ``low`` and ``high`` are None where n is too small to give one."""

    mean: float
    low: float | None
    high: float | None
    n: int
    level: float = 0.95

    @property
    def upper(self) -> float:
        """The upper bound, or the point itself where there is no interval."""
        return self.mean if self.high is None else self.high


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean (exactly rounded sum); ValueError for an empty sample."""
    if not values:
        raise ValueError("the mean of no values does not exist")
    return math.fsum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n − 1); None for n < 2."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's interval of the mean: mean ± t((1 + level)/2, n − 1) · s/√n. Without bounds for n = 1."""
    centre, spread, n = mean(values), standard_deviation(values), len(values)
    if spread is None:
        return Interval(mean=centre, low=None, high=None, n=n, level=level)
    half = t_quantile((1 + level) / 2, n - 1) * spread / math.sqrt(n)
    return Interval(mean=centre, low=centre - half, high=centre + half, n=n, level=level)


def bootstrap_interval(values: Sequence[float], level: float = 0.95, resamples: int = 10_000) -> Interval:
    """Percentile bootstrap interval of the mean: quantiles of the means of samples drawn from ``values``.

    All nⁿ resamples are enumerated up to n = 6; above that a seeded sample of them is drawn. It covers less than
    ``level`` where n is small (about 0.75 at n = 3), so it stands beside Student's interval and never for it.
    """
    centre, n = mean(values), len(values)
    if n < 2:
        return Interval(mean=centre, low=None, high=None, n=n, level=level)
    means = np.asarray(values, dtype=float)[_resamples(n, resamples)].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return Interval(mean=centre, low=float(low), high=float(high), n=n, level=level)


def _resamples(n: int, drawn: int) -> np.ndarray:
    """Indices of resamples of n values, one row each."""
    if n <= EXACT_BOOTSTRAP:
        return np.array(list(product(range(n), repeat=n)))
    return np.random.default_rng(0).integers(n, size=(drawn, n))


def noise_floor(values: Sequence[float], level: float = 0.95) -> float | None:
    """How far the mean of n other seeds of the same arm may lie from this one by chance; None for n < 2.

    t((1 + level)/2, n − 1) · s·√(2/n), Student's prediction for the mean of a second, unpaired sample of n values.
    """
    spread, n = standard_deviation(values), len(values)
    return None if spread is None else t_quantile((1 + level) / 2, n - 1) * spread * math.sqrt(2 / n)


def paired_differences(
    values: Mapping[Key, float], reference: Mapping[Key, float], *, relative: bool = False
) -> dict[Key, float]:
    """value − reference for every seed that both have, divided by the reference where ``relative``."""
    return {
        seed: (value - reference[seed]) / (abs(reference[seed]) if relative else 1.0)
        for seed, value in values.items()
        if seed in reference
    }


@dataclass(frozen=True, kw_only=True)
class SignFlip:
    """Two-sided sign-flip permutation test of a zero mean; no p below ``smallest_p`` can be reached with n values."""

    p: float
    smallest_p: float
    n: int
    exact: bool


def sign_flip_test(differences: Sequence[float], resamples: int = 20_000, seed: int = 0) -> SignFlip:
    """Share of sign assignments whose |mean| is at least the observed one.

    All 2ⁿ are enumerated up to n = 16, so the smallest p is 2/2ⁿ; above that a seeded sample of them is drawn, and
    the observed assignment counts as one of it.
    """
    n = len(differences)
    if n == 0:
        raise ValueError("a sign-flip test needs at least one difference")
    sample = np.asarray(differences, dtype=float)
    observed = abs(float(sample.sum()))
    slack = 1e-12 * max(1.0, float(np.abs(sample).sum()))
    if n <= EXACT_SIGN_FLIPS:
        signs = np.array(list(product((1.0, -1.0), repeat=n)))
        p = float(np.mean(np.abs(signs @ sample) >= observed - slack))
        return SignFlip(p=p, smallest_p=min(1.0, 2.0 / 2.0**n), n=n, exact=True)
    signs = np.random.default_rng(seed).choice((1.0, -1.0), size=(resamples, n))
    extreme = int(np.sum(np.abs(signs @ sample) >= observed - slack))
    return SignFlip(p=(extreme + 1) / (resamples + 1), smallest_p=1 / (resamples + 1), n=n, exact=False)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment, in the order given: controls the family-wise error over all of them."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def equivalence(difference: Interval, tolerance: float) -> Verdict:
    """Whether a loss increase stays within ``tolerance``: by its interval, or by the point alone at n = 1.

    "within": the whole interval is at or below the tolerance. "outside": all of it is above.
    """
    if difference.low is None or difference.high is None:
        return "point within" if difference.mean <= tolerance else "point outside"
    if difference.high <= tolerance:
        return "within"
    return "outside" if difference.low > tolerance else "inconclusive"


@dataclass(frozen=True, kw_only=True)
class SweetSpot:
    """The largest x that stays within the tolerance.

    ``at_edge``: it is the largest x tested, so the true one may lie beyond. ``exceptions``: smaller x that do not
    stay within the tolerance themselves.
    """

    x: float
    at_edge: bool
    exceptions: tuple[float, ...]


def sweet_spot(differences: Sequence[tuple[float, Interval]], tolerance: float) -> SweetSpot | None:
    """The largest x whose upper bound of the loss increase stays within ``tolerance``; None: not identified.

    With one seed everywhere the points decide. Where some x have an interval, an x without one cannot qualify: one
    lucky seed is not evidence of the kind that the others had to give.
    """
    ordered = sorted(differences, key=lambda item: item[0])
    with_intervals = any(interval.high is not None for _, interval in ordered)
    qualifies = [
        interval.upper <= tolerance and (interval.high is not None or not with_intervals) for _, interval in ordered
    ]
    if not any(qualifies):
        return None
    last = max(index for index, holds in enumerate(qualifies) if holds)
    return SweetSpot(
        x=ordered[last][0],
        at_edge=last == len(ordered) - 1,
        exceptions=tuple(ordered[index][0] for index in range(last) if not qualifies[index]),
    )


@dataclass(frozen=True, kw_only=True)
class SpotInterval:
    """Where the sweet spot lands when the seeds are drawn anew; None as a bound: not identified."""

    low: float | None
    high: float | None
    same: float
    """Share of resamples that give the same sweet spot as all seeds together."""
    none: float
    """Share of resamples in which none is identified."""
    n: int


def sweet_spot_interval(
    differences: Mapping[float, Mapping[Key, float]], tolerance: float, level: float = 0.95, resamples: int = 4_000
) -> SpotInterval | None:
    """Percentile bootstrap of `sweet_spot` over seeds, which are drawn jointly for every x; None for one seed.

    ``differences``: the relative loss increase by x and seed. In every resample the rule is applied anew: the largest
    x whose upper bound of Student's interval stays within ``tolerance``. "Not identified" counts as below every x.
    """
    places = sorted(differences)
    seeds = list(dict.fromkeys(seed for by_seed in differences.values() for seed in by_seed))
    if len(seeds) < 2:
        return None
    table = np.array([[differences[x].get(seed, math.nan) for x in places] for seed in seeds])
    table[:, (~np.isnan(table)).sum(axis=0) < 2] = math.nan  # one seed drawn thrice is no evidence of three
    observed = int(_largest_within(table[None], tolerance)[0])
    found = np.sort(_largest_within(table[_resamples(len(seeds), resamples)], tolerance))
    low, high = (
        found[min(len(found) - 1, math.ceil(share * len(found)) - 1)] for share in ((1 - level) / 2, (1 + level) / 2)
    )
    return SpotInterval(
        low=None if low < 0 else places[low],
        high=None if high < 0 else places[high],
        same=float(np.mean(found == observed)),
        none=float(np.mean(found < 0)),
        n=len(seeds),
    )


def _largest_within(samples: np.ndarray, tolerance: float) -> np.ndarray:
    """Index of the largest x that qualifies in each sample (samples, seeds, x); −1 where none does."""
    known = ~np.isnan(samples)
    n = known.sum(axis=1)
    total = np.where(known, samples, 0.0).sum(axis=1)
    centre = total / np.maximum(n, 1)
    squares = np.where(known, (samples - centre[:, None, :]) ** 2, 0.0).sum(axis=1)
    factor = np.array([math.nan, math.nan, *(t_quantile(0.975, m - 1) for m in range(2, samples.shape[1] + 1))])
    upper = centre + factor[n] * np.sqrt(squares / np.maximum(n - 1, 1) / np.maximum(n, 1))
    within = upper <= tolerance  # NaN, where fewer than two seeds are known, is never within
    return np.where(within.any(axis=1), samples.shape[2] - 1 - within[:, ::-1].argmax(axis=1), -1)


@cache
def t_quantile(probability: float, degrees: float) -> float:
    """Inverse of Student's distribution function, 0 < probability < 1, by bisection on `t_cdf`."""
    if not 0 < probability < 1:
        raise ValueError(f"probability ({probability}) must lie between 0 and 1, both excluded")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        high *= 2
    while high - low > 1e-12 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, degrees: float) -> float:
    """Student's distribution function: 1 − I(ν/(ν + t²); ν/2, 1/2)/2 for t ≥ 0."""
    if degrees <= 0:
        raise ValueError(f"degrees of freedom ({degrees}) must be above 0")
    tail = _regularized_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2
    return 1 - tail if t >= 0 else tail


def _regularized_beta(x: float, a: float, b: float) -> float:
    """I(x; a, b) by its continued fraction, on the side where that converges quickly."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _regularized_beta(1 - x, b, a)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / (a * _beta_fraction(x, a, b))


def _beta_fraction(x: float, a: float, b: float) -> float:
    """1 + d₁/(1 + d₂/(1 + …)), the fraction of the incomplete beta function (DLMF 8.17.22), bottom up."""
    fraction = 1.0
    for m in range(200, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + even / (1 + odd / fraction)
    return 1 - (a + b) * x / (a + 1) / fraction
