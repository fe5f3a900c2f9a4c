"""What a round moves for one tensor, counted node by node."""

from __future__ import annotations

from math import prod

from spes_core.config import RunConfig
from spes_core.model.counting import tensor_shapes
from spes_core.partition import downloads


def moved(config: RunConfig, name: str) -> int:
    """Values of a tensor on the wire in one round without merge, up and down, over all nodes."""
    partition, all_changed = config.make_partition(), config.outer.kind != "none"
    size = prod(tensor_shapes(config.model)[name])
    up = sum(partition.trains(node, name) for node in range(config.nodes))
    down = [downloads(partition, n, name, experts_changed=False, all_changed=all_changed) for n in range(config.nodes)]
    return size * (up + sum(down))
