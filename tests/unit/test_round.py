"""The server core: who may join, what it accepts in which round, and how rounds end when a node does not behave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spes_core.config import OuterConfig, RoundConfig, RunConfig
from spes_core.errors import ProtocolError, Refused, RoundFailed
from spes_core.sync.aggregate import add_to_mean
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import DownloadRequest, UploadManifest, Welcome, make_hello
from spes_core.sync.parameter_server import ParameterServer
from spes_core.sync.upload import Upload
from tests.small_rounds import (
    FULL,
    PlainDecoder,
    Recorder,
    in_thread,
    make_server,
    run_rounds,
    small_config,
    small_schema,
)

CONFIG = small_config()
SCHEMA = small_schema(CONFIG)


class Node:
    """A node under the test's own control, one call at a time."""

    def __init__(self, server: ParameterServer, node: int, config: RunConfig = CONFIG, round: int = 0) -> None:
        self.server, self.node, self.config = server, node, config
        self.decoder = PlainDecoder(config)
        self.decoder.train(config, node, round)
        self.welcome: Welcome = server.join(make_hello(config, SCHEMA, node))

    def manifest(self, **changes: Any) -> UploadManifest:
        manifest = UploadManifest(
            node=self.node,
            session=self.welcome.session,
            round=0,
            step=2,
            tokens=100,
            codec="float32",
            tensors=self.server.trained_by(self.node),
        )
        return replace(manifest, **changes)

    def payload(self, tensor: int) -> memoryview:
        return self.decoder.weights[SCHEMA[tensor].name].reshape(-1).numpy().data.cast("B")

    def send(self, upload: Upload, upto: int | None = None) -> None:
        for tensor in self.server.trained_by(self.node)[:upto]:
            upload.add(tensor, 0, self.payload(tensor))

    def upload(self, **changes: Any) -> None:
        upload = self.server.begin_upload(self.manifest(**changes))
        self.send(upload)
        upload.finish()

    def download(self, round: int = 0, is_cancelled: Callable[[], bool] = lambda: False) -> Any:
        request = DownloadRequest(node=self.node, session=self.welcome.session, round=round)
        return self.server.open_download(request, is_cancelled)


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
    with pytest.raises(Refused, match="protocol version 7, here 1"):
        server.join(replace(hello, protocol_version=7))
    with pytest.raises(Refused, match="there is no node 2: this run has 2 nodes"):
        server.join(replace(hello, node=2))
    with pytest.raises(Refused, match="configuration digest"):
        server.join(replace(hello, config_digest="0", config_json="[[["))


def test_a_restarted_node_learns_the_open_round_and_replaces_its_former_self() -> None:
    server = make_server(CONFIG)
    first = [Node(server, node) for node in range(2)]
    uploads = [in_thread(node.upload) for node in first]
    for thread, _ in uploads:
        thread.join()
    again = Node(server, 0)
    assert again.welcome.round == 1
    assert again.welcome.digest == first[0].server.state.digest()
    with pytest.raises(Refused, match="another process has joined as node 0 since"):
        first[0].download()


# What is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 1}, "it uploads round 1; the open round is 0"),
        ({"step": 3}, "after step 3; the round closes after step 2"),
        ({"tokens": 0}, "a weight of 0 tokens is not possible"),
        ({"tokens": 2**60}, "tokens is not possible"),
        ({"codec": "pickle"}, "its codec is 'pickle'; wire.dtype is 'float32'"),
        ({"tensors": (0, 1)}, "not the ones that it trains"),
        ({"tensors": (0, 10**9)}, "not the ones that it trains"),
        ({"session": b"guess"}, "another process has joined as node 0"),
        ({"node": 1}, "node 1: it has not joined this run"),
        ({"node": 77}, "node 77: it has not joined this run"),
    ],
)
def test_a_wrong_announcement_is_refused_and_the_server_goes_on(changes: dict[str, Any], reason: str) -> None:
    recorder = Recorder()
    server = make_server(CONFIG, recorder)
    node = Node(server, 0)
    with pytest.raises(Refused, match=reason):
        server.begin_upload(node.manifest(**changes))
    assert len(recorder.of("refusal")) == 1
    node.upload()


def test_chunks_out_of_order_and_missing_ends_are_refused_by_name() -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    upload = server.begin_upload(node.manifest())
    with pytest.raises(Refused, match="node 0: chunk of tensor 1 at byte 0 came where tensor 0 at byte 0 was due"):
        upload.add(1, 0, node.payload(1))
    with pytest.raises(Refused, match="tensor 0 at byte 0 was due"):
        upload.finish()
    node.upload()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e31])
def test_unusable_values_are_refused_by_name_and_may_be_sent_again(bad: float) -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    target = node.decoder.weights[SCHEMA[5].name].view(-1)
    good = target[3].item()
    target[3] = bad
    with pytest.raises(Refused, match=rf"node 0: tensor {SCHEMA[5].name} has NaN or infinite values"):
        node.upload()
    assert np.isfinite(server.state.values).all()
    target[3] = good
    node.upload()


def test_a_second_upload_of_a_round_is_refused() -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    node.upload()
    with pytest.raises(Refused, match="it has already uploaded round 0"):
        node.upload()


def test_a_download_must_follow_the_own_upload_and_comes_once() -> None:
    server = make_server(CONFIG)
    nodes = [Node(server, node) for node in range(2)]
    with pytest.raises(Refused, match="before its own upload is complete"):
        nodes[0].download()
    with pytest.raises(Refused, match="round 1, which is neither open nor the last closed"):
        nodes[0].download(1)
    for node in nodes:
        node.upload()
    nodes[0].download()  # begun, not confirmed: may be asked for again
    nodes[0].download().delivered()
    with pytest.raises(Refused, match="it has confirmed its download of round 0 before"):
        nodes[0].download()
    with pytest.raises(Refused, match="before it has downloaded round 0"):
        nodes[1].upload(round=1, step=4)


# Broken uploads


def mean_after(break_at: int, config: RunConfig = CONFIG) -> bytes:
    """Global weights after a round in which node 0 breaks off after so many tensors and sends all again."""
    server = make_server(config)
    nodes = [Node(server, node, config) for node in range(2)]
    first = server.begin_upload(nodes[0].manifest())
    nodes[0].send(first, break_at)
    first.cancel()
    nodes[0].upload()
    nodes[1].upload()
    return server.state.values.tobytes()


def test_an_upload_that_broke_off_and_is_repeated_gives_the_same_bits() -> None:
    expected = mean_after(0)
    for break_at in (1, 5, len(SCHEMA) // 2):
        assert mean_after(break_at) == expected


def test_a_repeat_may_be_cut_into_other_chunks() -> None:
    server = make_server(CONFIG)
    nodes = [Node(server, node) for node in range(2)]
    first = server.begin_upload(nodes[0].manifest())
    first.add(0, 0, nodes[0].payload(0)[:1000])
    again = server.begin_upload(nodes[0].manifest())
    again.add(0, 0, nodes[0].payload(0)[:600])
    again.add(0, 600, nodes[0].payload(0)[600:])
    for tensor in server.trained_by(0)[1:]:
        again.add(tensor, 0, nodes[0].payload(tensor))
    again.finish()
    nodes[1].upload()
    assert server.state.values.tobytes() == mean_after(0)


def test_a_repeat_with_other_values_fails_the_round_by_name() -> None:
    server = make_server(CONFIG)
    nodes = [Node(server, node) for node in range(2)]
    nodes[0].send(server.begin_upload(nodes[0].manifest()), 5)
    nodes[0].decoder.weights[SCHEMA[2].name] += 1
    with pytest.raises(RoundFailed, match="node 0 repeated a broken upload of round 0 with other values"):
        nodes[0].upload()
    with pytest.raises(RoundFailed, match="node 0 repeated"):
        nodes[1].upload()


def test_a_repeat_with_other_values_where_nothing_was_added_yet_is_accepted() -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    server.begin_upload(node.manifest(tokens=5))
    node.decoder.weights[SCHEMA[0].name] += 1
    node.upload()
    assert server.state.tensor(0).tobytes() == bytes(node.payload(0))


def test_a_repeat_with_another_weight_is_refused_once_something_was_added() -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    node.send(server.begin_upload(node.manifest()), 1)
    with pytest.raises(Refused, match="new attempt at round 0 claims 5 tokens, the first one 100"):
        node.upload(tokens=5)


def test_the_former_attempt_cannot_add_any_more() -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    first = server.begin_upload(node.manifest())
    server.begin_upload(node.manifest())
    with pytest.raises(Refused, match="it has begun its upload of round 0 again"):
        first.add(0, 0, node.payload(0))


def test_a_new_attempt_waits_until_the_former_has_let_go_of_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    is_adding, may_go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        is_adding.set()
        assert may_go_on.wait(5)
        add_to_mean(*arguments)

    monkeypatch.setattr("spes_core.sync.upload.add_to_mean", slow)
    first = server.begin_upload(node.manifest())
    adding, _ = in_thread(lambda: first.add(0, 0, node.payload(0)))
    assert is_adding.wait(5)
    beginning, begun = in_thread(lambda: server.begin_upload(node.manifest()))
    time.sleep(0.1)
    assert beginning.is_alive()
    may_go_on.set()
    adding.join(5)
    beginning.join(5)
    node.send(begun[0])
    begun[0].finish()
    assert first.contribution.is_complete
    assert server.state.tensor(0).tobytes() == bytes(node.payload(0))


def test_a_cancelled_upload_lets_go_of_its_thread() -> None:
    server = make_server(CONFIG)
    node = Node(server, 1)
    upload = server.begin_upload(node.manifest())
    thread, outcome = in_thread(lambda: node.send(upload))
    time.sleep(0.05)
    assert thread.is_alive()  # waits for node 0
    upload.cancel()
    thread.join(5)
    assert isinstance(outcome[0], ProtocolError)


# Order and deadlines


def test_a_node_waits_for_lower_numbers_only_where_both_train() -> None:
    server = make_server(CONFIG)
    node = Node(server, 1)
    upload = server.begin_upload(node.manifest())
    thread, _ = in_thread(lambda: node.send(upload))
    time.sleep(0.05)
    assert thread.is_alive()
    assert server.state.tensor(0).tobytes() == bytes(PlainDecoder(CONFIG).weights["embedding"].numpy().data.cast("B"))
    low = Node(server, 0)
    low.upload()
    thread.join(5)
    assert not thread.is_alive()


def test_the_next_round_does_not_touch_the_weights_before_all_have_downloaded() -> None:
    server = make_server(CONFIG)
    nodes = [Node(server, node) for node in range(2)]
    for node in nodes:
        node.upload()
    slow = nodes[1].download()
    nodes[0].download().delivered()
    before = server.state.values.tobytes()
    fast, outcome = in_thread(lambda: nodes[0].upload(round=1, step=4))
    time.sleep(0.1)
    assert fast.is_alive() and server.state.values.tobytes() == before
    slow.delivered()
    fast.join(5)
    assert outcome == [None] and server.state.values.tobytes() != before


def test_a_missing_node_ends_the_round_by_name_in_time() -> None:
    config = small_config(nodes=3, round=RoundConfig(timeout_s=0.3))
    recorder = Recorder()
    server = make_server(config, recorder)
    began_s = time.monotonic()

    def upload_and_wait() -> None:
        node = Node(server, 0, config)
        node.upload()
        node.download()

    _, outcome = thread = in_thread(upload_and_wait)
    half = Node(server, 1, config)
    half.send(server.begin_upload(half.manifest()), 0)
    with pytest.raises(RoundFailed) as raised:
        server.wait_finished()
    elapsed_s = time.monotonic() - began_s
    thread[0].join(5)
    expected = (
        "round 0 was not complete within round.timeout_s (0.3): node 1 has not finished its upload; node 2 has not"
        " uploaded"
    )
    assert str(raised.value) == expected and str(outcome[0]) == expected
    assert 0.25 < elapsed_s < 2
    assert [event["reason"] for event in recorder.of("failure")] == [expected]
    with pytest.raises(RoundFailed):
        server.join(make_hello(config, SCHEMA, 2))


def test_a_result_that_is_never_fetched_ends_the_run_by_name() -> None:
    config = small_config(round=RoundConfig(timeout_s=0.2))
    server = make_server(config)
    nodes = [Node(server, node, config) for node in range(2)]
    for node in nodes:
        node.upload()
    nodes[0].download().delivered()
    with pytest.raises(RoundFailed, match=r"round 0 was not fetched by all .* \(0\.2\): node 1 has not downloaded"):
        server.wait_finished()


def test_a_slow_computation_between_rounds_is_no_failure() -> None:
    config = small_config(round=RoundConfig(timeout_s=0.3))
    server = make_server(config)
    run_rounds(config, lambda node: LocalClient(server), delay=lambda node, round: time.sleep(0.4))
    server.wait_finished()


def test_stopping_the_server_frees_everyone_who_waits() -> None:
    server = make_server(CONFIG)
    node = Node(server, 0)
    node.upload()
    thread, outcome = in_thread(node.download)
    main, ended = in_thread(server.wait_finished)
    server.fail("the server was stopped")
    for waiting in (thread, main):
        waiting.join(5)
    assert [str(outcome[0]), str(ended[0])] == ["the server was stopped"] * 2


# Whole rounds


@pytest.mark.parametrize("kind", ["none", "sgd", "nesterov"])
def test_all_nodes_and_the_server_hold_the_same_bits_after_every_round(kind: Any) -> None:
    for partition in (small_config().partition, FULL):
        config = small_config(outer=OuterConfig(kind=kind), partition=partition, nodes=3)
        server = make_server(config)
        decoders, reports = run_rounds(config, lambda node, server=server: LocalClient(server))
        server.wait_finished()
        flat = server.state.values.tobytes()
        assert all(b"".join(t.numpy().tobytes() for t in d.weights.values()) == flat for d in decoders)
        assert {report.digest for report in (row[-1] for row in reports)} == {server.state.digest()}
        assert [report.merged for report in reports[0]] == [True, False]


def test_one_node_adopts_its_own_weights_bitwise_and_downloads_nothing() -> None:
    config = small_config(nodes=1, merge=replace(CONFIG.merge, enabled=False))
    server = make_server(config)
    decoders, reports = run_rounds(config, lambda node: LocalClient(server))
    alone = PlainDecoder(config)
    for round in range(2):
        alone.train(config, 0, round)
    assert all(torch.equal(alone.weights[name], decoders[0].weights[name]) for name in alone.weights)
    assert [report.downlink_payload_bytes for report in reports[0]] == [0, 0]


def test_outer_sgd_with_rate_one_adopts_the_mean_up_to_rounding() -> None:
    def weights(outer: OuterConfig) -> np.ndarray:
        config = small_config(outer=outer)
        server = make_server(config)
        run_rounds(config, lambda node: LocalClient(server))
        return server.state.values

    np.testing.assert_allclose(
        weights(OuterConfig(kind="sgd", lr=1.0)), weights(OuterConfig(kind="none")), rtol=0, atol=1e-6
    )


def test_the_round_event_tells_bytes_and_tokens() -> None:
    recorder = Recorder()
    server = make_server(CONFIG, recorder)
    _, reports = run_rounds(CONFIG, lambda node: LocalClient(server))
    events = recorder.of("round")
    assert [(e["round"], e["step"], e["tokens"], e["merged"]) for e in events] == [
        (0, 2, 207, True),
        (1, 4, 414, False),
    ]
    for event, row in zip(events, zip(*reports, strict=True), strict=True):
        assert event["uplink_payload_bytes"] == {node: r.uplink_payload_bytes for node, r in enumerate(row)}
        assert event["downlink_payload_bytes"] == {node: r.downlink_payload_bytes for node, r in enumerate(row)}
        assert event["digest"] == row[0].digest and event["tokens"] == row[0].tokens
