"""Over a real socket the same rounds give the same bits, and no bytes that a stranger sends do harm."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf import descriptor_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spes_core.config import PartitionConfig, RoundConfig
from spes_core.errors import ProtocolError, Refused, RoundFailed, Unreachable
from spes_core.protocol import channel, frames, sync_pb2
from spes_core.protocol.client import SyncClient
from spes_core.protocol.frames import Kind, pack
from spes_core.protocol.translate import from_bytes, to_bytes
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import UploadManifest, make_hello
from tests.small_rounds import (
    FULL,
    PlainDecoder,
    Recorder,
    in_thread,
    make_exchange,
    make_server,
    run_rounds,
    served,
    small_config,
    small_schema,
)

CONFIG = small_config()
SCHEMA = small_schema(CONFIG)


@pytest.mark.parametrize("partition", [PartitionConfig(), FULL], ids=["sparse", "full"])
def test_grpc_and_in_process_give_the_same_bits(partition: PartitionConfig) -> None:
    config = small_config(nodes=3, partition=partition)
    local = make_server(config)
    expected, _ = run_rounds(config, lambda node: LocalClient(local))
    core = make_server(config)
    with served(core, config) as address:
        decoders, _ = run_rounds(config, lambda node: SyncClient(address, config, node))
        core.wait_finished()
    for decoder in decoders:
        assert all(torch.equal(decoder.weights[name], expected[0].weights[name]) for name in expected[0].weights)


def test_node_and_server_count_the_same_bytes() -> None:
    recorder = Recorder()
    core = make_server(CONFIG, recorder)
    with served(core, CONFIG) as address:
        _, reports = run_rounds(CONFIG, lambda node: SyncClient(address, CONFIG, node))
        core.wait_finished()
    for event, row in zip(recorder.of("round"), zip(*reports, strict=True), strict=True):
        for field in (
            "uplink_payload_bytes",
            "uplink_framing_bytes",
            "downlink_payload_bytes",
            "downlink_framing_bytes",
        ):
            assert event[field] == {node: getattr(report, field) for node, report in enumerate(row)}, field
        wire = core.wire
        sizes = [wire.encoded_bytes(SCHEMA[index].num_elements) for index in core.trained_by(1)]
        assert row[1].uplink_payload_bytes == sum(sizes)
        chunks = sum(len(list(wire.chunks(size, CONFIG.wire.chunk_bytes))) for size in sizes)
        manifest = row[1].uplink_framing_bytes - (chunks + 2) * frames.HEADER_BYTES
        assert 50 < manifest < 200


def test_the_times_of_a_round_do_not_overlap() -> None:
    core = make_server(CONFIG)
    elapsed_s: dict[int, float] = {}

    def node_main(node: int) -> Any:
        with SyncClient(address, CONFIG, node) as client:
            exchange, decoder = make_exchange(client, CONFIG, node)
            exchange.join()
            decoder.train(CONFIG, node, 0)
            time.sleep(0.3 * node)
            began_s = time.perf_counter()
            report = exchange.run_round(0, 2, 100)
            elapsed_s[node] = time.perf_counter() - began_s
            return report

    with served(core, CONFIG) as address:
        waiting = in_thread(lambda: node_main(0))
        late = node_main(1)
        waiting[0].join(10)
        early = waiting[1][0]
    for node, report in enumerate((early, late)):
        parts = report.serialise_s + report.transfer_s + report.wait_s + report.merge_s + report.aggregate_s
        assert 0 < parts <= elapsed_s[node] * 1.05 + 0.02
    assert early.wait_s > 0.2 > late.wait_s


@pytest.mark.parametrize("record", [make_hello(CONFIG, SCHEMA, 1)], ids=["hello"])
def test_records_survive_translation(record: Any) -> None:
    assert from_bytes(type(record), to_bytes(record)) == record


def test_the_generated_protobuf_file_describes_what_sync_proto_says(tmp_path: Path) -> None:
    # Descriptors, not text: another release of the generator writes other headers.
    root, made = Path(__file__).parents[2], tmp_path / "descriptors"
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{root}",
        f"--descriptor_set_out={made}",
    ]
    subprocess.run([*command, "spes_core/protocol/sync.proto"], check=True, cwd=root)
    (described,) = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    sync_pb2.DESCRIPTOR.CopyToProto(committed)
    for message in described.message_type:
        for field in message.field:
            field.ClearField("json_name")
    assert committed == described


# Errors reach the node


def test_a_refusal_reaches_the_node_with_its_reason() -> None:
    other = small_config(seed=9)
    with served(make_server(CONFIG), CONFIG) as address, SyncClient(address, other, 0) as client:
        exchange, _ = make_exchange(client, other, 0)
        with pytest.raises(
            Refused, match=r"the server refused node 0: this node belongs to another run: seed 9, here 0"
        ):
            exchange.join()


def test_a_dead_peer_ends_the_round_for_all_by_name() -> None:
    config = small_config(nodes=3, round=RoundConfig(timeout_s=1.0))
    core = make_server(config)
    with served(core, config) as address:
        clients = [SyncClient(address, config, node) for node in range(3)]
        nodes = [make_exchange(client, config, node) for node, client in enumerate(clients)]
        for exchange, _ in nodes:
            exchange.join()
        clients[2].close()  # node 2 dies
        waiting = [in_thread(lambda exchange=nodes[n][0]: exchange.run_round(0, 2, 100)) for n in range(2)]
        began_s = time.monotonic()
        with pytest.raises(RoundFailed, match="node 2 has not uploaded"):
            core.wait_finished()
        for thread, outcome in waiting:
            thread.join(5)
            assert isinstance(outcome[0], RoundFailed)
            assert "round 0 was not complete within round.timeout_s (1): node 2 has not uploaded" in str(outcome[0])
        assert time.monotonic() - began_s < 3


def test_a_server_that_vanishes_gives_one_clear_error_at_once() -> None:
    core = make_server(CONFIG)
    with served(core, CONFIG) as address:
        client = SyncClient(address, CONFIG, 0)
        exchange, _ = make_exchange(client, CONFIG, 0)
        exchange.join()
        thread, outcome = in_thread(lambda: exchange.run_round(0, 2, 100))
        time.sleep(0.2)
        assert thread.is_alive()
    thread.join(5)
    assert isinstance(outcome[0], Unreachable | ProtocolError)
    began_s = time.monotonic()
    with pytest.raises(Unreachable, match=f"the server at {address} went away or cannot be reached"):
        exchange.run_round(0, 2, 100)
    assert time.monotonic() - began_s < 5


def test_a_server_that_never_listens_is_given_up_on() -> None:
    with (
        SyncClient("127.0.0.1:1", CONFIG, 0, connect_timeout_s=0.5) as client,
        pytest.raises(Unreachable, match=r"no server answered at 127\.0\.0\.1:1 within 0\.5 s"),
    ):
        client.join(make_hello(CONFIG, SCHEMA, 0))


def test_an_error_while_encoding_is_raised_as_itself() -> None:
    core = make_server(CONFIG)
    with served(core, CONFIG) as address, SyncClient(address, CONFIG, 0) as client:
        client.join(make_hello(CONFIG, SCHEMA, 0))

        def broken(tensor: int) -> memoryview:
            raise ZeroDivisionError("while encoding")

        with pytest.raises(ZeroDivisionError, match="while encoding"):
            client.upload(round=0, step=2, tokens=1, tensors=core.trained_by(0), payload_of=broken)


# Hostile bytes on a live server


class Intruder:
    """Sends raw messages to a server that two honest nodes then use."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=channel.OPTIONS)
        self.join = self.channel.unary_unary("/spes.Sync/Join", None, None)
        self.upload = self.channel.stream_unary("/spes.Sync/Upload", None, None)
        self.download = self.channel.stream_stream("/spes.Sync/Download", None, None)

    def manifest(self, address: str) -> bytes:
        """A valid announcement of node 0, who has joined."""
        welcome = SyncClient(address, CONFIG, 0).join(make_hello(CONFIG, SCHEMA, 0))
        tensors = tuple(i for i, spec in enumerate(SCHEMA) if CONFIG.make_partition().trains(0, spec.name))
        manifest = UploadManifest(
            node=0, session=welcome.session, round=0, step=2, tokens=1, codec="float32", tensors=tensors
        )
        return pack(Kind.MANIFEST, to_bytes(manifest))


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION, raised.value
    return str(raised.value.details())


def one_then_silence(messages: list[bytes], until: threading.Event) -> Iterator[bytes]:
    yield from messages
    until.wait(5)


def test_nothing_hostile_passes_and_the_honest_nodes_finish() -> None:
    recorder = Recorder()
    core = make_server(CONFIG, recorder)
    with served(core, CONFIG) as address:
        intruder = Intruder(address)
        manifest = intruder.manifest(address)
        flipped = bytearray(pack(Kind.CHUNK, bytes(1024)))
        flipped[500] ^= 1
        assert "looks like a pickle" in refused(
            lambda: intruder.upload(iter([pickle.dumps({"a": 1} | dict.fromkeys(range(50)))]))
        )
        assert "MANIFEST was due" in refused(lambda: intruder.upload(iter([pack(Kind.END)])))
        assert "UploadManifest cannot be read" in refused(
            lambda: intruder.upload(iter([pack(Kind.MANIFEST, b"\xff" * 40)]))
        )
        assert "node 0: the checksum of a frame (tensor 0, byte 0, 1024 bytes)" in refused(
            lambda: intruder.upload(iter([manifest, bytes(flipped)]))
        )
        assert "node 0: chunk of tensor 4000000000 at byte 0" in refused(
            lambda: intruder.upload(iter([manifest, pack(Kind.CHUNK, bytes(8), tensor=4_000_000_000)]))
        )
        assert "came inside an upload" in refused(lambda: intruder.upload(iter([manifest, pack(Kind.REQUEST)])))
        assert "stream ended early" in refused(lambda: intruder.upload(iter([manifest])))
        assert "has 1022 bytes" in refused(lambda: intruder.upload(iter([manifest, pack(Kind.CHUNK, bytes(1022))])))
        assert "JoinRequest cannot be read" in refused(lambda: intruder.join(b"\xff" * 30))
        assert "DownloadRequest cannot be read" in refused(
            lambda: list(intruder.download(iter([pack(Kind.REQUEST, b"\xff" * 9)])))
        )
        with pytest.raises(grpc.RpcError) as raised:
            intruder.upload(iter([bytes(frames.MAX_FRAME_BYTES + 1)]))
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert all("127.0.0.1" in e["reason"] or e["node"] == 0 for e in recorder.of("refusal"))
        decoders, _ = run_rounds(CONFIG, lambda node: SyncClient(address, CONFIG, node))
    local = make_server(CONFIG)
    expected, _ = run_rounds(CONFIG, lambda node: LocalClient(local))
    assert all(torch.equal(decoders[0].weights[n], expected[0].weights[n]) for n in expected[0].weights)


@pytest.fixture(scope="module")
def live() -> Iterator[Intruder]:
    with served(make_server(CONFIG), CONFIG) as address:
        yield Intruder(address)


@given(
    st.lists(
        st.one_of(st.binary(max_size=80), st.binary(max_size=60).map(lambda b: pack(Kind.MANIFEST, b))),
        max_size=3,
    )
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_messages_are_answered_by_a_refusal(live: Intruder, messages: list[bytes]) -> None:
    refused(lambda: live.upload(iter(messages)))
    refused(lambda: list(live.download(iter(messages))))


def test_an_upload_cut_off_by_a_dying_node_can_be_sent_again() -> None:
    core = make_server(CONFIG)
    with served(core, CONFIG) as address:
        intruder = Intruder(address)
        manifest = intruder.manifest(address)
        weights = PlainDecoder(CONFIG)
        weights.train(CONFIG, 0, 0)
        embedding = weights.weights["embedding"].numpy().tobytes()
        until = threading.Event()
        call = intruder.upload.future(
            one_then_silence([manifest, pack(Kind.CHUNK, memoryview(embedding)[:1024])], until)
        )
        while core.state.tensor(0)[:256].tobytes() != embedding[:1024]:
            time.sleep(0.01)
        call.cancel()
        until.set()

        def node_main(node: int) -> PlainDecoder:
            exchange, decoder = make_exchange(SyncClient(address, CONFIG, node), CONFIG, node)
            exchange.join()
            decoder.train(CONFIG, node, 0)
            exchange.run_round(0, 2, 1)
            return decoder

        other = in_thread(lambda: node_main(1))
        first = node_main(0)
        other[0].join(10)
    local = make_server(CONFIG)

    def undisturbed(node: int) -> PlainDecoder:
        exchange, decoder = make_exchange(LocalClient(local), CONFIG, node)
        exchange.join()
        decoder.train(CONFIG, node, 0)
        exchange.run_round(0, 2, 1)
        return decoder

    other = in_thread(lambda: undisturbed(1))
    expected = undisturbed(0)
    other[0].join(10)
    assert all(torch.equal(first.weights[name], expected.weights[name]) for name in expected.weights)


def test_a_download_that_breaks_off_can_be_asked_for_again() -> None:
    core = make_server(CONFIG)
    with served(core, CONFIG) as address:
        clients = [SyncClient(address, CONFIG, node) for node in range(2)]

        class Breaks:
            def begin(self, manifest: Any) -> None: ...
            def write(self, tensor: int, offset: int, payload: memoryview) -> None:
                raise KeyboardInterrupt

        def upload(node: int) -> None:
            decoder = PlainDecoder(CONFIG)
            clients[node].join(make_hello(CONFIG, SCHEMA, node))
            weights = [t.reshape(-1).numpy().data.cast("B") for t in decoder.weights.values()]
            clients[node].upload(
                round=0,
                step=2,
                tokens=1,
                tensors=core.trained_by(node),
                payload_of=lambda index: weights[index],
            )

        other = in_thread(lambda: upload(1))
        upload(0)
        other[0].join(5)
        with pytest.raises(KeyboardInterrupt):
            clients[0].download(round=0, sink=Breaks())

        class Collects(Breaks):
            received = 0

            def write(self, tensor: int, offset: int, payload: memoryview) -> None:
                self.received += len(payload)

        sink = Collects()
        report = clients[0].download(round=0, sink=sink)
        assert sink.received == report.payload_bytes > 0
