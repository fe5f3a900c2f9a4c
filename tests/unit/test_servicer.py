"""Over a real socket rounds give the same bits as without one, whatever the connection and strangers do meanwhile."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_core.config import PartitionConfig, RoundConfig, RunConfig
from spes_core.errors import Refused, RoundFailed, Unreachable
from spes_core.protocol import frames
from spes_core.protocol.client import SyncClient
from spes_core.protocol.frames import Kind, pack
from spes_core.protocol.translate import to_bytes
from spes_core.sync.client import Client
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import make_hello
from tests.bare_node import BareNode
from tests.cut_proxy import cut_proxy
from tests.small_rounds import (
    FULL,
    Recorder,
    in_thread,
    initial_values,
    make_server,
    running,
    served,
    small_config,
    small_schema,
)
from tests.strangers import Stranger, manifest_of, refused, with_flipped_bit

CONFIG = small_config()
SCHEMA = small_schema(CONFIG)


def take_part(config: RunConfig, make_client: Callable[[int], Client]) -> tuple[list[BareNode], list[Any]]:
    """All nodes through both rounds, each in a thread; the nodes, and what each reports of its rounds."""
    nodes = [BareNode(make_client(node), config, node, initial_values(config)) for node in range(config.nodes)]
    with ThreadPoolExecutor(config.nodes) as pool:
        reports = list(pool.map(BareNode.take_part, nodes))
    return nodes, reports


def undisturbed(config: RunConfig) -> BareNode:
    """A node after the same rounds without a network."""
    local = make_server(config)
    with running(local):
        nodes, _ = take_part(config, lambda node: LocalClient(local))
    return nodes[0]


def same(one: BareNode, other: BareNode) -> bool:
    return all(np.array_equal(left, right) for left, right in zip(one.values, other.values, strict=True))


@pytest.mark.parametrize("partition", [PartitionConfig(), FULL], ids=["sparse", "full"])
def test_grpc_and_in_process_give_the_same_bits(partition: PartitionConfig) -> None:
    config = small_config(nodes=3, partition=partition)
    core = make_server(config)
    with served(core, config) as address, running(core) as outcome:
        nodes, _ = take_part(config, lambda node: SyncClient(address, config, node))
    assert outcome == [None]
    expected = undisturbed(config)
    assert all(same(node, expected) for node in nodes)


def test_node_and_server_count_the_same_bytes() -> None:
    recorder = Recorder()
    core = make_server(CONFIG, recorder)
    with served(core, CONFIG) as address, running(core):
        nodes, reports = take_part(CONFIG, lambda node: SyncClient(address, CONFIG, node))
    for event, row in zip(recorder.of("round"), zip(*reports, strict=True), strict=True):
        for direction, index in (("uplink", 0), ("downlink", 1)):
            for part in ("payload", "framing"):
                counted = {node: getattr(report[index], f"{part}_bytes") for node, report in enumerate(row)}
                assert event[f"{direction}_{part}_bytes"] == counted, (direction, part)
        sizes = [core.wire.encoded_bytes(SCHEMA[index].num_elements) for index in nodes[1].trained]
        assert row[1][0].payload_bytes == sum(sizes)
        chunks = sum(len(list(core.wire.chunks(size, CONFIG.wire.chunk_bytes))) for size in sizes)
        manifest = row[1][0].framing_bytes - (chunks + 2) * frames.HEADER_BYTES
        assert 50 < manifest < 200


def test_the_times_of_a_round_do_not_overlap() -> None:
    core = make_server(CONFIG)
    elapsed_s: dict[int, float] = {}

    def node_main(node: int) -> Any:
        with SyncClient(address, CONFIG, node) as client:
            bare = BareNode(client, CONFIG, node, initial_values(CONFIG))
            bare.join()
            bare.train(0)
            time.sleep(0.3 * node)
            began_s = time.perf_counter()
            reports = bare.upload(0), bare.download(0)
            elapsed_s[node] = time.perf_counter() - began_s
            return reports

    with served(core, CONFIG) as address, running(core):
        waiting = in_thread(lambda: node_main(0))
        late = node_main(1)
        waiting[0].join(10)
        early = waiting[1][0]
    for node, (up, down) in enumerate((early, late)):
        parts = up.serialise_s + up.transfer_s + down.serialise_s + down.transfer_s + down.wait_s
        parts += down.summary.aggregate_s + down.summary.merge_s
        assert 0 < parts <= elapsed_s[node] * 1.05 + 0.02
    assert early[1].wait_s > 0.2 > late[1].wait_s


def test_cut_connections_change_no_bit_of_a_run() -> None:
    core = make_server(CONFIG)
    with served(core, CONFIG) as address, cut_proxy(address) as proxy, running(core) as outcome:
        proxy.cut_after("up", 8_000, 9_000, 20_000)
        proxy.cut_after("down", 6_000, 9_000, 12_000)
        nodes, _ = take_part(CONFIG, lambda node: SyncClient(proxy.address, CONFIG, node))
        assert proxy.cuts >= 3
    assert outcome == [None]
    expected = undisturbed(CONFIG)
    assert all(same(node, expected) for node in nodes)


# Errors reach the node


def test_a_refusal_reaches_the_node_with_its_reason() -> None:
    other = small_config(seed=9)
    with (
        served(make_server(CONFIG), CONFIG) as address,
        SyncClient(address, other, 0) as client,
        pytest.raises(Refused, match="the server refused node 0: this node belongs to another run: seed 9, here 0"),
    ):
        client.join(make_hello(other, SCHEMA, 0))


def test_a_dead_peer_ends_the_round_for_all_by_name() -> None:
    config = small_config(nodes=3, round=RoundConfig(timeout_s=1.0))
    core = make_server(config)
    with served(core, config) as address, running(core) as outcome:
        clients = [SyncClient(address, config, node) for node in range(3)]
        nodes = [BareNode(client, config, node, initial_values(config)) for node, client in enumerate(clients)]
        for node in nodes:
            node.join()
        clients[2].close()  # node 2 dies
        waiting = [in_thread(lambda node=node: (node.upload(0), node.download(0))) for node in nodes[:2]]
        began_s = time.monotonic()
        for thread, result in waiting:
            thread.join(8)
            assert isinstance(result[0], RoundFailed), result
            assert "node 2" in str(result[0]) and "round.timeout_s (1)" in str(result[0])
        assert time.monotonic() - began_s < 5
    assert isinstance(outcome[0], RoundFailed)


def test_a_server_that_vanishes_gives_one_clear_error_when_patience_ends() -> None:
    config = small_config(round=RoundConfig(timeout_s=30, retry_s=0.5))
    core = make_server(config)
    with running(core):
        with served(core, config) as address:
            node = BareNode(SyncClient(address, config, 0), config, 0, initial_values(config))
            node.join()
            thread, outcome = in_thread(lambda: (node.upload(0), node.download(0)))
            time.sleep(0.3)
            assert thread.is_alive()
        thread.join(8)
        assert isinstance(outcome[0], Unreachable)
        assert f"the server at {address} cannot be reached, after trying for 0." in str(outcome[0])


# Hostile bytes on a live run


def test_nothing_hostile_passes_and_the_honest_nodes_finish_with_the_right_bits() -> None:
    recorder = Recorder()
    core = make_server(CONFIG, recorder)
    partition = CONFIG.make_partition()
    trained = tuple(i for i, spec in enumerate(SCHEMA) if partition.trains(0, spec.name))
    foreign = next(i for i, spec in enumerate(SCHEMA) if not partition.trains(0, spec.name))
    with served(core, CONFIG) as address, running(core) as outcome, Stranger(address) as stranger:
        session = SyncClient(address, CONFIG, 0).join(make_hello(CONFIG, SCHEMA, 0)).session
        manifest = manifest_of(session, 0, trained)
        chunk = pack(Kind.CHUNK, np.ones(256, np.float32).data.cast("B"), tensor=trained[0])
        nan = pack(Kind.CHUNK, np.full(256, np.nan, np.float32).data.cast("B"), tensor=trained[0])
        for text, call in (
            ("looks like a pickle", lambda: stranger.send(pickle.dumps({"a": 1} | dict.fromkeys(range(50))))),
            ("MANIFEST was due", lambda: stranger.send(pack(Kind.END))),
            ("UploadManifest cannot be read", lambda: stranger.send(pack(Kind.MANIFEST, b"\xff" * 40))),
            ("node 0: the checksum of a frame", lambda: stranger.send(manifest, with_flipped_bit(chunk, "payload"))),
            ("has NaN or infinite values", lambda: stranger.send(manifest, nan)),
            ("where tensor 0 at byte 1024 was due", lambda: stranger.send(manifest, chunk, chunk)),
            ("announced tensors", lambda: stranger.send(manifest_of(session, 0, (*trained, foreign)))),
            ("announced tensors", lambda: stranger.send(manifest_of(session, 0, (0, 0)))),
            ("announced tensors", lambda: stranger.send(manifest_of(session, 0, (4_000_000_000,)))),
            ("codec", lambda: stranger.send(manifest_of(session, 0, trained, codec="int4"))),
            ("tokens", lambda: stranger.send(manifest_of(session, 0, trained, tokens=0))),
            ("step", lambda: stranger.send(manifest_of(session, 0, trained, step=2**63))),
            ("round", lambda: stranger.send(manifest_of(session, 0, trained, round=2**31))),
            ("another process has joined", lambda: stranger.send(manifest_of(b"0" * 16, 0, trained))),
            (
                "another run: seed 9, here 0",
                lambda: stranger.join(to_bytes(make_hello(small_config(seed=9), SCHEMA, 1))),
            ),
            (
                "another run",
                lambda: stranger.join(
                    to_bytes(
                        replace(make_hello(CONFIG, SCHEMA, 1), schema=(replace(SCHEMA[0], shape=(1,)), *SCHEMA[1:]))
                    )
                ),
            ),
        ):
            assert text in refused(call), text
        blamed = {event["node"] for event in recorder.of("refusal")}
        assert blamed == {None, 0, 1}
        assert all("127.0.0.1" in event["reason"] for event in recorder.of("refusal") if event["node"] is None)
        nodes, _ = take_part(CONFIG, lambda node: SyncClient(address, CONFIG, node))
    assert outcome == [None]
    assert same(nodes[0], undisturbed(CONFIG))


def test_an_upload_that_a_dying_node_left_is_gone_on_with() -> None:
    core = make_server(CONFIG)
    until = threading.Event()
    with served(core, CONFIG) as address, running(core), Stranger(address) as stranger:
        first = BareNode(SyncClient(address, CONFIG, 0), CONFIG, 0, initial_values(CONFIG))
        session = first.join().session
        first.train(0)
        begun = [manifest_of(session, 0, first.trained, tokens=100)]
        begun.append(pack(Kind.CHUNK, first.payload(0)[:1024], tensor=0))

        def dying() -> Any:
            yield from begun
            until.wait(10)

        call = stranger.upload(dying())
        while not (stored := list(core.journal.folder.glob("0/node-0.upload"))) or stored[0].stat().st_size < 1024:
            time.sleep(0.01)
        call.cancel()
        until.set()
        again = BareNode(SyncClient(address, CONFIG, 0), CONFIG, 0, initial_values(CONFIG))
        other = BareNode(SyncClient(address, CONFIG, 1), CONFIG, 1, initial_values(CONFIG))
        partner = in_thread(other.take_part)
        reports = again.take_part()
        partner[0].join(10)
    whole = sum(len(again.payload(index)) for index in again.trained)
    assert reports[0][0].payload_bytes == whole - 1024
    assert same(again, undisturbed(CONFIG)) and same(other, again)


def test_a_server_that_was_started_again_lets_nodes_wait_until_it_has_come_as_far_as_they(tmp_path: Path) -> None:
    core = make_server(CONFIG, folder=tmp_path)
    with served(core, CONFIG) as address, running(core):
        nodes = [BareNode(SyncClient(address, CONFIG, node), CONFIG, node, initial_values(CONFIG)) for node in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda node: node.take_part(range(1)), nodes))
    again = make_server(CONFIG, folder=tmp_path)
    with served(again, CONFIG) as address:
        client = SyncClient(address, CONFIG, 0)
        joining = in_thread(lambda: client.join(make_hello(CONFIG, SCHEMA, 0, round=1)))
        time.sleep(0.3)
        assert joining[0].is_alive()
        with running(again):
            joining[0].join(10)
    assert joining[1][0].round == 1
