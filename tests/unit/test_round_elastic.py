"""Rounds that close without everyone: the lost, the late, those that return, and those left out."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from spes_core.config import AggregateConfig, RoundConfig, RunConfig
from spes_core.errors import StaleRound
from spes_core.sync.messages import ANY_ROUND, DownloadRequest, Heartbeat, make_hello
from spes_core.sync.parameter_server import ParameterServer
from tests.round_node import CONFIG, SCHEMA, Node, nodes_of
from tests.small_rounds import (
    Recorder,
    in_thread,
    make_server,
    running,
    small_config,
)


def elastic(**changes: Any) -> RunConfig:
    policy = {"quorum": 0.5, "timeout_s": 60, "lost_after_s": 60, "reassign_after": 1, **changes}
    return small_config(nodes=4, budget_tokens=8 * 240, round=RoundConfig(**policy))


def lose(server: ParameterServer, node: int) -> None:
    """Let the last sign of life of a node be long ago."""
    server._members.nodes[node].heard_at_s -= 3600


def test_a_round_closes_without_a_lost_node_whose_experts_keep_their_value_and_then_move() -> None:
    config, recorder = elastic(), Recorder()
    server = make_server(config, recorder)
    with running(server):
        nodes = nodes_of(server, config)
        lose(server, 3)
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
        lose(server, 3)
        kept = {i: server.state.tensor(i).tobytes() for i, s in enumerate(SCHEMA) if ".experts.3." in s.name}
        for node in nodes[:3]:
            node.upload()
        for node in nodes[:3]:
            node.download()
        assert {i: server.state.tensor(i).tobytes() for i in kept} == kept


def test_a_snapshot_is_written_once_for_all_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    config, written = elastic(), []
    server, is_writing, goes_on = make_server(config), threading.Event(), threading.Event()
    write = server._write_snapshot

    def slowly(index: int) -> None:
        written.append(index)
        is_writing.set()
        assert goes_on.wait(10)
        write(index)

    monkeypatch.setattr(server, "_write_snapshot", slowly)
    with running(server):
        nodes = nodes_of(server, config)
        threads = [in_thread(partial(node.download, 0, is_snapshot=True)) for node in nodes[:2]]
        assert is_writing.wait(10)
        # Neither the sign of life nor an upload waits for the file.
        _, beat = in_thread(lambda: server.heartbeat(Heartbeat(node=2, session=nodes[2].welcome.session, step=1)))
        thread, _ = in_thread(nodes[3].upload)
        thread.join(10)
        assert not thread.is_alive() and beat
        goes_on.set()
        for thread, _ in threads:
            thread.join(10)
        assert [summary.digest for _, [summary] in threads] == [server.state.digest()] * 2
    assert written == [0]


def test_a_download_of_a_round_whose_files_are_gone_sends_the_node_to_the_open_round() -> None:
    config = replace(elastic(), merge=replace(CONFIG.merge, enabled=False))
    server = make_server(config)
    with running(server):
        nodes = nodes_of(server, config)
        for node in nodes:
            node.upload()
        request = DownloadRequest(node=3, session=nodes[3].welcome.session, round=0)
        chunks = server.open_download(request, lambda: False).chunks(256)
        next(chunks)
        lose(server, 3)
        for round in range(4):
            for node in nodes[:3]:
                if round:
                    node.upload(round)
            for node in nodes[:3]:
                node.download(round)
        with pytest.raises(StaleRound, match="round 0 is over without node 3; the run is at round 4"):
            list(chunks)


def test_a_late_upload_enters_no_round_and_the_node_goes_on_from_a_snapshot() -> None:
    config, recorder = elastic(), Recorder()
    server = make_server(config, recorder)
    with running(server):
        nodes = nodes_of(server, config)
        late = nodes[3]
        late.train(0)
        half = server.begin_upload(late.manifest())
        late.send(half, 2)
        lose(server, 3)
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
    config = elastic(quorum=0.75, timeout_s=0.3)
    server = make_server(config)
    with running(server) as ended:
        nodes = nodes_of(server, config)
        for node in nodes[:2]:
            node.upload()
        while not ended:
            time.sleep(0.02)
    assert "node 2 has not uploaded; node 3 has not uploaded; round.quorum needs 3 nodes" in str(ended[0])


def test_a_live_node_is_waited_for() -> None:
    config = elastic()
    server = make_server(config)
    with running(server):
        nodes = nodes_of(server, config)
        lose(server, 3)
        server.heartbeat(Heartbeat(node=3, session=nodes[3].welcome.session, step=1))
        for node in nodes[:3]:
            node.upload()
        time.sleep(0.5)
        assert server.rounds_closed == 0
        nodes[3].upload()
        assert nodes[0].download().nodes == (0, 1, 2, 3)


def test_a_live_node_is_waited_for_until_the_deadline_only() -> None:
    config = elastic(timeout_s=0.3)
    server = make_server(config)
    with running(server):
        nodes = nodes_of(server, config)
        for node in nodes[:3]:
            node.upload()
        assert len(nodes[0].download().nodes) < 4


def test_tokens_weigh_exactly_whatever_each_node_managed() -> None:
    config = replace(elastic(), merge=replace(CONFIG.merge, enabled=False))
    server = make_server(config)
    with running(server):
        nodes = nodes_of(server, config)
        for node, tokens in zip(nodes, (1, 10, 50, 120), strict=True):
            node.upload(tokens=tokens)
        sent = [np.frombuffer(node.sent[0], dtype=np.float32).astype(np.float64) for node in nodes]
        for node in nodes:
            node.download()
        expected = sum(w * x for w, x in zip((1, 10, 50, 120), sent, strict=True)) / 181
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
