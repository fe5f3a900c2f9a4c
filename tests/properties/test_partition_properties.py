"""A partition covers every expert, and what nodes hold and download adds up to the whole model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core import partition
from spes_core.names import expert_of

sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))


def names(num_experts: int) -> list[str]:
    experts = [f"layers.0.experts.{e}.{matrix}" for e in range(num_experts) for matrix in ("gate_up", "down")]
    return ["embedding", "layers.0.router", *experts, "unembedding"]


@given(sizes)
@settings(deadline=None)
def test_sparse_covers_every_expert(size: tuple[int, int]) -> None:
    num_experts, num_nodes = size
    made = partition.sparse(num_experts, num_nodes)
    assert {expert for experts in made.experts_by_node for expert in experts} == set(range(num_experts))
    assert made.num_nodes == num_nodes


@given(sizes)
@settings(deadline=None)
def test_sparse_is_disjoint_when_there_are_enough_experts(size: tuple[int, int]) -> None:
    num_experts, num_nodes = max(size), min(size)
    made = partition.sparse(num_experts, num_nodes)
    assert all(len(made.owners(expert)) == 1 for expert in range(num_experts))
    shares = {len(experts) for experts in made.experts_by_node}
    assert max(shares) - min(shares) <= 1


@given(sizes)
@settings(deadline=None)
def test_more_nodes_than_experts_share_them_evenly(size: tuple[int, int]) -> None:
    num_experts, num_nodes = min(size), max(size)
    made = partition.sparse(num_experts, num_nodes)
    assert all(len(experts) == 1 for experts in made.experts_by_node)
    owners = {len(made.owners(expert)) for expert in range(num_experts)}
    assert min(owners) >= 1 and max(owners) - min(owners) <= 1


@given(sizes)
@settings(deadline=None)
def test_full_gives_everything_to_everyone(size: tuple[int, int]) -> None:
    made = partition.full(*size)
    assert all(made.trainers(name) == tuple(range(size[1])) for name in names(size[0]))


@given(sizes, st.sampled_from(["sparse", "full"]))
@settings(deadline=None)
def test_trains_and_trainers_agree(size: tuple[int, int], kind: partition.PartitionKind) -> None:
    made = partition.make_partition(kind, *size)
    for name in names(size[0]):
        assert made.trainers(name) == tuple(node for node in range(size[1]) if made.trains(node, name))
        assert made.trainers(name) == tuple(sorted(made.trainers(name)))


@given(sizes, st.sampled_from(["sparse", "full"]))
@settings(deadline=None, max_examples=40)
def test_a_node_lacks_exactly_what_it_does_not_know(size: tuple[int, int], kind: partition.PartitionKind) -> None:
    """Unmerged, a node knows the new value of what it alone trained, and nothing else."""
    made = partition.make_partition(kind, *size)
    for name in names(size[0]):
        for node in range(size[1]):
            knows = made.trains(node, name) and len(made.trainers(name)) == 1
            lacks = partition.downloads(made, node, name, experts_changed=False, all_changed=False)
            assert lacks == (not knows)
            lacks = partition.downloads(made, node, name, experts_changed=True, all_changed=False)
            assert lacks == (not knows or expert_of(name) is not None)
            assert partition.downloads(made, node, name, experts_changed=False, all_changed=True)
