"""Which server has which tensors: `spes_core.sharding`, and the rules that come with several servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from spes_core.config import (
    AggregateConfig,
    FaultsConfig,
    ModelConfig,
    OuterConfig,
    ParallelConfig,
    PartitionConfig,
    RoundConfig,
    RunConfig,
    ServerConfig,
    check,
    digest,
)
from spes_core.model.counting import tensor_shapes, tensors_by_shard
from spes_core.names import layer_of, parse_expert
from spes_core.sharding import is_server, joined_digest, moved_values, server_names
from tests.reference.moved import moved
from tests.small_rounds import MODEL, small_config

DEEP = replace(MODEL, num_layers=8, d_model=32, expert_hidden=32)


def sharded(shards: int, model: ModelConfig = DEEP, **changes: Any) -> RunConfig:
    return replace(small_config(), model=model, server=ServerConfig(shards=shards), **changes)


@settings(max_examples=40, deadline=None)
@given(
    layers=some.integers(1, 9),
    experts=some.integers(2, 9),
    nodes=some.integers(1, 6),
    kind=some.sampled_from(("sparse", "full")),
    outer=some.sampled_from(("none", "nesterov")),
    tied=some.booleans(),
    data=some.data(),
)
def test_every_tensor_has_one_server_and_what_is_formed_together_stays_together(
    layers: int, experts: int, nodes: int, kind: Any, outer: Any, tied: bool, data: some.DataObject
) -> None:
    shards = data.draw(some.integers(1, layers))
    model = replace(MODEL, num_layers=layers, num_experts=experts, tie_embeddings=tied)
    config = replace(
        sharded(shards, model), nodes=nodes, partition=PartitionConfig(kind=kind), outer=OuterConfig(kind=outer)
    )
    dealt, whole = tensors_by_shard(config), list(tensor_shapes(model))
    assert sorted(name for names in dealt for name in names) == sorted(whole)
    assert all(names and list(names) == [name for name in whole if name in names] for names in dealt)
    for layer in range(layers):
        holders = [
            {parsed[0] for name in names if (parsed := parse_expert(name)) and parsed[0] == layer} for names in dealt
        ]
        assert sum(map(bool, holders)) == 1
    counted = {name: moved(config, name) for name in whole}
    assert moved_values(tensor_shapes(model), config.make_partition(), all_changed=outer != "none") == counted
    loads = [sum(counted[name] for name in names) for names in dealt]
    # Greedy dealing leaves no server ahead of another by more than the last group that it got.
    assert max(loads) - min(loads) <= max(
        sum(counted[name] for name in whole if _group(name) == group) for group in set(map(_group, whole))
    )


def _group(name: str) -> str:
    return name if parse_expert(name) is None else f"experts of {layer_of(name)}"


@pytest.mark.parametrize("shards", (2, 4, 8))
def test_servers_get_about_equally_much(shards: int) -> None:
    loads = [sum(moved(sharded(shards), name) for name in names) for names in tensors_by_shard(sharded(shards))]
    assert max(loads) < 1.1 * sum(loads) / shards


def test_the_number_of_servers_is_no_part_of_a_runs_identity() -> None:
    assert digest(sharded(4)) == digest(sharded(1))


def test_names_of_servers() -> None:
    assert server_names(1) == ("server",)
    assert server_names(2) == ("server-0-of-2", "server-1-of-2")
    assert all(map(is_server, ("server", *server_names(3)))) and not any(map(is_server, ("node-0", "torchrun")))


def test_one_servers_digest_is_the_rounds_and_those_of_several_are_told_apart_by_order() -> None:
    assert joined_digest(["ab"]) == "ab"
    assert len({joined_digest(["a", "b"]), joined_digest(["b", "a"]), joined_digest(["a", "c"])}) == 3


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"server": ServerConfig(shards=9)}, "server.shards", "at most model.num_layers (8)"),
        ({"server": ServerConfig(shards=0)}, "server.shards", "at least 1"),
        ({"round": RoundConfig(quorum=0.5)}, "round.quorum", "must be 1.0 where server.shards (2) is above 1"),
        ({"aggregate": AggregateConfig(rule="clipped")}, "aggregate.rule", 'must not be "clipped"'),
        (
            {"nodes": 3, "aggregate": AggregateConfig(quarantine_factor=3.0)},
            "aggregate.quarantine_factor",
            "must be null",
        ),
        ({"faults": FaultsConfig(kind="noise", scale=1.0)}, "faults.kind", 'must be "none"'),
        ({"parallel": ParallelConfig(ranks_per_node=2)}, "parallel.ranks_per_node", "must be 1"),
    ],
)
def test_what_several_servers_cannot_do_is_refused(changes: dict[str, Any], path: str, words: str) -> None:
    found = check(replace(sharded(2), **changes))
    assert [problem.path for problem in found] == [path]
    assert words in found[0].message
    if changes.get("server") is None:
        assert "set server.shards to 1" in found[0].message
        assert not check(replace(sharded(1), **changes))
