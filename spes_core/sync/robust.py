"""How the values of several nodes for one tensor become one, also when a node sends nonsense (aggregate.rule).

Every operation is one correctly rounded operation per element, in an order that only the nodes' ids decide, so the
result depends neither on how tensors are cut into chunks nor on the machine.

What the rules can do follows from how many nodes trained a tensor. One alone: its value is taken, whatever it is; only
quarantine helps against it. Two: neither can be outvoted, so "trimmed" and "median" are the token-weighted mean. From
three on a single node moves "trimmed" (where it cuts one off at each end) and "median" at most to the edge of the
others' values, and "clipped" at most by clip_factor × the median length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from spes_core.config import AggregateConfig
from spes_core.sync.aggregate import BLOCK_ELEMENTS, add_to_mean
from spes_core.sync.codec import Values

Rule = Literal["mean", "clipped", "trimmed", "median"]


def combine(
    rule: Rule,
    old: Values,
    values: Sequence[Values],
    weights: Sequence[int],
    aggregate: AggregateConfig,
    scales: Sequence[float] | None,
    out: Values,
    scratch: Values,
) -> None:
    """Write to ``out`` what becomes of one chunk: ``old`` globally, ``values`` on the nodes that trained it.

    ``rule`` is aggregate.rule, given apart so that a caller can ask for the plain mean of some tensors.
    ``values`` and ``weights`` (tokens) are in ascending order of node, values finite and at most `USABLE`; ``scales``
    are those nodes' `clip_scales`, needed by "clipped" alone. ``out`` shares no memory with the rest; ``scratch`` is
    `make_scratch`'s. One contribution passes bitwise under every rule: nothing tells whether it is too long.
    """
    assert len(values) == len(weights) >= 1 and all(one.size == old.size == out.size for one in values)
    if rule == "clipped" and len(values) > 1:
        assert scales is not None and len(scales) == len(values)
        _clipped_mean(old, values, weights, scales, out, scratch)
    elif cut := _num_cut(rule, aggregate.trim_fraction, len(values)):
        _trimmed_mean(values, cut, out, scratch)
    else:
        _token_mean(values, weights, out, scratch)


def needs_lengths(aggregate: AggregateConfig) -> bool:
    """Whether `UpdateLength` of every node must be known before the first chunk is combined."""
    return aggregate.rule == "clipped" or aggregate.quarantine_factor is not None


class UpdateLength:
    """Euclidean length of one node's update, summed in float64 chunk by chunk.

    Positions of a tensor fall into fixed lanes, each of which is summed from the tensor's start to its end, and the
    lanes are added exactly: chunks that come in order give the same bits however the tensors are cut.
    """

    LANES = 1 << 14

    def __init__(self) -> None:
        self._squares = np.zeros(self.LANES, dtype=np.float64)
        self._difference = np.empty(self.LANES, dtype=np.float32)
        self._square = np.empty(self.LANES, dtype=np.float64)

    def add(self, old: Values, values: Values, first: int) -> None:
        """Take in a chunk that begins ``first`` values into its tensor; tensors come in canonical order."""
        assert old.size == values.size
        start = 0
        while start < values.size:
            lane = (first + start) % self.LANES
            size = min(self.LANES - lane, values.size - start)
            part = slice(start, start + size)
            difference = np.subtract(values[part], old[part], out=self._difference[:size])
            # The square of a float32 is exact in float64.
            square = np.multiply(difference, difference, out=self._square[:size], dtype=np.float64)
            lanes = self._squares[lane : lane + size]
            np.add(lanes, square, out=lanes)
            start += size

    @property
    def length(self) -> float:
        """The length of all that was added; 0.0 of nothing."""
        return math.sqrt(math.fsum(self._squares))


def clip_scales(lengths: Sequence[float], clip_factor: float) -> tuple[float, ...]:
    """What each node's update is multiplied with under "clipped": min(1, clip_factor · median / length).

    ``lengths`` are of all nodes of the round and of the same tensors (those that all of them train), so that they can
    be compared. A length that is no finite number counts as infinite, and its update as nothing.
    """
    lengths = [_length(length) for length in lengths]
    longest = clip_factor * _median_length(lengths)
    return tuple(_scale(length, longest) for length in lengths)


def _scale(length: float, longest: float) -> float:
    if length == math.inf:
        return 0.0
    return 1.0 if length <= longest else longest / length


def quarantined(lengths: Sequence[float], factor: float, *more: Sequence[float]) -> tuple[int, ...]:
    """Positions of the nodes to leave out of a round: those whose update is longer than ``factor`` (at least 1) times
    the median length, where at least three nodes can be compared.

    A node in quarantine counts as absent from the round: its experts keep their last value. At most half of the nodes
    can be longer than the median, so at most half are left out. The length does not show everything: an update turned
    round is as long as before, and that is what "median" and "trimmed" are for. Each of ``more`` holds other lengths
    of the same nodes (say, of their own experts, which no rule can protect), judged alike; together they leave out at
    most half, those that stand out most.
    """
    assert factor >= 1
    count = len(lengths)
    if count < 3:
        return ()
    excess = [max(ratios) for ratios in zip(*(_ratios(part) for part in (lengths, *more)), strict=True)]
    suspects = sorted((node for node in range(count) if excess[node] > factor), key=lambda node: (-excess[node], node))
    return tuple(sorted(suspects[: count // 2]))


def _ratios(lengths: Sequence[float]) -> list[float]:
    """Each length in median lengths; of a median of 0, or an infinite one, that is 1 or infinity."""
    lengths = [_length(length) for length in lengths]
    median = _median_length(lengths)
    if 0 < median < math.inf:
        return [length / median for length in lengths]
    return [1.0 if length <= median else math.inf for length in lengths]


def _length(length: float) -> float:
    return length if math.isfinite(length) else math.inf


def _median_length(lengths: Sequence[float]) -> float:
    """The middle length; the shorter of the two middle ones of an even number, which half of the nodes cannot raise."""
    return sorted(lengths)[(len(lengths) - 1) // 2]


def _num_cut(rule: Rule, trim_fraction: float, num_values: int) -> int:
    """How many values are cut off at each end, so that at least one is left."""
    most = (num_values - 1) // 2
    if rule == "median":
        return most
    if rule == "trimmed":
        # 0.29 · 100 is below 29 in floating point.
        return min(most, math.floor(trim_fraction * num_values + 1e-9))
    return 0


def _token_mean(values: Sequence[Values], weights: Sequence[int], out: Values, scratch: Values) -> None:
    weight_before = 0
    for one, weight in zip(values, weights, strict=True):
        add_to_mean(out, one, weight, weight_before, scratch)
        weight_before += weight


def _clipped_mean(
    old: Values,
    values: Sequence[Values],
    weights: Sequence[int],
    scales: Sequence[float],
    out: Values,
    scratch: Values,
) -> None:
    """The token-weighted mean of old + scale · (value − old); a scale of 1 leaves the value as it is, bitwise."""
    half = BLOCK_ELEMENTS // 2
    for part in _blocks(old.size, half):
        clipped, weight_before = scratch[: part.stop - part.start], 0
        for one, weight, scale in zip(values, weights, scales, strict=True):
            taken = one[part]
            if scale != 1.0:
                np.subtract(one[part], old[part], out=clipped)
                np.multiply(clipped, np.float32(scale), out=clipped)
                taken = np.add(old[part], clipped, out=clipped)
            add_to_mean(out[part], taken, weight, weight_before, scratch[half:])
            weight_before += weight


def _trimmed_mean(values: Sequence[Values], cut: int, out: Values, scratch: Values) -> None:
    """Value by value the mean without the ``cut`` smallest and largest; for the middle one or two, the median.

    It is not weighted: each value loses other nodes, so weights would not be shares of anything, and the number of
    tokens is what a node says of itself. It lies between the smallest and the largest value that is left, also after
    rounding. Zeros are all +0, so that ties have one result.
    """
    count = len(values)
    rows_size = BLOCK_ELEMENTS // (count + 1)
    assert rows_size >= 1, "more nodes than the working memory has values"
    zero, num_left = np.float32(0), np.float32(count - 2 * cut)
    for part in _blocks(out.size, rows_size):
        size = part.stop - part.start
        *rows, spare = (scratch[n * rows_size : n * rows_size + size] for n in range(count + 1))
        for row, one in zip(rows, values, strict=True):
            np.add(one[part], zero, out=row)
        for low, high in _comparators(count):
            np.minimum(rows[low], rows[high], out=spare)
            np.maximum(rows[low], rows[high], out=rows[high])
            rows[low], spare = spare, rows[low]
        smallest, *others = rows[cut : count - cut]
        largest = others[-1] if others else smallest
        spare[:] = smallest
        for row in others:
            np.add(spare, row, out=spare)
        np.divide(spare, num_left, out=spare)
        np.maximum(spare, smallest, out=spare)
        np.minimum(spare, largest, out=spare)
        np.add(spare, zero, out=out[part])


@lru_cache
def _comparators(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs to put in order, one after the other, that sort ``count`` values: Batcher's merge exchange (Knuth, The Art
    of Computer Programming 3, algorithm 5.2.2M). Whole rows go through it with two operations a pair.
    """
    pairs = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return tuple(pairs)


def _blocks(size: int, block: int) -> Iterator[slice]:
    for start in range(0, size, block):
        yield slice(start, min(start + block, size))
