"""The server core: who may join, what it accepts in which round, how rounds close, end, and come back after a crash."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spes_core.config import OuterConfig, RoundConfig, WireConfig
from spes_core.errors import Refused, RoundFailed
from spes_core.sharding import Group
from spes_core.sync.aggregation import Aggregation
from spes_core.sync.messages import DownloadRequest, make_hello
from tests.round_node import CONFIG, SCHEMA, Node, nodes_of, one_round, whole_run
from tests.small_rounds import (
    FULL,
    Recorder,
    in_thread,
    make_server,
    running,
    small_config,
    small_schema,
)

CODECS = ("float32", "bfloat16", "int8", "int4")


# Joining


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 3}, r"belongs to another run: seed 3, here 0"),
        ({"model": replace(CONFIG.model, rope_theta=500.0)}, r"model\.rope_theta 500\.0, here 10000\.0"),
        (
            {"partition": FULL},
            r"partition\.kind 'full', here 'sparse'; experts trained \[0, 1, 2, 3\], here \[2, 3\]",
        ),
    ],
)
def test_a_node_of_another_run_is_refused_with_the_difference(changes: dict[str, Any], difference: str) -> None:
    recorder = Recorder()
    server = make_server(CONFIG, recorder)
    other = small_config(**changes)
    with pytest.raises(Refused, match=difference):
        server.join(make_hello(other, small_schema(other), 1))
    assert [event["node"] for event in recorder.of("refusal")] == [1]
    assert recorder.of("join") == []
    server.join(make_hello(CONFIG, SCHEMA, 1))


def test_settings_outside_the_identity_may_differ() -> None:
    other = small_config(round=RoundConfig(timeout_s=1))
    make_server(CONFIG).join(make_hello(other, SCHEMA, 0))


def test_a_differing_schema_is_named_by_its_first_tensor() -> None:
    hello = make_hello(CONFIG, SCHEMA, 0)
    wrong = (*SCHEMA[:2], replace(SCHEMA[2], shape=(4, 16)), *SCHEMA[3:])
    with pytest.raises(Refused, match=r"tensor 2 layers\.0\.attention\.q float32\[4, 16\], here .* float32\[8, 8\]"):
        make_server(CONFIG).join(replace(hello, schema=wrong, schema_digest="x"))
    with pytest.raises(Refused, match=r"number of tensors"):
        make_server(CONFIG).join(replace(hello, schema=SCHEMA[:-1]))


def test_protocol_version_and_node_range_are_checked() -> None:
    server, hello = make_server(CONFIG), make_hello(CONFIG, SCHEMA, 0)
    with pytest.raises(Refused, match="protocol version 7, here 2"):
        server.join(replace(hello, protocol_version=7))
    with pytest.raises(Refused, match="there is no node 2: this run has 2 nodes"):
        server.join(replace(hello, node=2))
    with pytest.raises(Refused, match="configuration digest"):
        server.join(replace(hello, config_digest="0", config_json="[[["))
    with pytest.raises(Refused, match="wants to go on with round 1, and the server has only come to round 0"):
        server.join(replace(hello, round=1))


def test_a_restarted_node_replaces_its_former_self() -> None:
    server = make_server(CONFIG)
    first = Node(server, 0)
    Node(server, 0)
    with pytest.raises(Refused, match="another process has joined as this node since"):
        first.upload()


# What is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 1}, "it names round 1; the open round is 0"),
        ({"step": 3}, "after step 3; the round closes after step 2"),
        ({"tokens": 0}, "a weight of 0 tokens is not possible"),
        ({"tokens": 241}, "a weight of 241 tokens is not possible; a node trains 1 to 240 in this round"),
        ({"codec": "pickle"}, "its codec is 'pickle'; wire.dtype is 'float32'"),
        ({"tensors": (0, 1)}, "not the ones that it trains"),
        ({"tensors": (0, 10**9)}, "not the ones that it trains"),
        ({"session": b"guess"}, "node 0: another process has joined as this node"),
        ({"node": 1}, "node 1: it has not joined this run"),
        ({"node": 77}, "node 77: it has not joined this run"),
        ({"node": -1}, "node -1: it has not joined this run"),
    ],
)
def test_a_wrong_announcement_is_refused_and_the_server_goes_on(changes: dict[str, Any], reason: str) -> None:
    recorder = Recorder()
    server = make_server(CONFIG, recorder)
    node = Node(server, 0)
    with pytest.raises(Refused, match=reason):
        server.begin_upload(replace(node.manifest(), **changes))
    assert len(recorder.of("refusal")) == 1
    node.upload()


def test_chunks_out_of_order_and_missing_ends_are_refused_by_name() -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    node.train(0)
    upload = server.begin_upload(node.manifest())
    with pytest.raises(Refused, match="node 0: chunk of tensor 1 at byte 0 came where tensor 0 at byte 0 was due"):
        upload.add(1, 0, memoryview(node.sent[1]))
    with pytest.raises(Refused, match="tensor 0 at byte 0 was due"):
        upload.finish()
    node.upload()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e31])
def test_unusable_values_are_refused_by_name_and_may_be_sent_again(bad: float) -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    node.train(0)
    good = node.sent[5]
    values = np.frombuffer(good, dtype=np.float32).copy()
    values[3] = bad
    node.sent[5] = values.tobytes()
    with pytest.raises(Refused, match=rf"node 0: tensor {SCHEMA[5].name} has NaN or infinite values"):
        node.upload()
    node.sent[5] = good
    node.upload()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_no_bytes_of_a_lossy_codec_bring_in_anything_infinite(dtype: Any) -> None:
    config = small_config(wire=WireConfig(dtype=dtype))
    server = make_server(config)
    node = Node(server, 0, config)
    node.train(0)
    node.sent[0] = b"\xff" * len(node.sent[0])
    with pytest.raises(Refused, match="node 0: tensor embedding has NaN or infinite values"):
        node.upload()


def test_a_download_must_follow_the_own_upload() -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    with pytest.raises(Refused, match="it asks for round 0 before it has begun its own upload"):
        node.download()
    with pytest.raises(Refused, match="it names round 1; the open round is 0"):
        node.download(1)


# Uploads that break off, and repeats


@pytest.mark.parametrize("dtype", CODECS)
def test_an_upload_goes_on_where_it_broke_off_and_gives_the_same_bits(dtype: Any) -> None:
    config = small_config(wire=WireConfig(dtype=dtype))
    expected = whole_run(config)
    for upto, chunk_bytes in ((1, 1 << 20), (5, 300), (len(SCHEMA) // 2, 1)):
        server = make_server(config)
        with running(server):
            nodes = nodes_of(server, config)
            nodes[0].train(0)
            first = server.begin_upload(nodes[0].manifest())
            nodes[0].send(first, upto, chunk_bytes)
            first.close()
            assert nodes[0].upload().ready.offset_bytes > 0
            nodes[1].upload()
            for node in nodes:
                node.download()
            one_round(nodes, 1)
        assert server.state.values.tobytes() == expected


def test_a_repeat_with_other_values_begins_again_until_the_first_ones_are_used() -> None:
    server = make_server(CONFIG)
    nodes = nodes_of(server)
    nodes[0].train(0)
    nodes[0].send(server.begin_upload(nodes[0].manifest()), 5)
    again = server.begin_upload(nodes[0].manifest(tokens=5))
    again.restart()
    nodes[0].sent[0] = (np.frombuffer(nodes[0].sent[0], dtype=np.float32) + 1).tobytes()
    again.ready = replace(again.ready, offset_bytes=0)
    nodes[0].send(again)
    again.finish()
    with running(server):
        nodes[1].upload()
        nodes[0].download()
        repeated = server.begin_upload(nodes[0].manifest(tokens=5))
        assert repeated.ready.is_complete
        with pytest.raises(Refused, match="repeats its upload of round 0 with other values than before"):
            repeated.restart()
        with pytest.raises(Refused, match="new attempt at round 0 claims 6 tokens, the first one 5"):
            server.begin_upload(nodes[0].manifest(tokens=6))


def test_the_former_attempt_cannot_add_any_more() -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    node.train(0)
    first = server.begin_upload(node.manifest())
    server.begin_upload(node.manifest())
    with pytest.raises(Refused, match="it has begun its upload of round 0 again"):
        first.add(0, 0, memoryview(node.sent[0]))
    with pytest.raises(Refused, match="it has begun its upload of round 0 again"):
        first.restart()


def test_an_upload_cannot_begin_again_while_its_first_values_are_being_used(monkeypatch: pytest.MonkeyPatch) -> None:
    server, is_reading, goes_on = make_server(CONFIG), threading.Event(), threading.Event()

    def form(forming: Aggregation, group: Group) -> None:
        is_reading.set()
        assert goes_on.wait(10)
        original(forming, group)

    original = Aggregation.form
    monkeypatch.setattr(Aggregation, "form", form)
    with running(server):
        nodes = nodes_of(server)
        for node in nodes:
            node.train(0)
            node.send(server.begin_upload(node.manifest()), 3)
        assert is_reading.wait(10)
        with pytest.raises(Refused, match="the first ones have been used"):
            server.begin_upload(nodes[0].manifest()).restart()
        goes_on.set()


def test_a_finished_upload_and_a_fetched_result_may_be_asked_for_again() -> None:
    server = make_server(CONFIG)
    with running(server):
        nodes = nodes_of(server)
        for node in nodes:
            node.upload()
        before = [values.copy() for values in nodes[0].base]
        sent = dict(nodes[0].sent)
        nodes[0].download()
        once = nodes[0].digest()
        nodes[0].base, nodes[0].sent = before, sent
        assert nodes[0].upload().ready.is_complete
        nodes[0].download()
        assert nodes[0].digest() == once


# How rounds close


def test_values_are_formed_while_uploads_still_come_in() -> None:
    server = make_server(CONFIG)
    with running(server):
        nodes = nodes_of(server)
        uploads = []
        for node in nodes:
            node.train(0)
            uploads.append(server.begin_upload(node.manifest()))
            node.send(uploads[-1], 3)
        request = DownloadRequest(node=0, session=nodes[0].welcome.session, round=0)
        chunks = server.open_download(request, lambda: False).chunks(1 << 20)
        assert [next(chunks)[0] for _ in range(3)] == [0, 1, 2]


def test_a_missing_node_ends_the_round_by_name_in_time() -> None:
    config = small_config(nodes=3, round=RoundConfig(timeout_s=0.3))
    recorder = Recorder()
    server = make_server(config, recorder)
    with running(server) as ended:
        node, half = Node(server, 0, config), Node(server, 1, config)
        began_s = time.monotonic()
        node.upload()
        server.begin_upload(half.manifest())
        with pytest.raises(RoundFailed) as raised:
            node.download()
        elapsed_s = time.monotonic() - began_s
    expected = (
        "round 0 was not complete within round.timeout_s (0.3): node 1 has not finished its upload; node 2 has not"
        " uploaded"
    )
    assert str(raised.value) == expected and str(ended[0]) == expected
    assert 0.25 < elapsed_s < 3
    assert [event["reason"] for event in recorder.of("failure")] == [expected]
    with pytest.raises(RoundFailed):
        server.join(make_hello(config, SCHEMA, 2))


def test_a_last_result_that_is_never_fetched_ends_the_run_by_name() -> None:
    config = small_config(round=RoundConfig(timeout_s=0.3))
    server = make_server(config)
    with running(server) as ended:
        nodes = nodes_of(server, config)
        one_round(nodes, 0)
        for node in nodes:
            node.upload(1)
        nodes[0].download(1)
        while not ended:
            time.sleep(0.02)
    assert str(ended[0]).endswith("round 1 was not fetched within round.timeout_s (0.3): node 1 has not downloaded")


def test_stopping_the_server_frees_everyone_who_waits() -> None:
    server = make_server(CONFIG)
    with running(server) as ended:
        node = Node(server, 0)
        node.upload()
        thread, outcome = in_thread(node.download)
        time.sleep(0.05)
        server.fail("the server was stopped")
        thread.join(5)
    assert [str(outcome[0]), str(ended[0])] == ["the server was stopped"] * 2


# Whole rounds


@pytest.mark.parametrize("dtype", CODECS)
@pytest.mark.parametrize("kind", ["none", "sgd", "nesterov"])
def test_all_nodes_and_the_server_hold_the_same_bits_after_every_round(kind: Any, dtype: Any) -> None:
    for partition in (small_config().partition, FULL):
        config = small_config(outer=OuterConfig(kind=kind), partition=partition, nodes=3, wire=WireConfig(dtype=dtype))
        server = make_server(config)
        with running(server) as outcome:
            nodes = nodes_of(server, config)
            for round in range(2):
                summaries = one_round(nodes, round)
                assert len({node.digest() for node in nodes}) == 1 == len({s.digest for s in summaries})
        assert outcome == [None] and server.state.digest() == nodes[0].digest()


def test_outer_sgd_with_rate_one_adopts_the_mean_up_to_rounding() -> None:
    one, none = (whole_run(small_config(outer=outer)) for outer in (OuterConfig(kind="sgd", lr=1.0), OuterConfig()))
    np.testing.assert_allclose(np.frombuffer(one, "f4"), np.frombuffer(none, "f4"), rtol=0, atol=1e-6)


def test_the_round_event_tells_bytes_tokens_and_nodes() -> None:
    recorder = Recorder()
    server = make_server(CONFIG, recorder)
    with running(server):
        nodes = nodes_of(server)
        for round in range(2):
            one_round(nodes, round)
    events = recorder.of("round")
    assert [(e["round"], e["step"], e["tokens"], e["merged"], e["nodes"]) for e in events] == [
        (0, 2, 187, True, [0, 1]),
        (1, 4, 374, False, [0, 1]),
    ]
    trained = [sum(4 * SCHEMA[tensor].num_elements for tensor in server.trained_by(node)) for node in range(2)]
    assert all(event["uplink_payload_bytes"] == dict(enumerate(trained)) for event in events)
