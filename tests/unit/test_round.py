"""The server core: who may join, what it accepts in which round, how rounds close, end, and come back after a crash."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_core.config import AggregateConfig, OuterConfig, RoundConfig, RunConfig, WireConfig
from spes_core.errors import Refused, RoundFailed, StaleRound
from spes_core.partition import sparse
from spes_core.sync.ledger import Standing
from spes_core.sync.messages import ANY_ROUND, DownloadRequest, Heartbeat, make_hello
from spes_core.sync.parameter_server import ParameterServer
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
        ({"tokens": 2**60}, "tokens is not possible"),
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


# Elastic rounds


def elastic(**changes: Any) -> RunConfig:
    policy = {"quorum": 0.5, "timeout_s": 0.3, "lost_after_s": 0.1, "heartbeat_s": 0.01, "reassign_after": 1, **changes}
    return small_config(nodes=4, budget_tokens=8 * 240, round=RoundConfig(**policy))


def test_a_round_closes_without_a_lost_node_whose_experts_keep_their_value_and_then_move() -> None:
    config, recorder = elastic(), Recorder()
    server = make_server(config, recorder)
    with running(server):
        nodes = nodes_of(server, config)
        before = server.state.values.copy()
        for node in nodes[:3]:
            node.upload()
        summaries = [node.download() for node in nodes[:3]]
        # A merge takes place in round 0, so compare with what a round without one leaves alone.
        assert [summary.nodes for summary in summaries] == [(0, 1, 2)] * 3
        assert summaries[0].experts == (0, 3) and summaries[1].experts == (1,)
        lost = [i for i, spec in enumerate(SCHEMA) if ".experts.3." in spec.name]
        for node in nodes[:3]:
            node.upload(1)
        for node in nodes[:3]:
            node.download(1)
        assert any(not np.array_equal(server.state.tensor(i), before[: server.state.tensor(i).size]) for i in lost)
    assert server.status()["nodes"][3]["rounds_missed"] == 2
    assert [event["nodes"] for event in recorder.of("round")][:2] == [[0, 1, 2]] * 2


def test_experts_of_an_absent_node_are_untouched_bits() -> None:
    config = replace(elastic(reassign_after=0), merge=replace(CONFIG.merge, enabled=False))
    server = make_server(config)
    with running(server):
        nodes = nodes_of(server, config)
        kept = {i: server.state.tensor(i).tobytes() for i, s in enumerate(SCHEMA) if ".experts.3." in s.name}
        for node in nodes[:3]:
            node.upload()
        for node in nodes[:3]:
            node.download()
        assert {i: server.state.tensor(i).tobytes() for i in kept} == kept


def test_a_late_upload_enters_no_round_and_the_node_goes_on_from_a_snapshot() -> None:
    config, recorder = elastic(), Recorder()
    server = make_server(config, recorder)
    with running(server):
        nodes = nodes_of(server, config)
        late = nodes[3]
        late.train(0)
        half = server.begin_upload(late.manifest())
        late.send(half, 2)
        for node in nodes[:3]:
            node.upload()
        for node in nodes[:3]:
            node.download()
        with pytest.raises(StaleRound, match="round 0 is over without node 3; the run is at round 1: go on there"):
            half.add(2, 0, memoryview(late.sent[2]))
        with pytest.raises(StaleRound):
            late.upload()
        with pytest.raises(StaleRound):
            server.join(make_hello(config, SCHEMA, 3, 0))
        back = Node(server, 3, config, ANY_ROUND)
        assert back.welcome.round == 1 and back.experts == ()
        back.download(1, is_snapshot=True)
        for node in nodes[:3]:
            node.upload(1)
        back.upload(1)
        summaries = [node.download(1) for node in (*nodes[:3], back)]
        assert summaries[0].nodes == (0, 1, 2, 3)
        assert [summary.experts for summary in summaries] == [(0,), (1,), (2,), (3,)]
    assert recorder.of("stale")


def test_too_few_nodes_fail_the_round_by_name() -> None:
    config = elastic(quorum=0.75)
    server = make_server(config)
    with running(server) as ended:
        nodes = nodes_of(server, config)
        for node in nodes[:2]:
            node.upload()
        while not ended:
            time.sleep(0.02)
    assert "node 2 has not uploaded; node 3 has not uploaded; round.quorum needs 3 nodes" in str(ended[0])


def test_a_live_node_is_waited_for_until_the_deadline() -> None:
    config = elastic(timeout_s=0.6)
    server = make_server(config)
    stop = threading.Event()
    with running(server):
        nodes = nodes_of(server, config)
        slow = nodes[3]

        def beat() -> None:
            while not stop.wait(0.02):
                server.heartbeat(Heartbeat(node=3, session=slow.welcome.session, step=1))

        thread, _ = in_thread(beat)
        for node in nodes[:3]:
            node.upload()
        time.sleep(0.25)
        assert server.rounds_closed == 0
        slow.upload()
        assert nodes[0].download().nodes == (0, 1, 2, 3)
        stop.set()
        thread.join(5)


def test_tokens_weigh_exactly_whatever_each_node_managed() -> None:
    config = replace(elastic(), merge=replace(CONFIG.merge, enabled=False))
    server = make_server(config)
    with running(server):
        nodes = nodes_of(server, config)
        for node, tokens in zip(nodes, (1, 10, 100, 1000), strict=True):
            node.upload(tokens=tokens)
        sent = [np.frombuffer(node.sent[0], dtype=np.float32).astype(np.float64) for node in nodes]
        for node in nodes:
            node.download()
        expected = sum(w * x for w, x in zip((1, 10, 100, 1000), sent, strict=True)) / 1111
        np.testing.assert_allclose(server.state.tensor(0), expected, rtol=1e-6, atol=1e-7)


def test_a_quarantined_node_is_named_left_out_and_told_to_begin_anew() -> None:
    config = small_config(nodes=3, aggregate=AggregateConfig(quarantine_factor=5.0))
    recorder = Recorder()
    server = make_server(config, recorder)
    with running(server):
        nodes = nodes_of(server, config)
        nodes[2].train(0)
        nodes[2].sent = {
            tensor: (np.frombuffer(payload, dtype=np.float32) * 1000).tobytes()
            for tensor, payload in nodes[2].sent.items()
        }
        for node in nodes:
            node.upload()
        assert nodes[0].download().nodes == (0, 1)
        with pytest.raises(StaleRound):
            nodes[2].download()
    assert [(event["node"], event["round"]) for event in recorder.of("quarantine")] == [(2, 0)]


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
        (0, 2, 207, True, [0, 1]),
        (1, 4, 414, False, [0, 1]),
    ]
    trained = [sum(4 * SCHEMA[tensor].num_elements for tensor in server.trained_by(node)) for node in range(2)]
    assert all(event["uplink_payload_bytes"] == dict(enumerate(trained)) for event in events)


# After a crash


def crashed(folder: Path, config: RunConfig, stop_at: Callable[[ParameterServer, list[Node]], object]) -> None:
    """A server that dies where ``stop_at`` leaves it."""
    server = make_server(config, folder=folder, checkpoint_steps=())
    with running(server):
        stop_at(server, nodes_of(server, config))


def complete(folder: Path, config: RunConfig, first: int = 0) -> bytes:
    """The rest of the run after a restart, by nodes that begin again at round ``first``."""
    server = make_server(config, folder=folder)
    with running(server) as outcome:
        nodes = nodes_of(server, config)
        for round in range(first, 2):
            one_round(nodes, round)
    assert outcome == [None]
    return server.state.values.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("place", ["inside an upload", "between uploads", "after the close", "in the next round"])
def test_a_server_that_died_anywhere_goes_on_with_the_same_bits(tmp_path: Path, place: str, dtype: Any) -> None:
    config = small_config(wire=WireConfig(dtype=dtype), outer=OuterConfig(kind="nesterov"))

    def stop_at(server: ParameterServer, nodes: list[Node]) -> None:
        nodes[0].train(0)
        if place == "inside an upload":
            nodes[0].send(server.begin_upload(nodes[0].manifest()), 3, 100)
            return
        nodes[0].upload()
        if place == "between uploads":
            return
        nodes[1].upload()
        nodes[0].download()
        if place == "in the next round":
            nodes[1].download()
            nodes[1].upload(1)

    crashed(tmp_path, config, stop_at)
    assert complete(tmp_path, config) == whole_run(config)


def test_a_damaged_upload_is_sent_again(tmp_path: Path) -> None:
    crashed(tmp_path, CONFIG, lambda server, nodes: nodes[0].upload())
    path = tmp_path / "0" / "node-0.upload"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    assert complete(tmp_path, CONFIG) == whole_run(CONFIG)


def test_uploads_of_another_run_are_not_taken_up(tmp_path: Path) -> None:
    crashed(tmp_path, small_config(seed=7), lambda server, nodes: nodes[0].upload())
    server = make_server(CONFIG, folder=tmp_path)
    assert server.status()["nodes"][0]["received_bytes"] == 0


def test_a_run_goes_on_from_a_checkpoint_and_still_serves_older_results(tmp_path: Path) -> None:
    config = small_config(outer=OuterConfig(kind="nesterov"), wire=WireConfig(dtype="int8"))
    saved: list[tuple[Standing, np.ndarray]] = []
    server = make_server(config, checkpoint_steps=(2,), folder=tmp_path)

    def save(standing: Standing) -> None:
        copies = {
            name: values.copy() for name in ("momentum", "residual") if (values := getattr(standing, name)) is not None
        }
        saved.append((replace(standing, **copies), server.state.values.copy()))

    with running(server, save):
        nodes = nodes_of(server, config)
        one_round(nodes, 0)
        nodes[0].upload(1)
    [(standing, values)] = saved
    starts = server.state.starts
    at = {spec.name: values[a:b] for spec, a, b in zip(SCHEMA, starts, starts[1:], strict=False)}
    again = make_server(config, folder=tmp_path, standing=standing, initial=at.__getitem__, checkpoint_steps=(2,))
    with running(again) as outcome:
        behind = nodes_of(again, config)  # both begin at round 0: their own checkpoints are older
        for round in range(2):
            for node in behind:
                assert node.upload(round).ready.is_complete == (round == 0 or node.node == 0)
            for node in behind:
                node.download(round)
    assert outcome == [None] and again.state.values.tobytes() == whole_run(config)


def test_results_that_nobody_needs_are_removed(tmp_path: Path) -> None:
    config = small_config(budget_tokens=12 * 240)
    server = make_server(config, folder=tmp_path)
    with running(server):
        nodes = nodes_of(server, config)
        for round in range(6):
            one_round(nodes, round)
            assert len([path for path in tmp_path.iterdir() if path.is_dir()]) <= 3


def test_a_folder_that_takes_nothing_ends_the_run_with_one_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "rounds"
    server = make_server(CONFIG, folder=folder)
    node = Node(server, 0)
    folder.write_text("a file where a folder should be")
    with pytest.raises(RoundFailed, match=r"cannot store uploads under .*rounds: .*start all processes again"):
        node.upload()


def test_status_tells_who_is_present_and_who_is_late() -> None:
    server = make_server(CONFIG)
    Node(server, 0).upload()
    status = server.status()
    assert [node["state"] for node in status["nodes"]] == ["waiting", "absent"]
    assert status["nodes"][1]["late_s"] > 0 == status["nodes"][0]["late_s"]
    assert status["round"] == 0 and status["rounds"] == 2 and len(status["experts"]) == CONFIG.model.num_experts


def test_the_partition_of_absent_nodes_covers_all_experts() -> None:
    from spes_core.partition import reassigned

    base = sparse(7, 3)
    for absent in ((), (0,), (1, 2), (0, 2)):
        moved = reassigned(base, absent)
        assert all(moved.owners(expert) for expert in range(7))
        assert all(not moved.experts_by_node[node] for node in absent)
        sizes = [len(experts) for node, experts in enumerate(moved.experts_by_node) if node not in absent]
        assert max(sizes) - min(sizes) <= 1
