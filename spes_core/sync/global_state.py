"""The global weights as the server holds them: one flat float32 buffer, allocated once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
import xxhash

from spes_core.config import OuterConfig
from spes_core.names import expert_tensor, parse_expert
from spes_core.sharding import Group
from spes_core.sync.codec import Values
from spes_core.sync.merge import merge_layer
from spes_core.sync.messages import Schema


class GlobalState:
    """All tensors of the global model end to end in canonical order, with what the server keeps from round to round.

    Memory: the values; as much again for the outer optimizer's velocity, if it has one, and for what a codec with
    error feedback has not yet told (in pages that were ever written).
    """

    def __init__(
        self,
        schema: Schema,
        outer: OuterConfig,
        initial: Callable[[str], Values],
        *,
        has_residual: bool = False,
        momentum: Values | None = None,
        residual: Values | None = None,
    ) -> None:
        """``initial(name)`` gives the flat initial value of a tensor; a resumed run also gives what it stored."""
        self._schema = schema
        self.starts = tuple(accumulate((spec.num_elements for spec in schema), initial=0))
        """Position of each tensor's first value; one more entry for the end."""
        self.values = np.empty(self.starts[-1], dtype=np.float32)
        for index, spec in enumerate(schema):
            self.tensor(index)[:] = initial(spec.name)
        self.momentum: Values | None = None
        """Velocity of the outer optimizer, like ``values``; None when it has none."""
        if outer.kind == "nesterov":
            self.momentum = np.zeros_like(self.values) if momentum is None else momentum
        self.residual: Values | None = None
        """What the published values lack of the true ones; None when the codec keeps nothing back."""
        if has_residual:
            self.residual = np.zeros(self.starts[-1], dtype=np.float32) if residual is None else residual

    def tensor(self, index: int) -> Values:
        """The global value of one tensor, flat, as a view."""
        return self.values[self.starts[index] : self.starts[index + 1]]

    def span(self, group: Group) -> slice:
        """The positions of a group's values."""
        return slice(self.starts[group.tensors[0]], self.starts[group.tensors[-1] + 1])

    def digest(self) -> str:
        """XXH3-64 (hex) of all values in canonical order, little-endian."""
        return xxhash.xxh3_64_hexdigest(self.values.data.cast("B"))

    def merge(self, layer: int, num_neighbours: int, alpha: float) -> None:
        """Merge the experts of one layer in place."""
        merge_layer(self.bank(layer, "gate_up"), self.bank(layer, "down"), num_neighbours, alpha)

    def bank(self, layer: int, matrix: str) -> torch.Tensor:
        """One matrix of all experts of a layer as (E, P): a strided view, for experts lie at equal distances.

        Needs two experts.
        """
        num_experts = sum(
            parsed[0] == layer and parsed[2] == matrix
            for spec in self._schema
            if (parsed := parse_expert(spec.name)) is not None
        )
        index_of = {spec.name: index for index, spec in enumerate(self._schema)}
        indices = [index_of[expert_tensor(layer, expert, matrix)] for expert in range(num_experts)]
        starts = [self.starts[index] for index in indices]
        stride = starts[1] - starts[0]
        assert starts == [starts[0] + stride * expert for expert in range(num_experts)]
        flat = torch.from_numpy(self.values)
        return flat.as_strided((num_experts, self._schema[indices[0]].num_elements), (stride, 1), starts[0])
