"""Statistics of seeds: against SciPy, against exhaustive enumeration, and against simulation."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats

from workbench.statistics import (
    Interval,
    bootstrap_interval,
    equivalence,
    holm,
    mean,
    noise_floor,
    paired_differences,
    sign_flip_test,
    standard_deviation,
    sweet_spot,
    sweet_spot_interval,
    t_cdf,
    t_interval,
    t_quantile,
)


def interval(centre: float, half: float | None) -> Interval:
    if half is None:
        return Interval(mean=centre, low=None, high=None, n=1)
    return Interval(mean=centre, low=centre - half, high=centre + half, n=3)


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 40, 1000])
@pytest.mark.parametrize("probability", [0.001, 0.3, 0.5, 0.9, 0.975, 0.9995])
def test_student_quantiles_equal_scipys(probability: float, degrees: int) -> None:
    expected = scipy.stats.t.ppf(probability, degrees)
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-8, abs=1e-9)
    assert t_cdf(expected, degrees) == pytest.approx(probability, rel=1e-10)


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_t_interval_equals_scipys(n: int) -> None:
    values = list(np.random.default_rng(n).normal(3.4, 0.02, n))
    expected = scipy.stats.t.interval(0.95, n - 1, loc=np.mean(values), scale=scipy.stats.sem(values))
    found = t_interval(values)
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-8)
    assert (found.mean, found.n) == (pytest.approx(np.mean(values)), n)
    assert standard_deviation(values) == pytest.approx(np.std(values, ddof=1))


def test_one_value_has_a_mean_but_no_interval() -> None:
    found = t_interval([3.5])
    assert (found.mean, found.low, found.high, found.n) == (3.5, None, None, 1)
    assert found.upper == 3.5
    assert standard_deviation([3.5]) is None


def test_no_values_have_no_mean() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean([])


def test_t_interval_covers_the_true_mean_in_95_percent_of_small_samples() -> None:
    samples = np.random.default_rng(7).normal(1.0, 0.3, size=(2_000, 3))
    intervals = [t_interval(list(sample)) for sample in samples]
    covered = [found.low <= 1.0 <= found.high for found in intervals if found.low and found.high]
    assert len(covered) == 2_000
    assert np.mean(covered) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2_000))


def test_differences_pair_only_seeds_that_both_sides_have() -> None:
    ours, theirs = {0: 3.3, 1: 3.5, 2: 3.6}, {0: 3.0, 2: 3.2, 9: 1.0}
    assert paired_differences(ours, theirs) == pytest.approx({0: 0.3, 2: 0.4})
    assert paired_differences(ours, theirs, relative=True) == pytest.approx({0: 0.1, 2: 0.125})


@pytest.mark.parametrize("values", [[0.1, 0.2, 0.3], [0.5, -0.1, 0.2, 0.4], [0.3], [0.0, 0.0]])
def test_sign_flip_p_is_the_share_of_assignments_at_least_as_extreme(values: list[float]) -> None:
    sums = [abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
            for signs in product((1, -1), repeat=len(values))]  # fmt: skip
    expected = sum(total >= abs(sum(values)) - 1e-12 for total in sums) / len(sums)
    found = sign_flip_test(values)
    assert (found.p, found.exact, found.n) == (pytest.approx(expected), True, len(values))


def test_sign_flip_p_equals_scipys_permutation_test() -> None:
    values = np.random.default_rng(3).normal(0.4, 1, 9)
    expected = scipy.stats.permutation_test(
        (values,), np.mean, permutation_type="samples", alternative="two-sided", n_resamples=np.inf
    )
    assert sign_flip_test(list(values)).p == pytest.approx(expected.pvalue)


def test_smallest_sign_flip_p_of_three_seeds_is_a_quarter() -> None:
    found = sign_flip_test([0.1, 0.2, 0.3])
    assert found.p == found.smallest_p == 0.25
    assert sign_flip_test([0.1]).smallest_p == 1.0


def test_large_samples_are_flipped_at_random_near_the_exact_p() -> None:
    values = list(np.random.default_rng(5).normal(0.35, 1, 30))
    found = sign_flip_test(values)
    assert not found.exact
    assert found == sign_flip_test(values)
    assert found.p == pytest.approx(scipy.stats.ttest_1samp(values, 0).pvalue, abs=0.01)


def test_holm_multiplies_step_by_step_and_never_decreases() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_keeps_the_family_wise_error_below_the_level() -> None:
    p_values = np.random.default_rng(11).uniform(size=(2_000, 5))
    wrong = np.mean([min(holm(list(row))) <= 0.05 for row in p_values])
    assert wrong <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 2_000)
    assert np.mean(p_values.min(axis=1) <= 0.05) > 0.2


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (interval(0.010, 0.005), "within"),
        (interval(0.010, 0.010), "within"),
        (interval(0.010, 0.015), "inconclusive"),
        (interval(0.030, 0.005), "outside"),
        (interval(-0.010, 0.005), "within"),
        (interval(0.010, None), "point within"),
        (interval(0.030, None), "point outside"),
    ],
)
def test_equivalence_needs_the_whole_interval(difference: Interval, expected: str) -> None:
    assert equivalence(difference, 0.02) == expected


def test_sweet_spot_is_the_largest_x_whose_upper_bound_stays_within() -> None:
    points = [(50, interval(0.012, 0.012)), (10, interval(0.001, 0.002)), (25, interval(0.010, 0.004))]
    spot = sweet_spot(points, 0.02)
    assert spot is not None
    assert (spot.x, spot.at_edge, spot.exceptions) == (25, False, ())


def test_sweet_spot_of_one_seed_goes_by_the_points() -> None:
    spot = sweet_spot([(10, interval(0.001, None)), (50, interval(0.019, None))], 0.02)
    assert spot is not None
    assert (spot.x, spot.at_edge) == (50, True)


def test_sweet_spot_is_not_identified_when_no_upper_bound_stays_within() -> None:
    assert sweet_spot([(10, interval(0.01, 0.02)), (50, interval(0.03, None))], 0.02) is None
    assert sweet_spot([], 0.02) is None


def test_one_lucky_seed_is_no_sweet_spot_beside_intervals() -> None:
    spot = sweet_spot([(10, interval(0.001, 0.002)), (50, interval(0.001, None))], 0.02)
    assert spot is not None
    assert (spot.x, spot.at_edge) == (10, False)


def test_smaller_x_that_fail_are_named_as_exceptions() -> None:
    points = [(10, interval(0.03, 0.001)), (25, interval(0.01, 0.001)), (50, interval(0.05, 0.001))]
    spot = sweet_spot(points, 0.02)
    assert spot is not None
    assert (spot.x, spot.exceptions) == (25, (10,))


@pytest.mark.parametrize("n", [3, 5, 12])
def test_bootstrap_interval_equals_scipys(n: int) -> None:
    values = np.random.default_rng(n).normal(3.4, 0.02, n)
    expected = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    found = bootstrap_interval(list(values))
    assert (found.low, found.high) == pytest.approx(tuple(expected), abs=0.05 * values.std(ddof=1))
    assert found == bootstrap_interval(list(values))
    assert bootstrap_interval([3.4]).low is None


@pytest.mark.parametrize(("n", "least", "most"), [(3, 0.65, 0.85), (20, 0.90, 0.955)])
def test_bootstrap_interval_covers_as_its_docstring_says(n: int, least: float, most: float) -> None:
    samples = np.random.default_rng(2).normal(1.0, 0.3, size=(400, n))
    intervals = [bootstrap_interval(list(sample), resamples=1_000) for sample in samples]
    covered = np.mean([i.low is not None and i.high is not None and i.low <= 1.0 <= i.high for i in intervals])
    assert least < covered < most


def test_noise_floor_is_passed_by_chance_in_one_of_twenty_repetitions_of_an_arm() -> None:
    draws = np.random.default_rng(3).normal(3.4, 0.02, size=(2_000, 2, 4))
    passed = [abs(mean(list(a)) - mean(list(b))) > (noise_floor(list(a)) or 0.0) for a, b in draws]
    assert np.mean(passed) == pytest.approx(0.05, abs=4 * math.sqrt(0.95 * 0.05 / 2_000))
    assert noise_floor([3.4]) is None


def brute_sweet_spot(points: dict[float, list[float]], tolerance: float) -> float | None:
    within = [x for x, values in points.items() if t_interval(values).upper <= tolerance]
    return max(within, default=None)


def test_sweet_spot_interval_applies_the_rule_to_every_resample_of_the_seeds() -> None:
    draws = np.random.default_rng(8).normal(0, 0.003, size=(3, 3))
    points = {x: {s: 0.005 * k + draws[s, k] for s in range(3)} for k, x in enumerate((10.0, 20.0, 40.0))}
    spots = [
        brute_sweet_spot({x: [by_seed[s] for s in drawn] for x, by_seed in points.items()}, 0.011)
        for drawn in product(range(3), repeat=3)
    ]
    ordered = sorted(-math.inf if spot is None else spot for spot in spots)
    found = sweet_spot_interval(points, 0.011)
    assert found is not None
    assert (found.low or -math.inf, found.high or -math.inf) == (ordered[0], ordered[-1])
    observed = brute_sweet_spot({x: list(by_seed.values()) for x, by_seed in points.items()}, 0.011)
    assert found.same == pytest.approx(spots.count(observed) / 27)
    assert found.none == pytest.approx(spots.count(None) / 27)
    assert len(set(spots)) > 1


def test_sweet_spot_interval_needs_two_seeds_and_copes_with_missing_ones() -> None:
    assert sweet_spot_interval({10.0: {0: 0.001}}, 0.02) is None
    found = sweet_spot_interval({10.0: {0: 0.001, 1: 0.002, 2: 0.001}, 20.0: {0: 0.001}}, 0.02)
    assert found is not None
    assert (found.low, found.high, found.none) == (10.0, 10.0, 0.0)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_sweet_spot_interval_holds_the_true_spot_in_most_samples(share: float) -> None:
    """True increases 0, half a per cent, one and three per cent: the true spot at 2 % is the third x."""
    draws = np.random.default_rng(4).normal(0, 0.002 * share, size=(200, 5, 4))
    true = np.array([0.0, 0.005, 0.01, 0.03])
    hits = 0
    for draw in draws:
        points = {float(10 * 2**k): {s: float(true[k] + draw[s, k]) for s in range(5)} for k in range(4)}
        found = sweet_spot_interval(points, 0.02)
        assert found is not None
        hits += found.low is not None and found.high is not None and found.low <= 40.0 <= found.high
    assert hits / 200 > 0.9
