"""The data order is a permutation of each epoch, dealt to the parts without overlap, and a function of one integer."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.data.order import positions, sample_index

SEEDS = st.integers(0, 2**63)
GOLDEN_START = [350, 706, 332, 885, 766, 132]
GOLDEN_DIGEST = "706a100a06fbd6b6434a93232c52346e28874e2af1d9d631f38b12cfcc38ddc0"


def epoch_of(seed: int, epoch: int, num_samples: int) -> list[int]:
    return [sample_index(seed, epoch * num_samples + offset, num_samples) for offset in range(num_samples)]


@pytest.mark.parametrize("num_samples", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097, 5000])
def test_an_epoch_holds_every_sample_once(num_samples: int) -> None:
    for epoch in (0, 1):
        assert sorted(epoch_of(7, epoch, num_samples)) == list(range(num_samples))


@given(seed=SEEDS, epoch=st.integers(0, 10**6), num_samples=st.integers(1, 5000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_epoch_of_any_seed_holds_every_sample_once(seed: int, epoch: int, num_samples: int) -> None:
    assert sorted(epoch_of(seed, epoch, num_samples)) == list(range(num_samples))


@given(seed=SEEDS, num_samples=st.integers(10**6, 10**15), start=st.integers(0, 10**15))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_large_corpora_never_repeat_a_sample_within_an_epoch(seed: int, num_samples: int, start: int) -> None:
    start = start % (num_samples - 300)
    seen = [sample_index(seed, start + offset, num_samples) for offset in range(300)]
    assert len(set(seen)) == 300
    assert all(0 <= sample < num_samples for sample in seen)


@given(
    seed=SEEDS,
    size=st.integers(1, 9),
    parts=st.integers(1, 7),
    num_samples=st.integers(1, 200),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_parts_together_read_each_sample_once_an_epoch(seed: int, size: int, parts: int, num_samples: int) -> None:
    batch = size * parts
    steps = -(-2 * num_samples // batch)
    read = [
        [
            sample_index(seed, place, num_samples)
            for step in range(1, steps + 1)
            for place in positions(step, p, parts, batch)
        ]
        for p in range(parts)
    ]
    places = [place for step in range(1, steps + 1) for p in range(parts) for place in positions(step, p, parts, batch)]
    assert places == list(range(steps * batch))  # disjoint, complete, in order
    counts = Counter(sample for one in read for sample in one)
    rest = steps * batch - 2 * num_samples
    assert set(counts) == set(range(num_samples))
    assert sum(count - 2 for count in counts.values()) == rest
    assert min(counts.values()) >= 2


@given(step=st.integers(1, 10**6), size=st.integers(1, 64), parts=st.integers(1, 16))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_global_batch_does_not_depend_on_how_many_share_it(step: int, size: int, parts: int) -> None:
    batch = size * parts
    together = [place for part in range(parts) for place in positions(step, part, parts, batch)]
    assert together == list(positions(step, 0, 1, batch))


def test_the_order_is_the_same_for_ever() -> None:
    text = ",".join(str(sample_index(seed, place, 1000)) for seed in (0, 1) for place in range(3000))
    assert [sample_index(0, place, 1000) for place in range(6)] == GOLDEN_START
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN_DIGEST


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = [tuple(epoch_of(seed, epoch, 100)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("num_samples", [3, 5, 10, 17])
def test_every_sample_is_equally_likely_at_every_place(num_samples: int) -> None:
    """Chi-square over (place, sample): about its degrees of freedom, (n - 1)², when orders are uniform."""
    epochs = 4000
    table = Counter((p, s) for epoch in range(epochs) for p, s in enumerate(epoch_of(11, epoch, num_samples)))
    expected = epochs / num_samples
    square = sum((table[p, s] - expected) ** 2 / expected for p in range(num_samples) for s in range(num_samples))
    freedom = (num_samples - 1) ** 2
    assert abs(square - freedom) < 4 * (2 * freedom) ** 0.5


def test_neighbours_in_the_order_are_not_neighbours_in_the_text() -> None:
    order = epoch_of(5, 0, 5000)
    following = sum(1 for a, b in pairwise(order) if b == a + 1)
    assert following < 10  # a random order has about one
