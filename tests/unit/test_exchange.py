"""A node adopts exactly what it lacks, in place, and notices when that is not what the server holds."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spes_core.errors import Diverged, ProtocolError, Refused, Unreachable
from spes_core.partition import downloads
from spes_core.sync.client import DownloadReport, PayloadOf, Sink, UploadReport
from spes_core.sync.codec import decode_change, encode_change, make_codec
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import DownloadManifest
from spes_core.sync.parameter_server import ParameterServer
from spes_core.train.adoption import Gate
from spes_core.train.exchange import Exchange
from spes_core.train.global_copy import GlobalCopy
from spes_core.train.weights import LocalWeights
from tests.small_rounds import (
    PlainDecoder,
    Recorder,
    in_thread,
    make_exchange,
    make_server,
    noise,
    run_rounds,
    running,
    small_config,
    small_schema,
)

CONFIG = small_config()
SCHEMA = small_schema(CONFIG)
CODECS = ["float32", "bfloat16", "int8", "int4"]


def round_with(server: ParameterServer, client: LocalClient) -> None:
    """One round in which node 0 uses ``client``; raises what node 0 raises."""
    honest, honest_decoder = make_exchange(LocalClient(server), CONFIG, 1)
    exchange, decoder = make_exchange(client, CONFIG, 0)
    honest.join()
    exchange.join()
    honest_decoder.train(CONFIG, 1, 0)
    decoder.train(CONFIG, 0, 0)
    with running(server):
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
    with running(server):
        in_thread(lambda: second.run_round(0, 2, 100))
        first.run_round(0, 2, 100)
    flat = torch.cat([view.flatten() for view in views.values()]).numpy()
    assert flat.tobytes() == server.state.values.tobytes()
    assert not any(torch.equal(views[name], before[name]) for name in views)


@pytest.mark.parametrize("merged", [True, False])
def test_bytes_follow_the_rule_of_the_partition(merged: bool) -> None:
    config = small_config(merge=replace(CONFIG.merge, enabled=merged), nodes=3)
    server = make_server(config)
    with running(server):
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


@pytest.mark.parametrize("codec", CODECS)
def test_tensors_that_numpy_cannot_see_are_staged_and_give_the_same_weights(codec: Any) -> None:
    """Float64 and transposed weights take the way that a GPU's take."""
    config = small_config(wire=replace(CONFIG.wire, dtype=codec))
    server = make_server(config)

    def node_main(node: int) -> PlainDecoder:
        decoder = PlainDecoder(config)
        if node == 1:
            weights = decoder.weights
            decoder.weights = {n: t.double() if t.dim() < 2 else t.T.contiguous().T for n, t in weights.items()}
        exchange = Exchange(LocalClient(server), LocalWeights(decoder.tensors()), config.make_partition(), node, config)
        exchange.join()
        for round in range(2):
            decoder.train(config, node, round)
            exchange.run_round(round, 2 * (round + 1), 100)
        return decoder

    with running(server), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(node_main, range(2))
    assert all(torch.equal(first.weights[name], second.weights[name].float()) for name in first.weights)


@pytest.mark.parametrize("codec", CODECS)
def test_memory_beside_the_model_is_what_the_codec_needs(codec: Any) -> None:
    config = small_config(wire=replace(CONFIG.wire, dtype=codec))
    exchange, decoder = make_exchange(LocalClient(make_server(config)), config, 0)
    sizes = [4 * spec.num_elements for spec in SCHEMA]
    trained = [size for size, spec in zip(sizes, SCHEMA, strict=True) if CONFIG.make_partition().trains(0, spec.name)]
    encoded = make_codec(codec).format.encoded_bytes(max(trained) // 4)
    copies = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 2}[codec]
    held = copies * sum(trained) + (encoded if copies else 0)
    assert exchange.buffer_bytes == held + CONFIG.wire.chunk_bytes
    staged = {name: tensor.double() for name, tensor in decoder.weights.items()}
    other = Exchange(LocalClient(make_server(config)), LocalWeights(staged), config.make_partition(), 0, config)
    assert other.buffer_bytes == exchange.buffer_bytes + max(sizes)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_tensor_may_be_encoded_again_and_gives_the_same_bytes(codec: Any, is_plain: bool) -> None:
    config = small_config(wire=replace(CONFIG.wire, dtype=codec))
    decoder = PlainDecoder(config)
    if not is_plain:
        decoder.weights = {name: tensor.double() for name, tensor in decoder.weights.items()}
    trained = range(len(SCHEMA))
    copy = GlobalCopy(config, LocalWeights(decoder.tensors()), trained)
    for round in range(2):
        old = [copy.exact(index).copy() for index in trained]
        decoder.train(config, 0, round)
        copy.begin_round()
        first = [bytes(copy.encode(index)) for index in trained]
        assert [bytes(copy.encode(index)) for index in trained] == first
        for index in trained:
            expected = decode_change(make_codec(codec), memoryview(first[index]), old[index], np.empty_like(old[index]))
            assert copy.keep(index).tobytes() == expected.tobytes() == copy.exact(index).tobytes()


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_what_a_change_lost_goes_into_the_next_one(codec: Any, is_kept: bool) -> None:
    config = small_config(wire=replace(CONFIG.wire, dtype=codec))
    decoder, spec = PlainDecoder(config), SCHEMA[0]
    copy = GlobalCopy(config, LocalWeights(decoder.tensors()), [0])
    weights = decoder.weights[spec.name]
    residual = np.zeros(spec.num_elements, np.float32)
    for _ in range(3):
        base = weights.numpy().ravel().copy()
        weights += torch.from_numpy(noise("step", _).standard_normal(weights.shape).astype(np.float32))
        expected = bytes(encode_change(make_codec(codec), weights.numpy().ravel(), base, residual))
        copy.begin_round()
        sent = bytes(copy.encode(0))
        assert sent == expected
        if is_kept:
            copy.keep(0)
        else:
            copy.decode(0, 0, memoryview(sent))
        assert copy.state()[f"residual|{spec.name}"].numpy().tobytes() == residual.tobytes()


class NotBefore(LocalClient):
    """Refuses to send anything."""

    def upload(self, **_: Any) -> UploadReport:
        raise AssertionError("something was sent")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_nothing_is_sent(bad: float) -> None:
    server = make_server(CONFIG)
    exchange, decoder = make_exchange(NotBefore(server), CONFIG, 0)
    exchange.join()
    decoder.weights["layers.1.experts.0.down"][1, 2] = bad
    with pytest.raises(Diverged, match=r"layers\.1\.experts\.0\.down holds NaN.* before the upload of round 0: node 0"):
        exchange.run_round(0, 2, 100)


def test_experts_of_others_may_hold_anything_without_ending_this_node() -> None:
    server = make_server(CONFIG)
    exchange, decoder = make_exchange(NotBefore(server), CONFIG, 0)
    exchange.join()
    decoder.weights["layers.1.experts.3.down"][1, 2] = float("nan")
    with pytest.raises(AssertionError, match="something was sent"):
        exchange.run_round(0, 2, 100)


class Failing(LocalClient):
    """Its upload fails in the middle, with the download waiting."""

    def upload(self, *, payload_of: PayloadOf, **others: Any) -> UploadReport:
        def failing(index: int) -> memoryview:
            if index > 3:
                raise Unreachable("the cable was pulled")
            return payload_of(index)

        return super().upload(payload_of=failing, **others)


def test_a_failed_upload_ends_the_download_beside_it_and_is_what_is_raised() -> None:
    server = make_server(CONFIG)
    with pytest.raises(Unreachable, match="the cable was pulled"):
        round_with(server, Failing(server))


class BeginsLate(Failing):
    """Its download begins only after the failed upload has tried to end it."""

    def __init__(self, server: ParameterServer) -> None:
        super().__init__(server)
        self.aborted = threading.Event()

    def abort(self) -> None:
        super().abort()
        self.aborted.set()

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        assert self.aborted.wait(10)
        return super().download(round=round, sink=sink)


def test_a_failed_upload_also_ends_a_download_that_is_yet_to_begin() -> None:
    server = make_server(CONFIG)
    with pytest.raises(Unreachable, match="the cable was pulled"):
        round_with(server, BeginsLate(server))


def test_no_result_is_asked_for_after_an_upload_that_was_refused() -> None:
    recorder = Recorder()
    server = make_server(CONFIG, recorder)
    exchange, _ = make_exchange(LocalClient(server), CONFIG, 0)
    exchange.join()
    with pytest.raises(Refused, match="a weight of 0 tokens is not possible"):
        exchange.run_round(0, 2, 0)
    assert ["0 tokens" in event["reason"] for event in recorder.of("refusal")] == [True]


def test_nothing_is_adopted_that_is_yet_to_be_sent() -> None:
    gate = Gate(lambda index: f"tensor {index}")
    gate.encoding(3)
    gate.adopt(2)
    thread, outcome = in_thread(lambda: gate.adopt(3))
    thread.join(0.1)
    assert thread.is_alive()
    gate.encoding(4)
    thread.join(5)
    assert outcome == [None]
    with pytest.raises(ProtocolError, match="the server asks again for tensor 3, whose result it has sent"):
        gate.encoding(3)
    thread, outcome = in_thread(lambda: gate.adopt(4))
    gate.close()
    thread.join(5)
    assert isinstance(outcome[0], Unreachable)


def test_a_repeated_round_is_adopted_only_as_far_as_it_was_compared() -> None:
    """A node that starts again repeats a round whose result lies ready: comparing must see what it trained."""
    server, seen = make_server(CONFIG), []

    class Slow(LocalClient):
        def upload(self, *, payload_of: PayloadOf, **others: Any) -> UploadReport:
            def slowly(index: int) -> memoryview:
                payload = payload_of(index)
                time.sleep(0.01)
                seen.append(bytes(payload))
                return payload

            return super().upload(payload_of=slowly, **others)

    with running(server):
        run_rounds(CONFIG, lambda node: LocalClient(server), num_rounds=1)
        again, decoder = make_exchange(Slow(server), CONFIG, 0)
        again.join(0)
        decoder.train(CONFIG, 0, 0)
        sent = [decoder.weights[spec.name].numpy().tobytes() for spec in SCHEMA]
        report = again.run_round(0, 2, 100)
        assert report.uplink_payload_bytes == 0
        trained = [i for i, spec in enumerate(SCHEMA) if CONFIG.make_partition().trains(0, spec.name)]
        assert seen == [sent[index] for index in trained]
        flat = torch.cat([decoder.weights[spec.name].flatten() for spec in SCHEMA]).numpy()
        assert flat.tobytes() == server.state.values.tobytes()


def test_a_node_ahead_of_the_server_is_told_so() -> None:
    exchange, _ = make_exchange(LocalClient(make_server(CONFIG)), CONFIG, 0)
    with pytest.raises(Refused, match="wants to go on with round 1, and the server has only come to round 0"):
        exchange.join(1)
