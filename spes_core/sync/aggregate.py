"""The mean over nodes, taken value by value as uploads arrive, and the outer step that follows it.

Every operation is one correctly rounded float32 operation per element (no fused multiply-add), so the result does not
depend on how tensors are cut into chunks, nor on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spes_core.config import OuterConfig
from spes_core.sync.codec import Values

BLOCK_ELEMENTS = 1 << 18
"""Values handled at a time: 1 MiB, so that a block is still in cache for the next operation on it."""


def make_scratch() -> Values:
    """Working memory for the functions below; one for each thread."""
    return np.empty(BLOCK_ELEMENTS, dtype=np.float32)


def add_to_mean(mean: Values, values: Values, weight: int, weight_before: int, scratch: Values) -> None:
    """Take ``values`` with ``weight`` into ``mean``, in place: m ← m + (x − m)·w/W with W = weight_before + weight.

    ``weight_before`` is the weight that ``mean`` has so far; at 0 the values are copied, so one contribution passes
    bitwise, and equal contributions give themselves.
    """
    assert mean.size == values.size and weight >= 1
    if weight_before == 0:
        mean[:] = values
        return
    share = np.float32(weight / (weight_before + weight))
    for part in _blocks(mean.size):
        difference = np.subtract(values[part], mean[part], out=scratch[: part.stop - part.start])
        np.multiply(difference, share, out=difference)
        np.add(mean[part], difference, out=mean[part])


def outer_step(values: Values, mean: Values, momentum: Values | None, outer: OuterConfig) -> None:
    """Move ``values`` (the old global weights) in place, with g = old − mean as the gradient.

    sgd: w ← w − lr·g. nesterov (DiLoCo, arXiv 2311.08105): v ← μ·v + g, w ← w − lr·(g + μ·v); ``momentum`` holds v,
    zeros at first. ``mean`` is overwritten.
    """
    lr, mu = np.float32(outer.lr), np.float32(outer.momentum)
    for part in _blocks(values.size):
        gradient = np.subtract(values[part], mean[part], out=mean[part])
        if momentum is not None:
            velocity = momentum[part]
            np.multiply(velocity, mu, out=velocity)
            np.add(velocity, gradient, out=velocity)
            gradient = np.add(gradient, velocity * mu, out=gradient)
        np.multiply(gradient, lr, out=gradient)
        np.subtract(values[part], gradient, out=values[part])


def _blocks(size: int) -> Iterator[slice]:
    for start in range(0, size, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, size))
