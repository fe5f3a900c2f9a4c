"""Who trains what: the one thing in which the methods differ.

A partition gives each node a set of experts to train; every node trains the shared tensors. The new value of a
tensor after a round is the token-weighted mean over the nodes that trained it, so a sparse partition is SPES, a
full one is DiLiCo (FedAvg), and one node is plain training.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from spes_core.names import expert_of

PartitionKind = Literal["sparse", "full"]


@dataclass(frozen=True)
class Partition:
    """An assignment of experts to nodes: ``experts_by_node[n]`` are the experts that node n trains, ascending."""

    num_experts: int
    experts_by_node: tuple[tuple[int, ...], ...]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.experts_by_node)

    def owners(self, expert: int) -> tuple[int, ...]:
        """The nodes that train one expert, ascending; never empty in the partition that a run begins with."""
        return tuple(node for node, experts in enumerate(self.experts_by_node) if expert in experts)

    def trainers(self, name: str) -> tuple[int, ...]:
        """The nodes that train the tensor called ``name``, ascending: all of them when it is shared."""
        expert = expert_of(name)
        return tuple(range(self.num_nodes)) if expert is None else self.owners(expert)

    def trains(self, node: int, name: str) -> bool:
        """Whether ``node`` trains the tensor called ``name``."""
        expert = expert_of(name)
        return expert is None or expert in self.experts_by_node[node]


def changes(partition: Partition, present: Collection[int], name: str, *, experts_changed: bool) -> bool:
    """Whether a round changes the tensor called ``name`` when the nodes ``present`` take part in it.

    What nobody trained keeps its value, unless ``experts_changed`` says that experts were merged.
    """
    if experts_changed and expert_of(name) is not None:
        return True
    return any(node in present for node in partition.trainers(name))


def downloads(partition: Partition, node: int, name: str, *, experts_changed: bool, all_changed: bool) -> bool:
    """Whether ``node`` must be sent the tensor called ``name`` when a round changes it.

    A node already holds the new global value of a tensor that it alone trained, unless the server changed it after
    the mean: ``experts_changed`` says that experts were merged, ``all_changed`` that an outer optimizer stepped. The
    server sends by this rule, the node expects by it, and `counting` predicts bytes from it.
    """
    if all_changed or partition.trainers(name) != (node,):
        return True
    return experts_changed and expert_of(name) is not None


def reassigned(partition: Partition, absent: Collection[int]) -> Partition:
    """``partition`` while the nodes ``absent`` train nothing: experts that would have no owner go, one after another,
    to the present node that then has the fewest (the lowest of several). Somebody must be present.
    """
    if not absent:
        return partition
    experts = {node: set(owned) for node, owned in enumerate(partition.experts_by_node) if node not in absent}
    assert experts
    for expert in range(partition.num_experts):
        if not any(expert in owned for owned in experts.values()):
            experts[min(experts, key=lambda node: (len(experts[node]), node))].add(expert)
    runs = (tuple(sorted(experts.get(node, ()))) for node in range(partition.num_nodes))
    return Partition(partition.num_experts, tuple(runs))


def sparse(num_experts: int, num_nodes: int) -> Partition:
    """Divide the experts in contiguous runs whose sizes differ by at most one.

    With more nodes than experts every node trains one expert and each expert has several owners, whose numbers
    differ by at most one.
    """
    assert num_experts >= 1 and num_nodes >= 1
    runs = []
    for node in range(num_nodes):
        first = node * num_experts // num_nodes
        end = max((node + 1) * num_experts // num_nodes, first + 1) if num_nodes <= num_experts else first + 1
        runs.append(tuple(range(first, end)))
    return Partition(num_experts, tuple(runs))


def full(num_experts: int, num_nodes: int) -> Partition:
    """Give every expert to every node."""
    assert num_experts >= 1 and num_nodes >= 1
    return Partition(num_experts, (tuple(range(num_experts)),) * num_nodes)


def make_partition(kind: PartitionKind, num_experts: int, num_nodes: int) -> Partition:
    """The partition of the given kind."""
    return {"sparse": sparse, "full": full}[kind](num_experts, num_nodes)
