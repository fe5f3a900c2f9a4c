"""Several servers give the bits of one: `train.sharded` over server cores of parts of the tensors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from spes_core.config import (
    AggregateConfig,
    FrozenConfig,
    OuterConfig,
    PartitionConfig,
    RoundConfig,
    RunConfig,
    ServerConfig,
    WireConfig,
)
from spes_core.errors import Diverged, ProtocolError, RoundFailed
from spes_core.model.counting import tensors_by_shard
from spes_core.sharding import joined_digest
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.parameter_server import ParameterServer
from spes_core.train.exchange import RoundReport
from spes_core.train.sharded import ShardedExchange
from tests.small_rounds import MODEL, PlainDecoder, Recorder, initial_values, make_server, running, small_schema
from tests.small_rounds import small_config as two_layers

ROUNDS = 2


def small_config(**changes: Any) -> RunConfig:
    return two_layers(model=replace(MODEL, num_layers=4), **changes)


@dataclass
class Node:
    exchange: ShardedExchange
    decoder: PlainDecoder
    reports: list[RoundReport]


@contextmanager
def servers_of(config: RunConfig) -> Iterator[list[ParameterServer]]:
    """The cores of a run's servers, each in its thread."""
    schema = small_schema(config)
    with ExitStack() as stack:
        cores = []
        for names in tensors_by_shard(config):
            part = tuple(spec for spec in schema if spec.name in names)
            cores.append(make_server(config, Recorder(), schema=part))
            stack.enter_context(running(cores[-1]))
        yield cores


def make_node(config: RunConfig, servers: list[ParameterServer], node: int) -> Node:
    decoder = PlainDecoder(config)
    if config.frozen.dtype == "bfloat16":
        for name, tensor in decoder.weights.items():
            if not config.make_partition().trains(node, name):
                decoder.weights[name] = tensor.to(torch.bfloat16)
    clients = [LocalClient(server) for server in servers]
    exchange = ShardedExchange(clients, decoder.tensors(), node, config, exact=initial_values(config))
    return Node(exchange, decoder, [])


def run(config: RunConfig) -> tuple[list[Node], list[ParameterServer]]:
    """All rounds of all nodes."""

    def node_main(node: int) -> Node:
        one = make_node(config, servers, node)
        assert one.exchange.join().round == 0
        for round in range(ROUNDS):
            one.decoder.train(config, node, round)
            step = config.sync.interval_steps * (round + 1)
            one.reports.append(one.exchange.run_round(round, step, 100 + 7 * node))
            one.exchange.heartbeat(step)
        return one

    with servers_of(config) as servers, ThreadPoolExecutor(config.nodes) as pool:
        return list(pool.map(node_main, range(config.nodes))), servers


def bits(nodes: list[Node]) -> list[dict[str, bytes]]:
    return [{n: t.view(torch.uint8).numpy().tobytes() for n, t in node.decoder.weights.items()} for node in nodes]


CASES: dict[str, dict[str, Any]] = {
    "spes": {},
    "dilico": {"partition": PartitionConfig(kind="full")},
    "diloco": {"partition": PartitionConfig(kind="full"), "outer": OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)},
    "int8": {"wire": WireConfig(dtype="int8", chunk_bytes=1024)},
    "int4": {"wire": WireConfig(dtype="int4", chunk_bytes=1024)},
    "frozen in bfloat16": {"frozen": FrozenConfig(dtype="bfloat16")},
    "median of three": {
        "nodes": 3,
        "partition": PartitionConfig(kind="full"),
        "aggregate": AggregateConfig(rule="median"),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_number_of_servers_changes_no_bit(case: str) -> None:
    config = small_config(**CASES[case])
    alone, (one,) = run(config)
    for shards in (2, 4):
        nodes, servers = run(replace(config, server=ServerConfig(shards=shards)))
        assert bits(nodes) == bits(alone)
        held = {s.name: core.state.tensor(i).tobytes() for core in servers for i, s in enumerate(core.schema)}
        assert held == {spec.name: one.state.tensor(i).tobytes() for i, spec in enumerate(one.schema)}
        for mine, theirs in zip(nodes, alone, strict=True):
            assert [r.uplink_payload_bytes for r in mine.reports] == [r.uplink_payload_bytes for r in theirs.reports]
            assert [r.downlink_payload_bytes for r in mine.reports] == [
                r.downlink_payload_bytes for r in theirs.reports
            ]
            assert [(r.merged, r.tokens, r.experts) for r in mine.reports] == [
                (r.merged, r.tokens, r.experts) for r in theirs.reports
            ]
        digests = [joined_digest([core.state.digest() for core in servers])] * config.nodes
        assert [node.reports[-1].digest for node in nodes] == digests


def test_a_node_that_has_diverged_sends_nothing_to_any_server() -> None:
    config = small_config(server=ServerConfig(shards=2))
    with servers_of(config) as servers:
        node = make_node(config, servers, 0)
        node.exchange.join()
        last = tensors_by_shard(config)[1][-1]
        node.decoder.weights[last].view(-1)[0] = float("nan")
        with pytest.raises(Diverged, match=last.replace(".", r"\.")):
            node.exchange.run_round(0, 2, 100)
        assert [server.status()["nodes"][0]["step"] for server in servers] == [0, 0]
        assert not any(server._ledger.open.begun for server in servers)  # type: ignore[union-attr]


def test_a_server_that_fails_ends_the_round_with_its_reason_whatever_the_others_wait_for() -> None:
    config = small_config(server=ServerConfig(shards=4))
    with servers_of(config) as servers, ThreadPoolExecutor(1) as pool:
        node = make_node(config, servers, 0)
        node.exchange.join()
        node.decoder.train(config, 0, 0)
        under_way = pool.submit(node.exchange.run_round, 0, 2, 100)
        # The other node never comes: all four wait for it.
        while not all(server._ledger.open.begun for server in servers):  # type: ignore[union-attr]
            assert not under_way.done()
        servers[2].fail("the third server's disk is full")
        with pytest.raises(RoundFailed, match="third server's disk is full"):
            under_way.result(30)


def test_a_server_that_does_not_answer_delays_no_sign_of_life_to_another() -> None:
    config = small_config(server=ServerConfig(shards=2))
    with servers_of(config) as servers:
        node = make_node(config, servers, 0)
        node.exchange.join()
        is_over, heard = threading.Event(), queue.SimpleQueue[int]()
        silent, answering = node.exchange._parts
        silent.heartbeat = lambda step: is_over.wait(60)  # type: ignore[assignment,method-assign,return-value]
        answering.heartbeat = heard.put  # type: ignore[method-assign]
        for step in (1, 2):
            node.exchange.heartbeat(step)
            node.exchange._beating[1].result(30)
            assert heard.get(timeout=30) == step
        is_over.set()


def test_servers_at_different_rounds_are_named_to_a_node_without_a_past() -> None:
    config = small_config(nodes=1, server=ServerConfig(shards=2), round=RoundConfig(timeout_s=30))
    with servers_of(config) as servers:
        first = make_node(config, servers, 0)
        first.exchange.join()
        first.decoder.train(config, 0, 0)
        # The first life of the node got through its round with one server only.
        part = first.exchange._parts[0]
        part.run_round(0, 2, 100)
        with pytest.raises(ProtocolError, match=r"different rounds \(1, 0\)"):
            make_node(config, servers, 0).exchange.rejoin()


def test_a_node_comes_back_with_its_checkpoint_to_servers_that_stand_at_different_rounds() -> None:
    """The round that one server has closed is repeated there, and its result is the same."""
    config = small_config(nodes=1)
    config = replace(config, merge=replace(config.merge, enabled=False))
    alone, _ = run(config)
    config = replace(config, server=ServerConfig(shards=2))
    with servers_of(config) as servers:
        first = make_node(config, servers, 0)
        first.exchange.join()
        first.decoder.train(config, 0, 0)
        first.exchange._parts[1].run_round(0, 2, 100)
        again = make_node(config, servers, 0)
        assert again.exchange.join(0).round == 0
        for round in range(ROUNDS):
            again.decoder.train(config, 0, round)
            again.exchange.run_round(round, 2 * (round + 1), 100)
    assert bits([again]) == bits(alone)
