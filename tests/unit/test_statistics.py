"""Statistics of seeds: against SciPy, against exhaustive enumeration, and against simulation."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats

from workbench.statistics import (
    Interval,
    equivalence,
    holm,
    mean,
    paired_differences,
    sign_flip_test,
    standard_deviation,
    sweet_spot,
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
