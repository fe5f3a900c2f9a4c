"""A node adopts exactly what it lacks, in place, and notices when that is not what the server holds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from spes_core.config import OuterConfig
from spes_core.errors import ProtocolError
from spes_core.partition import downloads
from spes_core.sync.client import DownloadReport, Sink
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import DownloadManifest
from spes_core.sync.parameter_server import ParameterServer, Standing
from spes_core.train.exchange import Exchange
from spes_core.train.weights import LocalWeights
from tests.small_rounds import (
    PlainDecoder,
    Recorder,
    in_thread,
    make_exchange,
    make_server,
    run_rounds,
    small_config,
    small_schema,
)

CONFIG = small_config()
SCHEMA = small_schema(CONFIG)


def round_with(server: ParameterServer, client: LocalClient) -> None:
    """One round in which node 0 uses ``client``; raises what node 0 raises."""
    honest, honest_decoder = make_exchange(LocalClient(server), CONFIG, 1)
    exchange, decoder = make_exchange(client, CONFIG, 0)
    honest.join()
    exchange.join()
    honest_decoder.train(CONFIG, 1, 0)
    decoder.train(CONFIG, 0, 0)
    in_thread(lambda: honest.run_round(0, 2, 100))
    exchange.run_round(0, 2, 100)


class Distorting(LocalClient):
    """Announces fewer tensors than the server does."""

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        class Between:
            def begin(self, manifest: DownloadManifest) -> None:
                sink.begin(replace(manifest, tensors=manifest.tensors[1:]))

            def write(self, tensor: int, offset: int, payload: memoryview) -> None:
                sink.write(tensor, offset, payload)

        return super().download(round=round, sink=Between())


class Damaging(LocalClient):
    """Loses the last chunk."""

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        class Between:
            begin = sink.begin

            def write(self, tensor: int, offset: int, payload: memoryview) -> None:
                if tensor < len(SCHEMA) - 1:
                    sink.write(tensor, offset, payload)

        return super().download(round=round, sink=Between())


def test_a_download_of_other_tensors_is_refused() -> None:
    server = make_server(CONFIG)
    with pytest.raises(ProtocolError, match="announced other tensors than this node lacks"):
        round_with(server, Distorting(server))


def test_weights_that_differ_from_the_servers_are_noticed() -> None:
    server = make_server(CONFIG)
    with pytest.raises(ProtocolError, match="the weights after round 0 differ between node 0 and the server"):
        round_with(server, Damaging(server))


def test_a_node_with_other_initial_weights_is_told_so() -> None:
    exchange, decoder = make_exchange(LocalClient(make_server(CONFIG)), CONFIG, 0)
    decoder.weights["embedding"][0, 0] += 1
    with pytest.raises(ProtocolError, match="the initial weights differ between node 0 and the server"):
        exchange.join()


def test_weights_are_adopted_in_place() -> None:
    server = make_server(CONFIG)
    first, decoder = make_exchange(LocalClient(server), CONFIG, 0)
    second, _ = make_exchange(LocalClient(server), CONFIG, 1)
    before = {name: tensor.clone() for name, tensor in decoder.weights.items()}
    views = dict(decoder.weights)
    for exchange in (first, second):
        exchange.join()
    decoder.train(CONFIG, 0, 0)
    in_thread(lambda: second.run_round(0, 2, 100))
    first.run_round(0, 2, 100)
    flat = torch.cat([view.flatten() for view in views.values()]).numpy()
    assert flat.tobytes() == server.state.values.tobytes()
    assert not any(torch.equal(views[name], before[name]) for name in views)


@pytest.mark.parametrize("merged", [True, False])
def test_bytes_follow_the_rule_of_the_partition(merged: bool) -> None:
    config = small_config(merge=replace(CONFIG.merge, enabled=merged), nodes=3)
    server = make_server(config)
    _, reports = run_rounds(config, lambda node: LocalClient(server), num_rounds=1)
    partition = config.make_partition()
    for node, (report,) in enumerate(reports):
        up = sum(4 * spec.num_elements for spec in SCHEMA if partition.trains(node, spec.name))
        down = sum(
            4 * spec.num_elements
            for spec in SCHEMA
            if downloads(partition, node, spec.name, experts_changed=merged, all_changed=False)
        )
        assert (report.uplink_payload_bytes, report.downlink_payload_bytes) == (up, down)
        assert report.merged == merged


def test_tensors_that_numpy_cannot_see_are_staged_and_give_the_same_weights() -> None:
    """Float64 and transposed weights take the way that a GPU's take."""
    server = make_server(CONFIG)
    barrier = threading.Barrier(2)

    def node_main(node: int) -> PlainDecoder:
        decoder = PlainDecoder(CONFIG)
        if node == 1:
            weights = decoder.weights
            decoder.weights = {n: t.double() if t.dim() < 2 else t.T.contiguous().T for n, t in weights.items()}
        exchange = Exchange(LocalClient(server), LocalWeights(decoder.tensors()), CONFIG.make_partition(), node, CONFIG)
        largest = max(4 * spec.num_elements for spec in SCHEMA)
        assert exchange.buffer_bytes == CONFIG.wire.chunk_bytes + (largest if node == 1 else 0)
        exchange.join()
        barrier.wait()
        decoder.train(CONFIG, node, 0)
        exchange.run_round(0, 2, 100)
        return decoder

    other = in_thread(lambda: node_main(1))
    first = node_main(0)
    other[0].join(10)
    second = other[1][0]
    assert all(torch.equal(first.weights[name], second.weights[name].float()) for name in first.weights)


def test_a_node_that_resumes_elsewhere_than_the_server_is_told_so() -> None:
    exchange, _ = make_exchange(LocalClient(make_server(CONFIG)), CONFIG, 0)
    with pytest.raises(ProtocolError, match="node 0 is about to enter round 1, and the server is at round 0; stop all"):
        exchange.join(1)


def test_a_server_goes_on_with_the_bits_that_it_stored() -> None:
    config = small_config(outer=OuterConfig(kind="nesterov"))
    whole = make_server(config)
    run_rounds(config, lambda node: LocalClient(whole))
    stored: list[tuple[Standing, np.ndarray, np.ndarray]] = []

    def save(standing: Standing) -> None:
        assert standing.momentum is not None
        stored.append((standing, first.state.values.copy(), standing.momentum.copy()))

    first = make_server(config, checkpoint_steps=[2])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.wait_finished, save)
        run_rounds(config, lambda node: LocalClient(first))
        waiting.result(10)
    ((standing, values, momentum),) = stored
    assert (standing.round, standing.step, standing.tokens) == (1, 2, 207)
    assert first.state.values.tobytes() == whole.state.values.tobytes()

    def value_of(name: str) -> np.ndarray:
        index = [spec.name for spec in first.schema].index(name)
        return values[first.state.starts[index] : first.state.starts[index + 1]]

    second = ParameterServer(config, first.schema, value_of, Recorder(), replace(standing, momentum=momentum))
    assert second.rounds_closed == 1

    def node_main(node: int) -> None:
        exchange, decoder = make_exchange(LocalClient(second), config, node)
        for name, tensor in decoder.weights.items():
            tensor.copy_(torch.from_numpy(value_of(name)).view(tensor.shape))
        exchange.join(1)
        decoder.train(config, node, 1)
        exchange.run_round(1, 4, 100 + 7 * node)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(node_main, range(2)))
    assert second.state.values.tobytes() == whole.state.values.tobytes()
    assert second.is_finished
