"""The global weights as the server holds them: one flat float32 buffer, allocated once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
import xxhash
from torch import Tensor

from spes_core.config import OuterConfig
from spes_core.names import expert_tensor, parse_expert
from spes_core.sync.aggregate import outer_step
from spes_core.sync.codec import Values
from spes_core.sync.merge import merge_layer
from spes_core.sync.messages import Schema


class GlobalState:
    """All tensors of the global model end to end in canonical order, and the mean that is being formed.

    ``values`` are the global weights, ``mean`` takes the running mean of the open round. Without an outer optimizer
    they are the same memory: a tensor's old value is not needed once its first new one arrives.
    """

    def __init__(
        self, schema: Schema, outer: OuterConfig, initial: Callable[[str], Values], momentum: Values | None = None
    ) -> None:
        """``initial(name)`` gives the flat initial value of a tensor; a resumed run also gives its ``momentum``."""
        self._schema, self._outer = schema, outer
        self.starts = tuple(accumulate((spec.num_elements for spec in schema), initial=0))
        """Position of each tensor's first value; one more entry for the end."""
        self.values = np.empty(self.starts[-1], dtype=np.float32)
        for index, spec in enumerate(schema):
            self.tensor(index)[:] = initial(spec.name)
        # Written once now, so that no round pays for the page faults.
        self.mean = self.values if outer.kind == "none" else self.values.copy()
        self.momentum: Values | None = None
        """Velocity of the outer optimizer, like ``values``; None when it has none."""
        if outer.kind == "nesterov":
            self.momentum = np.zeros_like(self.values) if momentum is None else momentum

    def tensor(self, index: int) -> Values:
        """The global value of one tensor, flat, as a view."""
        return self.values[self.starts[index] : self.starts[index + 1]]

    def adopt_mean(self) -> None:
        """Turn the complete mean into the new global weights, through the outer optimizer when there is one."""
        if self._outer.kind != "none":
            outer_step(self.values, self.mean, self.momentum, self._outer)

    def merge(self, num_neighbours: int, alpha: float) -> None:
        """Merge the experts of every layer in place."""
        flat = torch.from_numpy(self.values)
        for layer, num_experts in sorted(self._experts_by_layer().items()):
            banks = [self._bank(flat, layer, num_experts, matrix) for matrix in ("gate_up", "down")]
            merge_layer(banks[0], banks[1], num_neighbours, alpha)

    def digest(self) -> str:
        """XXH3-64 (hex) of all values in canonical order, little-endian."""
        return xxhash.xxh3_64_hexdigest(self.values.data.cast("B"))

    def _experts_by_layer(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for spec in self._schema:
            if (parsed := parse_expert(spec.name)) and parsed[2] == "down":
                counts[parsed[0]] = counts.get(parsed[0], 0) + 1
        return counts

    def _bank(self, flat: Tensor, layer: int, num_experts: int, matrix: str) -> Tensor:
        """One matrix of all experts of a layer as (E, P): a strided view, for experts lie at equal distances."""
        index_of = {spec.name: index for index, spec in enumerate(self._schema)}
        indices = [index_of[expert_tensor(layer, expert, matrix)] for expert in range(num_experts)]
        starts = [self.starts[index] for index in indices]
        stride = starts[1] - starts[0]
        assert starts == [starts[0] + stride * expert for expert in range(num_experts)]
        return flat.as_strided((num_experts, self._schema[indices[0]].num_elements), (stride, 1), starts[0])
