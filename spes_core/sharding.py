"""Which server has which tensors: a run's tensors dealt to the servers that share its work (``server.shards``).

Tensors whose new values are formed together stay together. Each server holds its own in canonical order, and what it
computes of them depends on no other tensor: so the number of servers changes no bit.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from spes_core.names import expert_of, parse_expert
from spes_core.partition import Partition


@dataclass(frozen=True)
class Group:
    """Tensors whose new values are formed together: one shared tensor, or all experts of one layer."""

    tensors: tuple[int, ...]
    """Indices into the tensors that were grouped, consecutive."""
    layer: int | None
    """The layer whose experts these are; None for a shared tensor."""


def groups_of(names: Sequence[str]) -> tuple[Group, ...]:
    """The groups of tensors that are named in canonical order."""

    def key(index: int) -> tuple[bool, int]:
        parsed = parse_expert(names[index])
        return (False, index) if parsed is None else (True, parsed[0])

    return tuple(
        Group(tuple(indices), layer if is_experts else None)
        for (is_experts, layer), indices in groupby(range(len(names)), key)
    )


def deal(
    shapes: Mapping[str, tuple[int, ...]], shards: int, partition: Partition, *, all_changed: bool = False
) -> tuple[tuple[str, ...], ...]:
    """The names of each server's tensors, in canonical order; the same for everyone who asks.

    Whole groups go, the largest first, to the server that has the least by then (the first of several). A group is as
    large as the values that a round without merge moves for it: up from all who train it, down to all who lack it.
    ``shapes`` are those of all tensors in canonical order; ``all_changed`` says that an outer optimizer steps. Where
    groups are too few for so many servers, the last ones have none.
    """
    names = list(shapes)
    groups = groups_of(names)
    values = moved_values(shapes, partition, all_changed=all_changed)
    moved = [sum(values[names[index]] for index in group.tensors) for group in groups]
    loads = [0] * shards
    dealt: list[list[int]] = [[] for _ in range(shards)]
    for place in sorted(range(len(groups)), key=lambda place: (-moved[place], place)):
        shard = min(range(shards), key=lambda shard: (loads[shard], shard))
        loads[shard] += moved[place]
        dealt[shard] += groups[place].tensors
    return tuple(tuple(names[index] for index in sorted(indices)) for indices in dealt)


def moved_values(
    shapes: Mapping[str, tuple[int, ...]], partition: Partition, *, all_changed: bool = False
) -> dict[str, int]:
    """How many values of each tensor a round without merge moves over all nodes, both ways.

    As `partition.downloads` has it for each node, a tensor goes down to all but who alone trained it.
    """
    owners = Counter(expert for experts in partition.experts_by_node for expert in experts)
    nodes, moved = partition.num_nodes, {}
    for name, shape in shapes.items():
        expert = expert_of(name)
        trainers = nodes if expert is None else owners[expert]
        lacking = nodes if all_changed or trainers != 1 else nodes - 1
        moved[name] = prod(shape) * (trainers + lacking)
    return moved


def server_names(shards: int) -> tuple[str, ...]:
    """The servers of a run as processes and participants are called: "server", or "server-0-of-2" and so on."""
    return ("server",) if shards == 1 else tuple(f"server-{shard}-of-{shards}" for shard in range(shards))


def is_server(process: str) -> bool:
    """Whether a process or participant is a server, by its name."""
    return process.partition("-")[0] == "server"


def joined_digest(digests: Sequence[str]) -> str:
    """The digest of a round: that of the one server, or BLAKE2b-64 (hex) of those of several, one after another."""
    return digests[0] if len(digests) == 1 else hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
