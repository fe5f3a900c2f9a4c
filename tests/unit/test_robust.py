"""What each rule does to a few values, and which nodes are put in quarantine."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from spes_core.config import AggregateConfig, from_dict
from spes_core.errors import ConfigError
from spes_core.sync.aggregate import make_scratch
from spes_core.sync.robust import UpdateLength, _comparators, clip_scales, combine, needs_lengths, quarantined

SCRATCH = make_scratch()


def combined(rule: str, values: list[float], *, tokens: list[int] | None = None, **settings: float) -> float:
    """What becomes of one value that was 0 before."""
    aggregate = AggregateConfig(rule=rule, **settings)  # type: ignore[arg-type]
    scales = clip_scales([abs(value) for value in values], aggregate.clip_factor)
    old, out = np.zeros(1, dtype=np.float32), np.empty(1, dtype=np.float32)
    chunks = [np.array([value], dtype=np.float32) for value in values]
    combine(aggregate.rule, old, chunks, tokens or [1] * len(values), aggregate, scales, out, SCRATCH)
    return float(out[0])


def test_each_rule_by_hand() -> None:
    values = [1.0, 2.0, 3.0, -100.0]
    assert combined("mean", values) == -23.5
    assert combined("trimmed", values) == 1.5
    assert combined("median", values) == 1.5
    # The lower middle length is 2, so 3 and -100 count as 2 and -2.
    assert combined("clipped", values) == 0.75
    assert combined("clipped", values, clip_factor=2.0) == 0.5
    assert combined("clipped", values, clip_factor=50.0) == -23.5
    assert combined("median", [5.0, 1.0, 9.0]) == 5.0
    assert combined("trimmed", [5.0, 1.0, 9.0], trim_fraction=0.34) == 5.0


def test_mean_and_clipped_weigh_by_tokens_and_the_others_do_not() -> None:
    values, tokens = [0.0, 8.0, 4.0], [2, 1, 1]
    assert combined("mean", values, tokens=tokens) == 3.0
    assert combined("clipped", values, tokens=tokens, clip_factor=2.0) == 3.0
    assert combined("trimmed", values, tokens=tokens, trim_fraction=0.34) == 4.0
    assert combined("median", [0.0, 8.0, 4.0, 100.0], tokens=[10, 1, 1, 1]) == 6.0


@pytest.mark.parametrize("rule", ["mean", "clipped", "trimmed", "median"])
def test_one_trainer_passes_and_two_have_their_token_mean(rule: str) -> None:
    """One value cannot be outvoted by itself, nor one of two by the other; their updates here are equally long."""
    assert math.copysign(1, combined(rule, [-0.0])) == -1
    assert combined(rule, [7.0], tokens=[3]) == 7.0
    assert combined(rule, [-4.0, 4.0], tokens=[3, 1]) == -2.0


def test_a_trim_fraction_that_cuts_nobody_is_the_token_mean() -> None:
    assert combined("trimmed", [0.0, 0.0, 8.0], tokens=[1, 1, 2], trim_fraction=0.25) == 4.0


@pytest.mark.parametrize(("fraction", "nodes", "cut"), [(0.29, 100, 29), (0.1, 10, 1), (0.3, 10, 3), (0.4999, 4, 1)])
def test_the_trimmed_share_is_rounded_down_to_whole_nodes(fraction: float, nodes: int, cut: int) -> None:
    values = [1000.0 * (n + 1) if n >= nodes - cut else 0.0 for n in range(nodes)]
    assert combined("trimmed", values, trim_fraction=fraction) == 0.0
    values[nodes - cut - 1] = 1000.0
    assert combined("trimmed", values, trim_fraction=fraction) > 0.0


def test_a_tie_of_zeros_of_both_signs_is_plus_zero() -> None:
    for values in itertools.permutations([0.0, -0.0, -0.0, 0.0, -1e-45]):
        for rule in ("trimmed", "median"):
            assert math.copysign(1, combined(rule, list(values))) == 1


def test_an_update_that_is_not_clipped_passes_bitwise() -> None:
    """old + (x − old) would not always be x."""
    old, value = np.array([1e8], dtype=np.float32), np.array([1e-8], dtype=np.float32)
    out = np.empty(1, dtype=np.float32)

    def clip(*scales: float) -> bytes:
        values, tokens = [value] * len(scales), [1] * len(scales)
        combine("clipped", old, values, tokens, AggregateConfig(rule="clipped"), scales, out, SCRATCH)
        return out.tobytes()

    assert clip(1.0, 1.0) == value.tobytes()
    assert clip(0.0, 0.0) == old.tobytes()
    assert clip(0.0) == value.tobytes()  # with one trainer there is nobody to compare it with


def test_clip_scales_by_hand() -> None:
    assert clip_scales([1.0, 2.0, 4.0], 1.0) == (1.0, 1.0, 0.5)
    assert clip_scales([1.0, 2.0, 4.0, 8.0], 2.0) == (1.0, 1.0, 1.0, 0.5)
    assert clip_scales([2.0, 1.0], 1.0) == (0.5, 1.0)
    assert clip_scales([3.0], 1.0) == (1.0,)
    assert clip_scales([1.0, math.nan, 1.0], 1.0) == (1.0, 0.0, 1.0)
    assert clip_scales([0.0, 0.0, 5.0], 1.0) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("lengths", "out"),
    [
        ([1.0, 1.1, 0.9, 50.0], (3,)),
        ([50.0, 1.1, 0.9, 60.0], (0, 3)),
        ([1.0, 3.0, 1.0], ()),
        ([1.0, 3.001, 1.0], (1,)),
        ([1.0, 100.0], ()),
        ([1.0, math.nan, 1.0, math.inf], (1, 3)),
        ([math.inf, math.inf, math.inf, 1.0], ()),
        ([0.0, 0.0, 1.0], (2,)),
        ([0.0, 0.0, 0.0], ()),
        ([2.0] * 5, ()),
    ],
)
def test_quarantine_takes_those_beyond_the_factor_times_the_median(lengths: list[float], out: tuple[int, ...]) -> None:
    assert quarantined(lengths, 3.0) == out


def test_a_node_is_judged_by_the_part_in_which_it_stands_out_most() -> None:
    shared, experts = [1.0, 1.0, 1.0, 9.0, 1.0], [1.0, 70.0, 1.0, 1.0, 1.0]
    assert quarantined(shared, 3.0) == (3,)
    assert quarantined(shared, 3.0, experts) == (1, 3)
    # Not more than half of the nodes together: the ones that stand out least stay.
    assert quarantined([1.0, 1.0, 9.0], 3.0, [1.0, 70.0, 1.0]) == (1,)


def test_lengths_are_needed_for_clipping_and_for_quarantine() -> None:
    assert not needs_lengths(AggregateConfig(rule="median"))
    assert needs_lengths(AggregateConfig(rule="clipped"))
    assert needs_lengths(AggregateConfig(rule="mean", quarantine_factor=5.0))


def test_the_length_of_an_update_is_over_all_tensors() -> None:
    update = UpdateLength()
    update.add(np.zeros(3, dtype=np.float32), np.array([0, 3, 0], dtype=np.float32), 0)
    update.add(np.ones(2, dtype=np.float32), np.array([5, 1], dtype=np.float32), 0)
    assert update.length == 5.0
    assert UpdateLength().length == 0.0


@pytest.mark.parametrize("count", range(1, 10))
def test_the_comparators_sort_every_row_of_zeros_and_ones(count: int) -> None:
    """Which by the 0-1 principle (Knuth 5.3.4, theorem Z) makes them sort everything."""
    for bits in itertools.product((0, 1), repeat=count):
        row = list(bits)
        for low, high in _comparators(count):
            if row[low] > row[high]:
                row[low], row[high] = row[high], row[low]
        assert row == sorted(bits)


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"rule": "trimmed", "trim_fraction": 0.24}, "aggregate.trim_fraction"),
        ({"quarantine_factor": 0.9}, "aggregate.quarantine_factor"),
    ],
)
def test_a_rule_that_would_do_nothing_or_the_opposite_is_refused(settings: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        from_dict({"nodes": 4, "aggregate": settings})


def test_two_nodes_have_no_outlier() -> None:
    with pytest.raises(ConfigError, match=r"quarantine_factor.*at least 3 nodes"):
        from_dict({"nodes": 2, "aggregate": {"quarantine_factor": 3.0}})


@pytest.mark.parametrize("nodes", range(3, 41))
def test_a_trim_fraction_of_one_node_is_allowed_and_cuts_one(nodes: int) -> None:
    batch = {"data": {"global_batch_sequences": 4 * nodes}}
    config = from_dict({"nodes": nodes, "aggregate": {"rule": "trimmed", "trim_fraction": 1 / nodes}, **batch})
    values = [0.0] * (nodes - 1) + [1000.0]
    assert combined("trimmed", values, trim_fraction=config.aggregate.trim_fraction) == 0.0
