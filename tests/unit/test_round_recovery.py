"""What a server's folder gives back after a crash, and what it keeps."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_core.config import OuterConfig, RunConfig, WireConfig
from spes_core.errors import ProtocolError, RoundFailed
from spes_core.partition import sparse
from spes_core.sync.journal import Journal, UploadRecord
from spes_core.sync.ledger import Standing
from spes_core.sync.messages import Heartbeat, make_hello
from spes_core.sync.parameter_server import ParameterServer
from tests.round_node import CONFIG, SCHEMA, Node, nodes_of, one_round, whole_run
from tests.small_rounds import (
    Recorder,
    in_thread,
    make_server,
    running,
    small_config,
)


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
    recorder = Recorder()
    make_server(CONFIG, recorder, folder=tmp_path)
    assert [(e["node"], e["round"], e["file"]) for e in recorder.of("damaged")] == [(0, 0, str(path))]
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
    assert server.status()["failure"].startswith("the server cannot store uploads under")


def test_a_record_that_cannot_be_stored_ends_the_run_for_everyone_at_once(tmp_path: Path) -> None:
    server = make_server(CONFIG, folder=tmp_path)
    node = Node(server, 0)
    (tmp_path / "0" / "node-0.json.partial").mkdir(parents=True)
    with pytest.raises(RoundFailed, match="cannot store uploads"):
        node.upload()
    with pytest.raises(RoundFailed, match="cannot store uploads"):
        server.heartbeat(Heartbeat(node=0, session=node.welcome.session, step=2))


def test_a_join_that_its_caller_has_given_up_does_not_replace_the_next_one(tmp_path: Path) -> None:
    crashed(tmp_path, CONFIG, lambda server, nodes: one_round(nodes, 0))
    recorder, is_given_up = Recorder(), threading.Event()
    server = make_server(CONFIG, recorder, folder=tmp_path)
    hello = make_hello(CONFIG, SCHEMA, 0, 1)
    # Round 0 is yet to be formed again, so both wait.
    former, former_outcome = in_thread(lambda: server.join(hello, is_given_up.is_set))
    is_given_up.set()
    with running(server):
        welcome = server.join(hello)
        former.join(10)
        assert isinstance(former_outcome[0], ProtocolError)
        server.heartbeat(Heartbeat(node=0, session=welcome.session, step=2))
    assert [event["node"] for event in recorder.of("join")] == [0]


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


@pytest.mark.parametrize("change", [{"tokens": 91}, {"tokens": "many"}, {"tensors": 7}])
def test_a_record_that_was_changed_on_the_disk_counts_as_absent(tmp_path: Path, change: dict[str, object]) -> None:
    journal = Journal(tmp_path, "run")
    upload = journal.open_upload(0, 1)
    upload.append(memoryview(b"bytes"))
    record = UploadRecord(tokens=90, tensors=(0, 2), payload_bytes=5, framing_bytes=0, digest=upload.digest)
    upload.close()
    journal.finish_upload(0, 1, record)
    assert journal.upload(0, 1) == record
    path = tmp_path / "0" / "node-1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert journal.upload(0, 1) is None
