"""A node that misbehaves on purpose (faults.kind): what it sends is not what it trained.

Its copy of the weights is spoilt just before a round, so that everything after it goes as with any other node: it
sends what it holds, adopts what comes back and trains on from there. Where the round gives it nothing back, because it
alone trains an expert, the spoilt value is the global one.
"""

from __future__ import annotations

import math

import numpy as np

from spes_core.config import RunConfig
from spes_core.sync.codec import Values
from spes_core.train.weights import Weights


class Fault:
    """Spoils one node's update: w ← g + f(w − g), g being the weights at the round's beginning, tensor by tensor.

    noise: f(d) has a random direction and scale · |d| as its length. sign_flip: f(d) = −scale · d. scale: f(d) =
    scale · d. A function of seed, node, round and tensor, and of nothing else, so a node that repeats a round after a
    crash sends the same bytes. Keeps a copy of all weights, which no memory figure counts.
    """

    def __init__(self, weights: Weights, node: int, config: RunConfig) -> None:
        self._weights, self._node, self._seed, self._faults = weights, node, config.seed, config.faults
        self._sizes = [math.prod(shape) for shape in weights.shapes.values()]
        self._global: list[Values] = []

    def remember(self) -> None:
        """Keep the weights as they are: the global ones, right after joining and after each round."""
        if not self._global:
            self._global = [np.empty(size, dtype=np.float32) for size in self._sizes]
        for index, kept in enumerate(self._global):
            kept[:] = self._weights.read(index)

    def apply(self, round: int) -> None:
        """Spoil what was trained since `remember`, from faults.from_round on; what was not trained stays bitwise."""
        if round < self._faults.from_round:
            return
        assert self._global, "remember comes first"
        for index, old in enumerate(self._global):
            update = self._weights.read(index) - old
            if np.any(update):
                self._weights.write(index, 0, old + self._spoil(update, round, index))

    def _spoil(self, update: Values, round: int, index: int) -> Values:
        if self._faults.kind == "noise":
            rng = np.random.default_rng((self._seed, self._node, round, index))
            noise = rng.standard_normal(update.size, dtype=np.float32)
            return noise * np.float32(self._faults.scale * _length(update) / _length(noise))
        sign = {"sign_flip": -1, "scale": 1}[self._faults.kind]
        return update * np.float32(sign * self._faults.scale)


def make_fault(weights: Weights, node: int, config: RunConfig) -> Fault | None:
    """The fault of one node; None for all others, and in runs without faults."""
    if config.faults.kind == "none" or config.faults.node != node:
        return None
    return Fault(weights, node, config)


def _length(values: Values) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))
