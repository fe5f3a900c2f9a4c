"""Robust means equal their twins, bound what one node can do, and depend on no cut and no order of arrival."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.config import AggregateConfig
from spes_core.sync.aggregate import BLOCK_ELEMENTS, add_to_mean, make_scratch
from spes_core.sync.codec import USABLE
from spes_core.sync.robust import UpdateLength, clip_scales, combine, quarantined
from tests.reference.robust_float64 import clipped_mean, trimmed_mean

SCRATCH = make_scratch()
RULES = ("mean", "clipped", "trimmed", "median")
EPS = float(np.finfo(np.float32).eps)

BOUND = float(USABLE)
floats32 = st.floats(-BOUND, BOUND, width=32) | st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.0, 1.0, -1.0])
SIZE = 4


def columns(min_nodes: int, max_nodes: int = 9) -> st.SearchStrategy[list[np.ndarray]]:
    """Values of several nodes, full of ties, zeros of both signs and extremes."""
    one = st.lists(floats32, min_size=SIZE, max_size=SIZE).map(lambda row: np.array(row, dtype=np.float32))
    return st.lists(one, min_size=min_nodes, max_size=max_nodes)


def normal(seed: int, size: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def length_of(old: np.ndarray, values: np.ndarray, cuts: list[int] | None = None) -> float:
    update = UpdateLength()
    for start, end in itertools.pairwise([0, *(cuts or []), old.size]):
        update.add(old[start:end], values[start:end], start)
    return update.length


def combined(
    old: np.ndarray,
    values: list[np.ndarray],
    aggregate: AggregateConfig,
    tokens: list[int] | None = None,
    cuts: list[int] | None = None,
) -> np.ndarray:
    tokens = tokens or [1] * len(values)
    scales = clip_scales([length_of(old, one) for one in values], aggregate.clip_factor)
    out = np.full_like(old, np.nan)
    for start, end in itertools.pairwise([0, *(cuts or []), old.size]):
        part = slice(start, end)
        chunks = [one[part] for one in values]
        combine(aggregate.rule, old[part], chunks, tokens, aggregate, scales, out[part], SCRATCH)
    return out


@given(st.lists(st.tuples(st.integers(1, 10**12), st.integers(0, 2**32)), min_size=1, max_size=7))
@settings(max_examples=50, deadline=None)
def test_the_mean_is_bitwise_that_of_add_to_mean(parts: list[tuple[int, int]]) -> None:
    tokens, values = [weight for weight, _ in parts], [normal(seed, 100) for _, seed in parts]
    expected, before = np.empty(100, dtype=np.float32), 0
    for one, weight in zip(values, tokens, strict=True):
        add_to_mean(expected, one, weight, before, SCRATCH)
        before += weight
    got = combined(normal(1, 100), values, AggregateConfig(rule="mean"), tokens)
    assert got.tobytes() == expected.tobytes()


@given(columns(3))
@settings(max_examples=50, deadline=None)
def test_the_median_is_that_of_numpy(values: list[np.ndarray]) -> None:
    got = combined(np.zeros(SIZE, dtype=np.float32), values, AggregateConfig(rule="median"))
    np.testing.assert_array_equal(got, np.median(np.stack(values), axis=0))


@given(columns(3), st.sampled_from([0.1, 0.2, 0.25, 0.34, 0.45]))
@settings(max_examples=50, deadline=None)
def test_the_trimmed_mean_is_that_of_scipy_and_of_the_twin(values: list[np.ndarray], fraction: float) -> None:
    got = combined(np.zeros(SIZE, dtype=np.float32), values, AggregateConfig(rule="trimmed", trim_fraction=fraction))
    stacked = np.stack(values).astype(np.float64)
    scale = np.abs(stacked).max(axis=0)
    cut = int(fraction * len(values))
    if cut:
        scale = np.abs(np.sort(stacked, axis=0)[cut : len(values) - cut]).max(axis=0)
    for expected in (scipy.stats.trim_mean(stacked, fraction, axis=0), trimmed_mean(values, cut)):
        assert (np.abs(got - expected) <= len(values) * EPS * scale + 1e-44).all()


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e3), st.integers(0, 2**32)), min_size=2, max_size=7),
    st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(max_examples=50, deadline=None)
def test_the_clipped_mean_is_that_of_the_twin(parts: list[tuple[int, float, int]], factor: float) -> None:
    old = normal(0, 60)
    values = [old + normal(seed + 1, 60, scale) for _, scale, seed in parts]
    tokens = [weight for weight, _, _ in parts]
    got = combined(old, values, AggregateConfig(rule="clipped", clip_factor=factor), tokens)
    largest = max(float(np.abs(one).max()) for one in [old, *values])
    error = np.abs(got - clipped_mean(old, values, tokens, factor)).max()
    assert error <= 4 * len(parts) * EPS * largest


@given(columns(3), st.integers(0, 8), st.lists(floats32, min_size=SIZE, max_size=SIZE))
@settings(max_examples=60, deadline=None)
def test_one_arbitrary_node_cannot_leave_the_range_of_the_others(
    honest: list[np.ndarray], position: int, nonsense: list[float]
) -> None:
    """Also after rounding. Nor does a node's claim to have processed many tokens help it."""
    values = list(honest)
    values.insert(position % (len(honest) + 1), np.array(nonsense, dtype=np.float32))
    tokens = [1] * len(values)
    tokens[position % len(values)] = 10**15
    lowest, highest = np.min(honest, axis=0), np.max(honest, axis=0)
    for aggregate in (AggregateConfig(rule="median"), AggregateConfig(rule="trimmed", trim_fraction=0.25)):
        got = combined(np.zeros(SIZE, dtype=np.float32), values, aggregate, tokens)
        assert (lowest <= got).all() and (got <= highest).all()


@given(st.integers(0, 2**32), st.floats(0.1, 1e20), st.integers(2, 6), st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=80, deadline=None)
def test_under_clipped_a_node_moves_the_mean_at_most_by_its_share_of_the_longest_honest_update(
    seed: int, scale: float, num_honest: int, factor: float
) -> None:
    old = np.zeros(80, dtype=np.float32)
    honest = [normal(seed + n, 80) for n in range(num_honest)]
    outlier = normal(seed + 77, 80, scale)
    aggregate = AggregateConfig(rule="clipped", clip_factor=factor)
    got = combined(old, [*honest, outlier], aggregate)
    longest = factor * max(float(np.linalg.norm(one)) for one in honest)
    assert float(np.linalg.norm(got)) <= longest * (1 + 1e-5)


@given(columns(1), st.permutations(range(9)))
@settings(max_examples=40, deadline=None)
def test_order_of_nodes_changes_no_bit_of_trimmed_and_median(values: list[np.ndarray], order: list[int]) -> None:
    """Nor does it where zeros of both signs tie. Mean and clipped keep the order of node ids instead."""
    if len(values) < 3:
        values = [*values, *values, *values]
    shuffled = [values[n] for n in order if n < len(values)]
    for aggregate in (AggregateConfig(rule="median"), AggregateConfig(rule="trimmed", trim_fraction=0.4)):
        old = np.zeros(SIZE, dtype=np.float32)
        assert combined(old, shuffled, aggregate).tobytes() == combined(old, values, aggregate).tobytes()


@pytest.mark.parametrize("rule", RULES)
@given(
    seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 299), unique=True, max_size=6).map(sorted),
    factor=st.sampled_from([0.5, 1.0]),
)
@settings(max_examples=30, deadline=None)
def test_cutting_into_chunks_changes_no_bit(rule: str, seeds: list[int], cuts: list[int], factor: float) -> None:
    old, values = normal(1, 300), [normal(seed, 300, 1 + n) for n, seed in enumerate(seeds)]
    for one in values:
        one[::7] = 0.0
        one[3::11] = -0.0
    tokens = [1 + seed % 1000 for seed in seeds]
    aggregate = AggregateConfig(rule=rule, clip_factor=factor)  # type: ignore[arg-type]
    whole = combined(old, values, aggregate, tokens)
    assert combined(old, values, aggregate, tokens, cuts).tobytes() == whole.tobytes()
    assert np.isfinite(whole).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_tensor_of_several_blocks_is_as_block_by_block(rule: str) -> None:
    size = BLOCK_ELEMENTS + 5
    old, values = normal(9, size), [normal(n, size, 1 + n) for n in range(3)]
    aggregate = AggregateConfig(rule=rule, trim_fraction=0.34)  # type: ignore[arg-type]
    whole = combined(old, values, aggregate, [3, 1, 2])
    cuts = [7, BLOCK_ELEMENTS // 4, BLOCK_ELEMENTS // 2 + 1, BLOCK_ELEMENTS]
    assert combined(old, values, aggregate, [3, 1, 2], cuts).tobytes() == whole.tobytes()


@given(columns(1, 1), st.sampled_from(RULES), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_equal_contributions_give_themselves(values: list[np.ndarray], rule: str, num_nodes: int) -> None:
    aggregate = AggregateConfig(rule=rule)  # type: ignore[arg-type]
    got = combined(normal(0, SIZE), values * num_nodes, aggregate)
    np.testing.assert_array_equal(got, values[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 31])
def test_the_largest_usable_values_keep_the_result_finite(rule: str, nodes: int) -> None:
    values = [np.array([USABLE, -USABLE * (-1) ** n], dtype=np.float32) for n in range(nodes)]
    aggregate = AggregateConfig(rule=rule)  # type: ignore[arg-type]
    assert np.isfinite(combined(np.array([-USABLE, USABLE]), values, aggregate)).all()


@given(st.integers(0, 2**32), st.floats(1e-20, 1e20), st.lists(st.integers(1, 40_000), max_size=5).map(sorted))
@settings(max_examples=50, deadline=None)
def test_the_length_of_an_update_depends_on_no_cut_and_equals_the_exact_one(
    seed: int, scale: float, cuts: list[int]
) -> None:
    old, values = normal(seed, 40_001, scale), normal(seed + 1, 40_001, scale)
    got = length_of(old, values)
    assert length_of(old, values, cuts) == got
    difference = (values - old).astype(np.float64)
    assert math.isclose(got, math.sqrt(math.fsum(difference * difference)), rel_tol=1e-14)


lengths_of_nodes = st.lists(
    st.floats(0, 1e30) | st.sampled_from([0.0, 1.0, math.nan, math.inf]), min_size=1, max_size=9
)


@given(lengths_of_nodes, st.sampled_from([0.5, 1.0, 4.0]))
def test_clipping_makes_no_update_longer_and_none_longer_than_the_bound(lengths: list[float], factor: float) -> None:
    scales = clip_scales(lengths, factor)
    finite = sorted(length if math.isfinite(length) else math.inf for length in lengths)
    longest = factor * finite[(len(finite) - 1) // 2]
    for length, scale in zip(lengths, scales, strict=True):
        assert 0 <= scale <= 1
        if math.isfinite(length):
            assert length * scale <= longest * (1 + 1e-12) or math.isinf(longest)
        else:
            assert scale == 0


@given(lengths_of_nodes, st.sampled_from([1.0, 3.0]), st.randoms())
def test_quarantine_spares_half_and_whoever_is_not_longer_than_the_median(
    lengths: list[float], factor: float, random: object
) -> None:
    out = quarantined(lengths, factor)
    assert len(out) <= len(lengths) // 2 and len(set(out)) == len(out) and list(out) == sorted(out)
    if len(lengths) < 3:
        assert out == ()
    infinite = [length if math.isfinite(length) else math.inf for length in lengths]
    kept = [length for node, length in enumerate(infinite) if node not in out]
    assert all(infinite[node] >= max(sorted(kept)[: len(lengths) - len(lengths) // 2]) for node in out)
