"""The server as a real process: how it starts, refuses to start, ends, and dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spes_core.address import read_address
from spes_core.config import RoundConfig, RunConfig, SyncConfig
from spes_core.errors import RoundFailed, Unreachable
from spes_core.events import read_events
from spes_core.model.initialise import initial_tensor
from spes_core.protocol import credentials
from spes_core.protocol.client import SyncClient
from spes_core.protocol.connect import connect
from spes_core.protocol.frames import Kind, pack
from spes_core.protocol.translate import to_bytes
from spes_core.runfile import RunFile
from spes_core.sync.client import Client
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import make_hello
from spes_core.sync.parameter_server import ParameterServer
from tests.bare_node import BareNode
from tests.small_rounds import Recorder, in_thread, running, small_config, small_schema
from tests.strangers import Stranger, manifest_of, refused, silent

pytestmark = pytest.mark.processes
CONFIG = small_config()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def prepare(folder: Path, config: RunConfig = CONFIG, address: str = "127.0.0.1:0") -> Path:
    path = folder / "run.json"
    RunFile(trial="test", config=config, data_dir=str(folder), server_address=address).save(path)
    return path


@contextmanager
def server(path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "spes_core.server", str(path), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read().strip().splitlines()[-1]


def seeded(config: RunConfig) -> Callable[[str], np.ndarray]:
    """The weights that the server process starts from."""
    return lambda name: initial_tensor(config.model, name, config.seed).view(-1).numpy()


def take_part(client: Client, config: RunConfig, node: int) -> BareNode:
    bare = BareNode(client, config, node, seeded(config))
    bare.take_part()
    return bare


def joining(folder: Path, node: int) -> SyncClient:
    """The client of a node of the run in ``folder``, as the node's process makes it."""
    (client,) = connect(RunFile.load(folder / "run.json"), folder, node)
    return client


def test_a_run_over_real_processes_equals_the_same_run_in_process(tmp_path: Path) -> None:
    with server(prepare(tmp_path)) as process:
        address = read_address("127.0.0.1:0", tmp_path)
        with grpc.insecure_channel(address) as channel:
            status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        with ThreadPoolExecutor(2) as pool:
            nodes = list(pool.map(lambda node: take_part(joining(tmp_path, node), CONFIG, node), range(2)))
        assert process.wait(10) == 0
    local = ParameterServer(CONFIG, small_schema(CONFIG), seeded(CONFIG), Recorder(), tmp_path / "in-process")
    with running(local), ThreadPoolExecutor(2) as pool:
        expected = list(pool.map(lambda node: take_part(LocalClient(local), CONFIG, node), range(2)))
    assert nodes[0].digest() == nodes[1].digest() == expected[0].digest()
    events = list(read_events(tmp_path / "events" / "server.jsonl"))
    kinds = [event["kind"] for event in events]
    assert kinds[:2] == ["start", "listening"] and kinds[2:4] == ["join", "join"] and kinds[-1] == "end"
    # The last result is fetched while the server compares the experts: either may be told first.
    assert sorted(kinds[4:-1]) == ["experts", "round", "round"]
    assert (events[-1]["rounds"], events[-1]["merges"]) == (2, 1) and events[-1]["rss_peak_bytes"] > 1e7
    assert events[1]["address"] == address


def test_a_port_in_use_ends_with_2_and_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with server(prepare(tmp_path, address=address)) as process:
            assert process.wait(30) == 2
            line = last_line(process)
    assert line.startswith(f'error: server_address ("{address}") cannot be listened on; is the port in use?')
    assert not (tmp_path / "events").exists() and not (tmp_path / "server.address").exists()


def test_a_second_server_of_the_same_run_ends_with_2_and_leaves_the_first_its_files(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    with server(path):
        address = read_address("127.0.0.1:0", tmp_path)
        with server(path) as second:
            assert second.wait(30) == 2
            assert "server.jsonl is being written by another process" in last_line(second)
        assert read_address("127.0.0.1:0", tmp_path) == address


def test_a_folder_that_cannot_be_written_ends_with_1_and_one_clear_line(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    (tmp_path / "events").write_text("in the way of the folder")
    with server(path) as process:
        assert process.wait(30) == 1
        assert last_line(process).startswith(f"error: a file of the run in {tmp_path} cannot be read or written: ")


@pytest.mark.parametrize(
    ("address", "config", "line"),
    [
        (
            "0.0.0.0:0",
            CONFIG,
            'error: server_address ("0.0.0.0:0") leaves this machine, and the run has no certificates',
        ),
        ("example.org:80", CONFIG, "leaves this machine, and the run has no certificates"),
        ("127.0.0.1", CONFIG, 'server_address ("127.0.0.1") must be host:port, for instance 127.0.0.1:0'),
        (
            "127.0.0.1:0",
            replace(CONFIG, sync=SyncConfig(exchange="none")),
            'sync.exchange ("none") must be "rounds"',
        ),
    ],
)
def test_a_run_that_must_not_be_served_is_refused(
    tmp_path: Path, address: str, config: RunConfig, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from spes_core.server import main

    assert main([str(prepare(tmp_path, config, address))]) == 2
    assert line in capfd.readouterr().err.strip().splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


def test_a_missing_node_ends_the_server_with_1_after_it_has_told_the_others(tmp_path: Path) -> None:
    config = small_config(round=RoundConfig(timeout_s=1.0))
    with server(prepare(tmp_path, config)) as process:
        read_address("127.0.0.1:0", tmp_path)
        thread, outcome = in_thread(lambda: take_part(joining(tmp_path, 0), config, 0))
        assert process.wait(15) == 1
        thread.join(5)
        line = last_line(process)
    expected = "round 0 was not complete within round.timeout_s (1): node 1 has not uploaded"
    assert line == f"error: {expected}"
    assert isinstance(outcome[0], RoundFailed) and str(outcome[0]) == expected
    kinds = [event["kind"] for event in read_events(tmp_path / "events" / "server.jsonl")]
    assert kinds[-2:] == ["failure", "end"]


def test_sigterm_ends_it_by_name_and_tells_the_nodes(tmp_path: Path) -> None:
    with server(prepare(tmp_path)) as process:
        read_address("127.0.0.1:0", tmp_path)
        thread, outcome = in_thread(lambda: take_part(joining(tmp_path, 0), CONFIG, 0))
        time.sleep(0.5)
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1  # rounds are left: a stop is no success
        assert time.monotonic() - began_s < 8
        thread.join(5)
    assert isinstance(outcome[0], RoundFailed) and "the server was stopped (SIGTERM)" in str(outcome[0])


def test_a_killed_server_gives_the_nodes_one_clear_error_when_their_patience_ends(tmp_path: Path) -> None:
    config = small_config(round=RoundConfig(timeout_s=30, retry_s=1.0))
    with server(prepare(tmp_path, config)) as process:
        address = read_address("127.0.0.1:0", tmp_path)
        thread, outcome = in_thread(lambda: take_part(joining(tmp_path, 0), CONFIG, 0))
        time.sleep(0.5)
        assert thread.is_alive()
        process.kill()
        thread.join(5)
    assert isinstance(outcome[0], Unreachable)
    assert f"the server at {address} cannot be reached, after trying for 1." in str(outcome[0])


def test_it_dies_with_its_parent_even_when_that_is_killed(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    script = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'spes_core.server', sys.argv[1],"
        " '--die-with-parent']); print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    read_address("127.0.0.1:0", tmp_path)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline_s = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_nodes_go_on_with_a_server_that_was_killed_and_started_again_elsewhere(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    with server(path) as process:
        address = read_address("127.0.0.1:0", tmp_path)
        nodes = [BareNode(joining(tmp_path, node), CONFIG, node, seeded(CONFIG)) for node in range(2)]
        nodes[0].join()
        nodes[0].train(0)
        nodes[0].upload(0)
        waiting = in_thread(lambda: nodes[0].download(0))
        time.sleep(0.2)
        process.kill()
        process.wait()
    # Something else takes the port, so that the new server listens elsewhere.
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))), server(path) as process:
        partner = in_thread(nodes[1].take_part)
        waiting[0].join(30)
        assert not isinstance(waiting[1][0], Exception), waiting
        nodes[0].train(1)
        nodes[0].upload(1)
        nodes[0].download(1)
        partner[0].join(10)
        assert process.wait(15) == 0
    assert nodes[0].digest() == nodes[1].digest() and len(nodes[0].manifests) == 2


def test_a_server_killed_in_a_later_round_is_joined_again_there(tmp_path: Path) -> None:
    path, gate = prepare(tmp_path), threading.Event()
    nodes = []
    with server(path) as process:
        read_address("127.0.0.1:0", tmp_path)
        nodes = [BareNode(joining(tmp_path, node), CONFIG, node, seeded(CONFIG)) for node in range(2)]
        first = [in_thread(lambda node=node: node.take_part(range(1))) for node in nodes]
        for thread, outcome in first:
            thread.join(20)
            assert not isinstance(outcome[0], Exception), outcome
        for node in nodes:
            node.train(1)
        whole = nodes[0].payload

        def slow(tensor: int) -> memoryview:
            if tensor == nodes[0].trained[-1]:
                gate.wait(30)
            return whole(tensor)

        nodes[0].payload = slow  # type: ignore[method-assign]
        sending = in_thread(lambda: nodes[0].upload(1))
        time.sleep(0.3)
        receiving = in_thread(lambda: nodes[0].download(1))
        time.sleep(0.3)
        process.kill()
        process.wait()
        gate.set()
    with server(path) as process:
        partner = in_thread(lambda: (nodes[1].upload(1), nodes[1].download(1)))
        for thread, outcome in (sending, receiving, partner):
            thread.join(30)
            assert not isinstance(outcome[0], Exception), outcome
        assert process.wait(15) == 0
    assert nodes[0].digest() == nodes[1].digest()


def test_strangers_cost_a_real_server_no_memory_and_its_nodes_no_round(tmp_path: Path) -> None:
    with server(prepare(tmp_path)) as process:
        address = read_address("127.0.0.1:0", tmp_path)
        memory = psutil.Process(process.pid).memory_info
        token, until = credentials.of_node(None, tmp_path, 0).token, threading.Event()
        schema = small_schema(CONFIG)
        with Stranger(address) as stranger, Stranger(address, compression=grpc.Compression.Gzip) as bomber:
            assert "no join token" in refused(lambda: stranger.join(to_bytes(make_hello(CONFIG, schema, 0))))
            before_bytes = memory().rss
            many = b"\x3a\x00" * (1 << 19)
            for _ in range(5):
                refused(lambda: stranger.join(many))
                refused(lambda: stranger.join(bytes(32 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED)
                refused(lambda: bomber.join(bytes(8 << 20)), grpc.StatusCode.UNIMPLEMENTED)
                refused(lambda: stranger.send(pack(Kind.MANIFEST, os.urandom(1 << 20))))
            calls = [stranger.upload(silent(until)) for _ in range(60)]
            calls += [bomber.open_join.future(silent(until)) for _ in range(60)]
            other = replace(make_hello(small_config(seed=9), schema, 1), token=token)
            assert "another run: seed 9, here 0" in refused(lambda: stranger.join(to_bytes(other)))
            assert "not joined" in refused(lambda: stranger.send(manifest_of(b"s" * 16, 0, (0,))))
            grown_bytes = memory().rss - before_bytes
            with ThreadPoolExecutor(2) as pool:
                nodes = list(pool.map(lambda node: take_part(joining(tmp_path, node), CONFIG, node), range(2)))
            until.set()
            del calls
        assert process.wait(15) == 0
    assert nodes[0].digest() == nodes[1].digest()
    assert grown_bytes < 100 << 20  # one list of half a million entries at a time, while it is refused
    refusals = [event for event in read_events(tmp_path / "events" / "server.jsonl") if event["kind"] == "refusal"]
    assert 3 <= len(refusals) < 100
    assert all(event["node"] == 1 or "from ipv4:127.0.0.1:" in event["reason"] for event in refusals)


def test_health_says_not_serving_until_there_is_a_core_and_when_it_ends(tmp_path: Path) -> None:
    from spes_core.server import Listening

    run = RunFile.load(prepare(tmp_path))
    listening = Listening(run, tmp_path)
    core = ParameterServer(CONFIG, small_schema(CONFIG), seeded(CONFIG), Recorder(), tmp_path / "rounds")
    with grpc.insecure_channel(listening.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        said = [health.Check(health_pb2.HealthCheckRequest()).status]
        listening.open(core)
        watched = health.Watch(health_pb2.HealthCheckRequest())
        said.append(next(watched).status)
        closing = in_thread(listening.close)
        said.append(next(watched).status)
        watched.cancel()
        closing[0].join(10)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert said == [not_serving, serving, not_serving]
