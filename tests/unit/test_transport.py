"""Transfers over a real socket arrive whole and once, through lost connections and servers that are started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.config import RoundConfig, RunConfig, WireConfig
from spes_core.errors import ProtocolError, Refused, RoundFailed, StaleRound, Unreachable
from spes_core.protocol import channel, frames
from spes_core.protocol.client import SyncClient
from spes_core.protocol.credentials import Credentials
from spes_core.protocol.frames import Kind
from spes_core.protocol.servicer import Opening, SyncServicer, num_threads
from spes_core.sync import messages
from spes_core.sync.client import UploadReport
from spes_core.sync.messages import DownloadManifest, Hello, TensorSpec, schema_digest
from tests.cut_proxy import cut_proxy
from tests.fake_core import FakeCore, Stored
from tests.small_rounds import in_thread

SCHEMA = (TensorSpec("a", (50, 40)), TensorSpec("b", (3,)), TensorSpec("c", (30_000,)), TensorSpec("d", (7, 1000)))
CHUNK_BYTES = 4096
CONFIG = RunConfig(nodes=2, wire=WireConfig(chunk_bytes=CHUNK_BYTES), round=RoundConfig(retry_s=20.0))
TENSORS = (0, 1, 2, 3)
TOKEN = "5" * 64


def data_of(tensor: int, key: int = 0) -> bytes:
    return np.random.default_rng([tensor, key]).bytes(4 * SCHEMA[tensor].num_elements)


RESULTS = {tensor: data_of(tensor, 9) for tensor in (0, 2, 3)}
UPLOADED = b"".join(data_of(tensor) for tensor in TENSORS)


def hello(node: int = 0) -> Hello:
    return Hello(
        node=node,
        num_nodes=2,
        config_digest="c",
        config_json="{}",
        schema_digest=schema_digest(SCHEMA),
        schema=SCHEMA,
        experts=(node,),
    )


class Payloads:
    """Gives encoded tensors and remembers which were asked for."""

    def __init__(self, key: int = 0) -> None:
        self.asked: list[int] = []
        self.key = key

    def __call__(self, tensor: int) -> memoryview:
        self.asked.append(tensor)
        return memoryview(data_of(tensor, self.key))


class Collects:
    """A sink that keeps what it is given."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.manifests: list[DownloadManifest] = []
        self.writes: list[tuple[int, int, int]] = []
        self.data: dict[int, bytearray] = {}
        self.slow_s = slow_s

    def begin(self, manifest: DownloadManifest) -> None:
        self.manifests.append(manifest)

    def write(self, tensor: int, offset: int, payload: memoryview) -> None:
        assert offset == len(self.data.setdefault(tensor, bytearray()))
        self.data[tensor] += payload
        self.writes.append((tensor, offset, len(payload)))
        time.sleep(self.slow_s)


def start(core: FakeCore, port: int = 0, token: str | None = None) -> tuple[grpc.Server, str]:
    server = grpc.server(ThreadPoolExecutor(num_threads(2)), options=channel.OPTIONS)
    server.add_generic_rpc_handlers((SyncServicer(core, CHUNK_BYTES, token),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, f"127.0.0.1:{port}"


@contextmanager
def serving(core: FakeCore, token: str | None = None) -> Iterator[str]:
    server, address = start(core, token=token)
    try:
        yield address
    finally:
        server.stop(0).wait()


def joined(address: Any, node: int = 0, config: RunConfig = CONFIG, **options: Any) -> SyncClient:
    client = SyncClient(address, config, node, **options)
    client.join(hello(node))
    return client


def upload(client: SyncClient, payload_of: Any = None, round: int = 0) -> UploadReport:
    return client.upload(round=round, step=2, tokens=5, tensors=TENSORS, payload_of=payload_of or Payloads())


@pytest.fixture
def core() -> FakeCore:
    return FakeCore(SCHEMA, RESULTS)


def test_an_upload_and_a_download_arrive_whole_and_both_sides_count_the_same_bytes(core: FakeCore) -> None:
    with serving(core) as address, joined(address) as client:
        payloads, sink = Payloads(), Collects()
        up = upload(client, payloads)
        down = client.download(round=0, sink=sink)
        deadline_s = time.monotonic() + 5
        while not core.delivered and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert bytes(core.stored.uploads[0, 0]) == UPLOADED and payloads.asked == list(TENSORS)
    assert up.payload_bytes == len(UPLOADED) and core.framing == [up.framing_bytes]
    assert {tensor: bytes(data) for tensor, data in sink.data.items()} == RESULTS
    assert down.payload_bytes == sum(map(len, RESULTS.values())) and core.delivered == [(0, down.framing_bytes)]
    assert down.manifest.tensors == (0, 2, 3) and down.summary.tokens == 7 and len(sink.manifests) == 1


def test_a_snapshot_carries_all_tensors(core: FakeCore) -> None:
    with serving(core) as address, joined(address) as client:
        sink = Collects()
        report = client.snapshot(round=3, sink=sink)
    assert report.manifest.tensors == TENSORS and set(sink.data) == set(TENSORS)


def test_an_upload_that_the_server_has_already_is_compared_and_sends_nothing(core: FakeCore) -> None:
    with serving(core) as address, joined(address) as client:
        upload(client)
        payloads = Payloads()
        again = upload(client, payloads)
        assert payloads.asked == list(TENSORS)  # the sender needs the decoded values of all of them
        assert again.payload_bytes == 0
        with pytest.raises(Refused, match="the server refused node 0: it has uploaded other bytes for that round"):
            upload(client, Payloads(key=1))
    assert bytes(core.stored.uploads[0, 0]) == UPLOADED


@pytest.mark.parametrize("have", [4, 8000, 8012, 20_000, len(UPLOADED) - 4, len(UPLOADED)])
def test_an_upload_goes_on_where_the_server_is(core: FakeCore, have: int) -> None:
    core.stored.uploads[0, 0] = bytearray(UPLOADED[:have])
    with serving(core) as address, joined(address) as client:
        payloads = Payloads()
        report = upload(client, payloads)
    assert bytes(core.stored.uploads[0, 0]) == UPLOADED and core.restarts == 0
    assert report.payload_bytes == len(UPLOADED) - have and payloads.asked == list(TENSORS)
    assert report.earlier_bytes == have, "what an earlier process of the node sent"


@pytest.mark.parametrize("have", [4, 20_000, len(UPLOADED)])
def test_an_upload_with_another_beginning_begins_again(core: FakeCore, have: int) -> None:
    core.stored.uploads[0, 0] = bytearray(UPLOADED[: have - 1] + b"?")
    with serving(core) as address, joined(address) as client:
        report = upload(client)
    assert bytes(core.stored.uploads[0, 0]) == UPLOADED and core.restarts == 1
    assert report.payload_bytes == len(UPLOADED) and core.framing == [report.framing_bytes]
    assert report.earlier_bytes == 0


def test_a_cut_upload_resumes_and_sends_little_twice(core: FakeCore) -> None:
    with serving(core) as address, cut_proxy(address) as proxy, joined(proxy.address) as client:
        proxy.cut_after("up", 40_000, 60_000)
        report = upload(client)
        assert proxy.cuts == 2
    assert bytes(core.stored.uploads[0, 0]) == UPLOADED
    assert report.payload_bytes < 2.5 * len(UPLOADED) and report.earlier_bytes == 0


def test_a_cut_download_resumes_and_applies_every_byte_once(core: FakeCore) -> None:
    with serving(core) as address, cut_proxy(address) as proxy, joined(proxy.address) as client:
        before = proxy.bytes["down"]
        proxy.cut_after("down", 30_000, 50_000)
        sink = Collects()
        report = client.download(round=0, sink=sink)
        received = proxy.bytes["down"] - before
        assert proxy.cuts == 2
    assert {tensor: bytes(data) for tensor, data in sink.data.items()} == RESULTS and len(sink.manifests) == 1
    total = sum(map(len, RESULTS.values()))
    assert report.payload_bytes == total
    # What had been applied is not sent again; gRPC's own buffers hold at most some tens of kilobytes.
    assert received < total + 100_000


@given(st.lists(st.integers(1, 200_000), max_size=4), st.lists(st.integers(1, 200_000), max_size=4))
@settings(max_examples=6, deadline=None)
def test_cuts_anywhere_change_no_byte_in_either_direction(up: list[int], down: list[int]) -> None:
    core = FakeCore(SCHEMA, RESULTS)
    with serving(core) as address, cut_proxy(address) as proxy, joined(proxy.address) as client:
        proxy.cut_after("up", *up)
        proxy.cut_after("down", *down)
        sink = Collects()
        sending = in_thread(lambda: upload(client))
        client.download(round=0, sink=sink)
        sending[0].join(20)
        assert isinstance(sending[1][0], UploadReport)
    assert bytes(core.stored.uploads[0, 0]) == UPLOADED
    assert {tensor: bytes(data) for tensor, data in sink.data.items()} == RESULTS and len(sink.manifests) == 1


def test_a_lost_receipt_is_asked_for_again(core: FakeCore) -> None:
    with serving(core) as address, cut_proxy(address) as proxy, joined(proxy.address) as client:
        finish = type(core.begin_upload(_manifest(client))).finish
        calls = []

        def cut_then_finish(self: Any, framing_bytes: int) -> Any:
            receipt = finish(self, framing_bytes)
            calls.append(framing_bytes)
            if len(calls) == 1:
                proxy.cut()
            return receipt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.fake_core.FakeUpload.finish", cut_then_finish)
            report = upload(client)
    assert len(calls) == 2 and report.payload_bytes == len(UPLOADED)  # nothing was sent twice
    assert bytes(core.stored.uploads[0, 0]) == UPLOADED


def _manifest(client: SyncClient) -> Any:
    return messages.UploadManifest(
        node=0, session=b"", round=77, step=1, tokens=1, codec="float32", tensors=TENSORS, safe_round=0
    )


def test_a_server_that_is_started_again_is_joined_again_and_goes_on(core: FakeCore) -> None:
    stored = Stored()
    server, address = start(FakeCore(SCHEMA, RESULTS, stored))
    port = int(address.rpartition(":")[2])
    with joined(address) as client:
        gate = threading.Event()
        payloads = Payloads()

        def slow(tensor: int) -> memoryview:
            if tensor == 2:
                gate.wait(10)
            return payloads(tensor)

        sending = in_thread(lambda: client.upload(round=5, step=2, tokens=5, tensors=TENSORS, payload_of=slow))
        while not stored.uploads.get((5, 0)):
            time.sleep(0.01)
        server.stop(0).wait()
        second = FakeCore(SCHEMA, RESULTS, stored)
        gate.set()
        time.sleep(0.3)
        server, _ = start(second, port)
        sending[0].join(15)
        server.stop(0).wait()
    assert isinstance(sending[1][0], UploadReport), sending[1]
    assert bytes(stored.uploads[5, 0]) == UPLOADED
    assert [known.round for known in second.hellos] == [5]


def test_a_server_that_is_started_again_hears_of_the_upload_before_its_result_is_asked_for(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.is_released = False
    server, address = start(core)
    attempt, attempts = SyncClient._upload_once, []

    def late(self: Any, *arguments: Any) -> None:
        attempts.append(1)
        time.sleep(0.6 if len(attempts) > 1 else 0)
        attempt(self, *arguments)

    monkeypatch.setattr(SyncClient, "_upload_once", late)
    gate = threading.Event()
    with joined(address) as client:
        sending = in_thread(lambda: upload(client, lambda t: (gate.wait(10), memoryview(data_of(t)))[1]))
        while not core.begun:
            time.sleep(0.01)
        receiving = in_thread(lambda: client.download(round=0, sink=Collects()))
        time.sleep(0.2)
        server.stop(0).wait()
        gate.set()
        second = FakeCore(SCHEMA, RESULTS, core.stored)
        second.is_strict = True
        server, _ = start(second, int(address.rpartition(":")[2]))
        for thread, outcome in (sending, receiving):
            thread.join(15)
            assert not isinstance(outcome[0], Exception), outcome
        server.stop(0).wait()
    assert len(attempts) >= 2 and not any("before it has begun" in reason for _, reason in second.refusals)


def test_a_server_that_listens_elsewhere_after_a_restart_is_found(core: FakeCore) -> None:
    server, address = start(core)
    places = [address]
    with joined(lambda: places[0]) as client:
        upload(client)
        server.stop(0).wait()
        second = FakeCore(SCHEMA, RESULTS, core.stored)
        server, places[0] = start(second)
        sink = Collects()
        client.download(round=0, sink=sink)
        server.stop(0).wait()
    assert sink.data.keys() == RESULTS.keys()


def test_a_dead_server_is_named_with_how_long_it_was_tried_and_what_to_do() -> None:
    server, address = start(FakeCore(SCHEMA, RESULTS))
    client = joined(address, config=replace(CONFIG, round=RoundConfig(retry_s=1.0)))
    server.stop(0).wait()
    began_s = time.monotonic()
    with pytest.raises(Unreachable) as raised:
        upload(client)
    assert 0.9 < time.monotonic() - began_s < 5
    text = str(raised.value)
    assert text.startswith(f"the server at {address} cannot be reached, after trying for 1.")
    assert "see whether it runs and what its log says, start it again, then this node" in text
    assert client.heartbeat(3) is None


def test_abort_ends_transfers_in_both_directions_at_once(core: FakeCore) -> None:
    core.is_released = False
    with serving(core) as address, joined(address) as client:
        gate = threading.Event()

        def stuck(tensor: int) -> memoryview:
            gate.wait(0.5)
            return memoryview(data_of(tensor))

        sending = in_thread(lambda: upload(client, stuck))
        receiving = in_thread(lambda: client.download(round=0, sink=Collects()))
        time.sleep(0.3)
        assert sending[0].is_alive() and receiving[0].is_alive()
        client.abort()
        for thread, outcome in (sending, receiving):
            thread.join(5)
            assert isinstance(outcome[0], Unreachable), outcome
            assert "was ended by this node itself" in str(outcome[0])
        core.release()
        client.download(round=0, sink=Collects())  # abort ends what is in progress, no more


def test_abort_ends_a_pause_between_attempts() -> None:
    server, address = start(FakeCore(SCHEMA, RESULTS))
    client = joined(address)
    server.stop(0).wait()
    sending = in_thread(lambda: upload(client))
    time.sleep(0.5)
    assert sending[0].is_alive()
    client.abort()
    sending[0].join(2)
    assert isinstance(sending[1][0], Unreachable) and "was ended by this node itself" in str(sending[1][0])


def test_heartbeats_arrive_and_join_a_server_that_was_started_again(core: FakeCore) -> None:
    server, address = start(core)
    with joined(address) as client:
        assert client.heartbeat(17) == messages.HeartbeatReply(round=3)
        assert core.beats[0].step == 17
        server.stop(0).wait()
        assert client.heartbeat(18) is None
        second = FakeCore(SCHEMA, RESULTS)
        server, _ = start(second, int(address.rpartition(":")[2]))
        deadline_s = time.monotonic() + 10
        while client.heartbeat(19) is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        server.stop(0).wait()
    assert second.beats[-1].step == 19 and len(second.hellos) == 1


def test_a_sign_of_life_of_a_closed_client_is_no_error_and_opens_nothing(core: FakeCore) -> None:
    with serving(core) as address, joined(address) as client:
        of_a_channel_that_is_closed = client._line.connected().heartbeat
        client.close()
        assert client.heartbeat(5) is None
        with pytest.raises(channel.NoServerError):
            of_a_channel_that_is_closed(b"")
    assert core.beats == []


def test_a_process_that_another_replaced_is_told_so_and_does_not_fight(core: FakeCore) -> None:
    with serving(core) as address, joined(address) as first, joined(address) as second:
        with pytest.raises(Refused, match="another process has joined as node 0 since; end one of the two"):
            upload(first)
        upload(second)
    assert core.refusals[0][0] is None  # who it was cannot be known, so the node is not to blame


@pytest.mark.parametrize(
    ("break_it", "error", "text"),
    [
        (lambda core: core.fail("round 0 was not complete: node 1 is missing"), RoundFailed, "node 1 is missing"),
        (lambda core: core.stale_rounds.add(0), StaleRound, "round 0 is over"),
    ],
    ids=["failed", "stale"],
)
def test_what_the_core_raises_reaches_the_node_as_the_same_error(
    core: FakeCore, break_it: Any, error: type[Exception], text: str
) -> None:
    with serving(core) as address, joined(address) as client:
        break_it(core)
        with pytest.raises(error, match=text) as raised:
            upload(client)
        assert type(raised.value) is error


def test_an_error_while_encoding_is_raised_as_itself(core: FakeCore) -> None:
    def broken(tensor: int) -> memoryview:
        raise ZeroDivisionError("while encoding")

    with serving(core) as address, joined(address) as client, pytest.raises(ZeroDivisionError, match="while encoding"):
        upload(client, broken)


def test_an_error_in_the_sink_is_raised_as_itself_and_frees_the_server(core: FakeCore) -> None:
    class Broken(Collects):
        def write(self, tensor: int, offset: int, payload: memoryview) -> None:
            raise ZeroDivisionError("while applying")

    with serving(core) as address, joined(address) as client:
        with pytest.raises(ZeroDivisionError, match="while applying"):
            client.download(round=0, sink=Broken())
        client.download(round=0, sink=Collects())


@pytest.mark.parametrize(("token", "what"), [("", "no join token"), ("6" * 64, "another run's join token")])
def test_the_join_token_decides_who_may_join(core: FakeCore, token: str, what: str) -> None:
    with serving(core, TOKEN) as address:
        with joined(address, credentials=Credentials(token=TOKEN)) as client:
            upload(client)
        with pytest.raises(Refused, match=f"it shows {what}; the right one is in join.token"):
            joined(address, 1, credentials=Credentials(token=token))
    node, reason = core.refusals[0]
    assert node is None and "127.0.0.1" in reason and "which says it is node 1" in reason


def test_a_server_that_reads_its_state_is_waited_for(core: FakeCore) -> None:
    server = grpc.server(ThreadPoolExecutor(num_threads(2)), options=channel.OPTIONS)
    opening = Opening()
    server.add_generic_rpc_handlers((opening,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    joining = in_thread(lambda: joined(f"127.0.0.1:{port}"))
    time.sleep(0.3)
    assert joining[0].is_alive()
    opening.servicer = SyncServicer(core, CHUNK_BYTES)
    joining[0].join(5)
    assert isinstance(joining[1][0], SyncClient)
    joining[1][0].close()
    server.stop(0).wait()


def test_a_server_that_never_listens_is_given_up_on() -> None:
    with (
        SyncClient("127.0.0.1:1", CONFIG, 0, connect_timeout_s=0.5) as client,
        pytest.raises(Unreachable, match=r"the server at 127\.0\.0\.1:1 cannot be reached, after trying for 0\.\d s"),
    ):
        client.join(hello())


def test_something_else_that_listens_is_no_server() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(ProtocolError, match="is no SPES server, or one of another release"):
        joined(f"127.0.0.1:{port}")
    server.stop(0).wait()


def test_a_frame_that_is_damaged_on_its_way_is_sent_again(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged: list[Kind] = []

    def pack(kind: Kind, payload: bytes | memoryview = b"", *, tensor: int = 0, offset: int = 0) -> bytes:
        message = frames.pack(kind, payload, tensor=tensor, offset=offset)
        if kind == Kind.CHUNK and tensor == 2 and len(damaged) in (0, 20, 40):
            message = message[:-1] + bytes([message[-1] ^ 1])
        damaged.append(kind)
        return message

    with serving(core) as address, joined(address) as client:
        monkeypatch.setattr("spes_core.protocol.sending.frames", SimpleNamespace(pack=pack))
        upload(client)
        damaged.clear()
        monkeypatch.setattr("spes_core.protocol.servicer.frames", SimpleNamespace(**vars(frames) | {"pack": pack}))
        sink = Collects()
        client.download(round=0, sink=sink)
    assert bytes(core.stored.uploads[0, 0]) == UPLOADED
    assert {tensor: bytes(data) for tensor, data in sink.data.items()} == RESULTS
