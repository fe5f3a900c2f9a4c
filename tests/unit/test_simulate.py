"""The simulator: small cases are arithmetic, and its answers move the right way."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.config import (
    LinkConfig,
    MergeConfig,
    OuterConfig,
    PartitionConfig,
    RunConfig,
    ServerConfig,
    SyncConfig,
    WireConfig,
)
from spes_core.link import GOODPUT, round_s
from spes_core.model.counting import round_bytes, tensor_shapes, tensors_by_shard
from spes_core.names import expert_of, layer_of
from tests.reference.moved import moved
from workbench.costs import Machine, cost, slowest_step_s
from workbench.fleet import Fleet, payloads, queue_end, server_limited_from, simulate
from workbench.simulate import main

LINK = LinkConfig(uplink_mbps=100, downlink_mbps=300, rtt_ms=20)
BASE = RunConfig(nodes=1, link=LINK, merge=MergeConfig(enabled=False), sync=SyncConfig(interval_steps=10))
FULL = replace(BASE, partition=PartitionConfig(kind="full"))
TFLOPS = 0.001


def with_nodes(config: RunConfig, nodes: int) -> RunConfig:
    """The run with so many nodes, each with the share of the batch that one had."""
    data = replace(config.data, global_batch_sequences=config.data.global_batch_sequences * nodes // config.nodes)
    return replace(config, nodes=nodes, data=data)


def fleet(nodes: int, **settings: float | None) -> Fleet:
    return replace(Fleet(nodes=nodes, device_tflops=TFLOPS, rounds=3), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 11, 16])
@pytest.mark.parametrize("kind", ["sparse", "full"])
@pytest.mark.parametrize("outer", ["none", "nesterov"])
def test_bytes_are_those_that_the_engine_counts(nodes: int, kind: str, outer: str) -> None:
    """Fewer, as many, and more nodes than the eight experts, also where they do not divide evenly."""
    config = replace(BASE, partition=PartitionConfig(kind=kind), outer=OuterConfig(kind=outer))  # type: ignore[arg-type]
    config = replace(config, wire=WireConfig(dtype="int8"))
    counted = [round_bytes(with_nodes(config, nodes), node, False) for node in range(nodes)]
    found = payloads(config, nodes)
    assert found.up.tolist() == [size.uplink_payload_bytes for size in counted]
    assert found.down.tolist() == [size.downlink_payload_bytes for size in counted]


@pytest.mark.parametrize("config", [BASE, FULL])
def test_one_node_is_arithmetic(config: RunConfig) -> None:
    size = round_bytes(config, 0, False)
    transfer_s = round_s(LINK, size.uplink_payload_bytes, size.downlink_payload_bytes)
    expected_s = 10 * slowest_step_s(config, TFLOPS) + transfer_s
    found = simulate(config, fleet(1))
    assert found.round_s == pytest.approx(expected_s, rel=1e-12)
    assert found.utilisation == pytest.approx(10 * slowest_step_s(config, TFLOPS) / expected_s)
    assert found.tokens_per_s == pytest.approx(10 * config.tokens_per_step / expected_s)


@pytest.mark.parametrize("nodes", [2, 4, 8, 12])
def test_equal_nodes_on_an_unlimited_server_are_the_plan(nodes: int) -> None:
    config = with_nodes(BASE, nodes)
    planned = cost(config, Machine(device_tflops=TFLOPS))
    found = simulate(BASE, fleet(nodes))
    assert found.round_s == pytest.approx(10 * planned.step_s + group_by_group_s(config), rel=1e-12)
    assert found.server_s == 0
    # The plan takes the larger direction to hide the other but for its last group.
    assert 0 <= found.round_s - 10 * planned.step_s - planned.round_s < 0.5 * planned.round_s


def groups(config: RunConfig) -> list[list[str]]:
    """Names of the tensors that are sent back together."""
    found: list[list[str]] = []
    kind: object = ()
    for name in tensor_shapes(config.model):
        mine = layer_of(name) if expert_of(name) is not None else None
        if not found or mine != kind:
            found.append([])
        kind = mine
        found[-1].append(name)
    return found


def group_by_group_s(config: RunConfig) -> float:
    """A round's transfers, one group after another: it comes down when all have sent it and the one before is there."""
    partition, shapes = config.make_partition(), tensor_shapes(config.model)
    rates = [link_mbps * 1e6 / 8 * GOODPUT for link_mbps in (LINK.uplink_mbps or 0, LINK.downlink_mbps or 0)]
    sent_s, here_s = [0.0] * config.nodes, [0.0] * config.nodes
    for group in groups(config):
        for node in range(config.nodes):
            mine = sum(4 * math.prod(shapes[name]) for name in group if partition.trains(node, name))
            sent_s[node] += mine / rates[0]
        for node in range(config.nodes):
            alone = {n for n in group if [k for k in range(config.nodes) if partition.trains(k, n)] == [node]}
            lacks = sum(4 * math.prod(shapes[name]) for name in group if name not in alone)
            here_s[node] = max(here_s[node], max(sent_s)) + lacks / rates[1]
    return max(here_s) + 3 * 0.02


def of_a_tree(config: RunConfig, up: float, down: float, nodes: int = 64) -> float:
    """Bytes that a tree's slowest servers move one after another: ``up`` and ``down`` in all, group by group."""
    sizes, shapes = payloads(config, nodes), tensor_shapes(config.model)
    one_up, one_down = float(sizes.up[0]), float(sizes.down[0])
    most, sent, left = 0.0, 0.0, one_down
    for group in groups(config):
        size = sum(4 * math.prod(shapes[name]) for name in group)
        is_shared = expert_of(group[0]) is None
        sent += size if is_shared else size * (one_up - sizes.shared) / sizes.experts
        most = max(most, sent / one_up * up + left / one_down * down)
        left -= size if is_shared else size * (one_down - sizes.shared) / sizes.experts
    return most


def test_what_a_round_consists_of_adds_up() -> None:
    uneven = fleet(50, speed_spread=0.3, link_spread=0.3, server_mbps=500.0, failures_per_node_hour=0.5)
    for quorum in (1.0, 0.7):
        found = simulate(replace(BASE, round=replace(BASE.round, quorum=quorum)), uneven)
        parts = found.compute_s + found.waiting_s + found.links_s + found.server_s
        assert parts == pytest.approx(found.round_s)


@settings(max_examples=40)
@given(
    nodes=st.integers(1, 40),
    server=st.floats(10, 10_000),
    node=st.floats(1, 1000),
    factor=st.floats(1, 100),
    spread=st.floats(0, 1),
    fan_out=st.sampled_from([None, 2, 8]),
    seed=st.integers(0, 5),
)
def test_more_bandwidth_is_never_slower(
    nodes: int, server: float, node: float, factor: float, spread: float, fan_out: int | None, seed: int
) -> None:
    def seconds(server_mbps: float, node_mbps: float) -> float:
        link = LinkConfig(uplink_mbps=node_mbps, downlink_mbps=node_mbps)
        uneven = fleet(nodes, server_mbps=server_mbps, link_spread=spread, speed_spread=spread, seed=seed)
        return simulate(replace(BASE, link=link), replace(uneven, fan_out=fan_out, failures_per_node_hour=0.2)).round_s

    slow = seconds(server, node)
    assert seconds(server * factor, node) <= slow * (1 + 1e-12)
    assert seconds(server, node * factor) <= slow * (1 + 1e-12)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_a_transfer_that_the_servers_limit_takes_what_the_slowest_shard_takes(shards: int) -> None:
    """Byte by byte: what is up by the end of a group, then all that is yet to go down, over the link of one server."""
    config = replace(BASE, nodes=64, link=replace(LINK, rtt_ms=0), server=ServerConfig(shards=shards))
    partition, shapes = config.make_partition(), tensor_shapes(config.model)
    slowest_s = 0.0
    for names in tensors_by_shard(config):
        up = [4 * math.prod(shapes[n]) * len(partition.trainers(n)) for n in names]
        down = [4 * moved(config, n) - sent for n, sent in zip(names, up, strict=True)]
        ends = [i + 1 for i, name in enumerate(names) if name == names[-1] or _kind(names[i + 1]) != _kind(name)]
        for begin, end in pairwise([0, *ends]):
            slowest_s = max(slowest_s, (sum(up[:end]) + sum(down[begin:])) / (20e6 / 8 * GOODPUT))
    found = simulate(config, fleet(64, server_mbps=20.0, shards=shards))
    assert found.limit == "server link"
    assert found.links_s + found.server_s == pytest.approx(slowest_s)


def _kind(name: str) -> int | None:
    """What goes back at once: the experts of a layer, or shared tensors between two."""
    return layer_of(name) if expert_of(name) is not None else None


def test_a_tree_carries_the_shared_tensors_once_a_subtree_and_every_expert() -> None:
    """64 nodes, 8 children a server: the root takes 8 × shared + all experts, a leaf server sends 8 × a download.

    With a full partition every child passes on the whole model.
    """
    config = replace(BASE, link=LinkConfig(), model=replace(BASE.model, num_experts=64))
    rate = 10e6 / 8 * GOODPUT
    for kind, root_up in (
        ("sparse", lambda size: 8 * size.shared + size.experts),
        ("full", lambda size: 8 * size.up[0]),
    ):
        run = replace(config, partition=PartitionConfig(kind=kind))  # type: ignore[arg-type]
        size = payloads(run, 64)
        found = simulate(run, fleet(64, server_mbps=10.0, fan_out=8))
        up, down = max(root_up(size), 8 * size.up[0]), 8 * (size.shared + size.experts)
        most = of_a_tree(run, up, down)
        assert found.server_s == pytest.approx(most / rate)


def test_the_root_of_a_tree_has_the_children_that_it_needs() -> None:
    """20 nodes, 8 children a server: 8, 8 and 4 nodes below a root with three children."""
    run = replace(BASE, link=LinkConfig(), model=replace(BASE.model, num_experts=20), wire=WireConfig(dtype="float32"))
    size = payloads(run, 20)
    found = simulate(run, fleet(20, server_mbps=10.0, fan_out=8))
    up = max(8 * size.up[0], 3 * size.shared + size.experts)
    most = of_a_tree(run, up, max(8 * size.down[0], 3 * (size.shared + size.experts)), 20)
    assert found.server_s == pytest.approx(most / (10e6 / 8 * GOODPUT))


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 10)), min_size=1, max_size=20))
def test_the_queue_of_a_link_ends_as_one_served_job_after_job(jobs: list[tuple[float, float]]) -> None:
    free_s = 0.0
    for ready_s, service_s in sorted(jobs, key=lambda job: job[0]):
        free_s = max(free_s, ready_s) + service_s
    ready, service = (np.array(column) for column in zip(*jobs, strict=True))
    assert queue_end(ready, service) == pytest.approx(free_s)


def test_the_server_s_link_limits_from_where_equal_links_add_up_to_it() -> None:
    """N equal links of r fill a server's link of C when N·r > C: from 11 nodes at C = 10·r, and later with shards."""
    config = replace(BASE, link=LinkConfig(uplink_mbps=100, downlink_mbps=100))
    assert server_limited_from(config, fleet(4, server_mbps=1000.0)) == 11
    later = server_limited_from(config, fleet(4, server_mbps=1000.0, shards=4))
    assert later is not None and 20 < later <= 41
    assert server_limited_from(config, fleet(4)) is None
    before, after = (simulate(config, fleet(nodes, server_mbps=1000.0)) for nodes in (10, 11))
    assert before.server_s == pytest.approx(0, abs=1e-9)
    assert after.server_s > 0


def test_a_tree_moves_the_bottleneck_to_more_nodes_than_one_server_of_the_same_link() -> None:
    """With 8 children at 1 Gbit/s a leaf server serves 8 nodes of 100 Mbit/s with ease; its parent carries whole
    models for each child, and so limits."""
    config = replace(BASE, link=LinkConfig(uplink_mbps=100, downlink_mbps=100), partition=PartitionConfig(kind="full"))
    one, tree = fleet(4, server_mbps=1000.0), fleet(4, server_mbps=1000.0, fan_out=8)
    assert server_limited_from(config, one) == 11
    assert server_limited_from(config, tree) is None
    for nodes in (8, 64, 512, 4096):
        assert simulate(config, replace(tree, nodes=nodes)).server_s == pytest.approx(0, abs=1e-9)
        assert (simulate(config, replace(one, nodes=nodes)).server_s > 0) == (nodes > 10)


@pytest.mark.parametrize("fan_out", [None, 2, 8])
@pytest.mark.parametrize("kind", ["sparse", "full"])
def test_the_bottleneck_is_named_at_the_first_size_of_which_it_holds(kind: str, fan_out: int | None) -> None:
    """Found by halving: the answer is that of looking at every size."""
    link = LinkConfig(uplink_mbps=100, downlink_mbps=60)
    config = replace(BASE, link=link, partition=PartitionConfig(kind=kind))  # type: ignore[arg-type]
    one = replace(fleet(1, server_mbps=450.0), fan_out=fan_out, device_tflops=1e9)
    limited = [simulate(config, replace(one, nodes=nodes)).server_s > 1e-9 for nodes in range(1, 100)]
    first = limited.index(True) + 1 if any(limited) else None
    found = server_limited_from(config, one)
    assert found == first or (first is None and (found is None or found >= 100))
    assert first is None or all(limited[first - 1 :])


@pytest.mark.parametrize("spread", [0.2, 0.8])
def test_unequal_links_are_waited_for_as_their_distribution_says(spread: float) -> None:
    """N links of exp(s·z) times the stated one: a round waits for the slowest, exp(−s·min z) times the ordinary time.

    The expected smallest of 200 standard normal numbers is −2.746.
    """
    config = replace(BASE, link=LinkConfig(uplink_mbps=1, downlink_mbps=1000))
    ordinary_s = simulate(config, fleet(200)).links_s
    slowest = [
        np.log(simulate(config, fleet(200, link_spread=spread, seed=seed)).links_s / ordinary_s) for seed in range(60)
    ]
    assert np.mean(slowest) / spread == pytest.approx(2.746, abs=0.2)


def test_unequal_speeds_are_waited_for_as_their_distribution_says() -> None:
    config = replace(BASE, link=LinkConfig())
    computing_s = simulate(config, fleet(200)).compute_s
    slowest = [np.log(simulate(config, fleet(200, speed_spread=0.4, seed=s)).round_s / computing_s) for s in range(60)]
    assert np.mean(slowest) / 0.4 == pytest.approx(2.746, abs=0.2)


def test_a_failure_costs_the_repair_and_the_steps_that_are_repeated() -> None:
    """Expected, at a chance p of a failure within the steps c: c + p/(1 − p)·(c/2 + repair)."""
    computing_s = 10 * slowest_step_s(BASE, TFLOPS)
    hourly = 3600 / computing_s * 0.5
    chance = 1 - np.exp(-0.5)
    found = simulate(BASE, fleet(1, failures_per_node_hour=hourly, repair_s=computing_s, rounds=6_000))
    expected_s = chance / (1 - chance) * 1.5 * computing_s
    assert found.waiting_s == pytest.approx(expected_s, rel=0.06)


def test_below_a_quorum_of_one_lost_nodes_are_left_out_and_come_back() -> None:
    """In each round p = 1 − exp(−0.2·c'/c) of those there fail, and are away for the next: (1 − p)/(1 + p) take part.

    The others wait no longer than until a lost node is given up.
    """
    computing_s = 10 * slowest_step_s(BASE, TFLOPS)
    rule = replace(BASE.round, quorum=0.1, lost_after_s=5.0)
    unlucky = fleet(200, failures_per_node_hour=0.2 * 3600 / computing_s, repair_s=computing_s, rounds=50)
    found = simulate(replace(BASE, round=rule), unlucky)
    fails = 1 - np.exp(-0.2 * found.compute_s / computing_s)
    assert found.present == pytest.approx((1 - fails) / (1 + fails), abs=0.02)
    assert found.waiting_s <= 5.0 + 1e-9
    all_waited_for = simulate(BASE, unlucky)
    assert all_waited_for.present == 1
    assert all_waited_for.round_s > found.round_s


def test_the_seed_decides_all_draws() -> None:
    uneven = fleet(30, speed_spread=0.3, link_spread=0.3, failures_per_node_hour=0.1)
    assert simulate(BASE, uneven) == simulate(BASE, uneven)
    assert simulate(BASE, uneven) != simulate(BASE, replace(uneven, seed=1))


def test_the_command_says_where_the_server_becomes_the_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "7b", "--nodes", "4", "64", "1024", "--server-mbps", "10000"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()[3:6]]
    assert [row[0] for row in rows] == ["4", "64", "1,024"]
    assert [" ".join(row[-2:]) for row in rows] == ["node links", "server link", "server link"]
    assert "From 11 nodes on the servers' links are the bottleneck" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "7c"], "valid names"),
        (["--model", "tiny", "--method", "centralized"], "has no rounds to simulate"),
        (["--model", "tiny", "--fan-out", "1"], "must be at least 2"),
        (["--model", "tiny", "--failures", "-1"], "--failures must not be negative"),
        (["--model", "tiny", "round.quorun=0.5"], 'did you mean "quorum"'),
    ],
)
def test_bad_input_has_status_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--nodes", "4"]) == 2
    assert says in capsys.readouterr().err
