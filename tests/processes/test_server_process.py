"""The server as a real process: how it starts, refuses to start, ends, and dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spes_core.address import read_address
from spes_core.config import RoundConfig, RunConfig, SyncConfig
from spes_core.errors import RoundFailed, Unreachable
from spes_core.events import read_events
from spes_core.model.initialise import initial_tensor
from spes_core.protocol.client import SyncClient
from spes_core.runfile import RunFile
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import schema_of
from spes_core.sync.parameter_server import ParameterServer
from spes_core.train.exchange import Exchange
from spes_core.train.weights import LocalWeights
from tests.small_rounds import in_thread, noise, small_config, small_schema

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


class SeededDecoder:
    """The model's tensors with the weights that the server process starts from."""

    def __init__(self, config: RunConfig) -> None:
        self.weights = {
            spec.name: initial_tensor(config.model, spec.name, config.seed) for spec in small_schema(config)
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.weights


def take_part(client: SyncClient | LocalClient, config: RunConfig, node: int) -> SeededDecoder:
    decoder = SeededDecoder(config)
    exchange = Exchange(client, LocalWeights(decoder.tensors()), config.make_partition(), node, config)
    exchange.join()
    for round in range(2):
        for name, tensor in decoder.weights.items():
            if config.make_partition().trains(node, name):
                tensor += torch.from_numpy(noise(name, node, round).standard_normal(tuple(tensor.shape))).float()
        exchange.run_round(round, 2 * (round + 1), 10 + node)
    return decoder


def test_a_run_over_real_processes_equals_the_same_run_in_process(tmp_path: Path) -> None:
    with server(prepare(tmp_path)) as process:
        address = read_address("127.0.0.1:0", tmp_path)
        with grpc.insecure_channel(address) as channel:
            status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        with ThreadPoolExecutor(2) as pool:
            decoders = list(pool.map(lambda node: take_part(SyncClient(address, CONFIG, node), CONFIG, node), range(2)))
        assert process.wait(10) == 0
    schema = small_schema(CONFIG)
    local = ParameterServer(
        CONFIG,
        schema,
        lambda name: initial_tensor(CONFIG.model, name, CONFIG.seed).view(-1).numpy(),
        lambda kind, **fields: None,
    )
    with ThreadPoolExecutor(2) as pool:
        expected = list(pool.map(lambda node: take_part(LocalClient(local), CONFIG, node), range(2)))
    for decoder in decoders:
        assert all(torch.equal(decoder.weights[n], expected[0].weights[n]) for n in expected[0].weights)
    events = list(read_events(tmp_path / "events" / "server.jsonl"))
    kinds = [event["kind"] for event in events]
    assert kinds[:2] == ["start", "listening"] and kinds[2:] == ["join", "join", "round", "round", "end"]
    assert (events[-1]["rounds"], events[-1]["merges"]) == (2, 1) and events[-1]["rss_peak_bytes"] > 1e7
    assert events[1]["address"] == address
    assert schema == schema_of({n: tuple(t.shape) for n, t in decoders[0].weights.items()})


def test_a_port_in_use_ends_with_2_and_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with server(prepare(tmp_path, address=address)) as process:
            assert process.wait(30) == 2
            line = last_line(process)
    assert line.startswith(f'error: server_address ("{address}") cannot be listened on; is the port in use?')
    assert not (tmp_path / "events").exists() and not (tmp_path / "server.address").exists()


@pytest.mark.parametrize(
    ("address", "config", "line"),
    [
        (
            "0.0.0.0:0",
            CONFIG,
            'error: server_address ("0.0.0.0:0") must be a loopback address such as 127.0.0.1',
        ),
        ("example.org:80", CONFIG, "must be a loopback address"),
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
        address = read_address("127.0.0.1:0", tmp_path)
        thread, outcome = in_thread(lambda: take_part(SyncClient(address, config, 0), config, 0))
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
        address = read_address("127.0.0.1:0", tmp_path)
        thread, outcome = in_thread(lambda: take_part(SyncClient(address, CONFIG, 0), CONFIG, 0))
        time.sleep(0.5)
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1  # rounds are left: a stop is no success
        assert time.monotonic() - began_s < 8
        thread.join(5)
    assert isinstance(outcome[0], RoundFailed) and "the server was stopped (SIGTERM)" in str(outcome[0])


def test_a_killed_server_gives_the_nodes_one_clear_error_at_once(tmp_path: Path) -> None:
    with server(prepare(tmp_path)) as process:
        address = read_address("127.0.0.1:0", tmp_path)
        thread, outcome = in_thread(lambda: take_part(SyncClient(address, CONFIG, 0), CONFIG, 0))
        time.sleep(0.5)
        assert thread.is_alive()
        process.kill()
        thread.join(5)
    assert isinstance(outcome[0], Unreachable)
    assert f"the server at {address} went away or cannot be reached" in str(outcome[0])


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
