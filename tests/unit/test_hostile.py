"""No bytes that anybody sends to a live server do harm: it refuses them, blames the right party, serves the others."""

from __future__ import annotations

import pickle
import random
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spes_core.errors import ProtocolError, Refused
from spes_core.protocol import channel, sync_pb2
from spes_core.protocol.door import MOST_RECORDED, Door
from spes_core.protocol.frames import Kind, pack, unpack
from spes_core.protocol.servicer import SyncServicer, num_threads
from spes_core.protocol.translate import MAX_ITEMS, MAX_RECORD_BYTES, from_bytes, to_bytes
from spes_core.sync.messages import DownloadRequest, TensorSpec
from tests.fake_core import FakeCore
from tests.strangers import REFUSED, REGIONS, Stranger, manifest_of, refused, silent, with_flipped_bit
from tests.unit.test_translate import RECORDS
from tests.unit.test_transport import (
    CHUNK_BYTES,
    RESULTS,
    SCHEMA,
    TENSORS,
    UPLOADED,
    Collects,
    hello,
    joined,
    serving,
    upload,
)


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[FakeCore, Stranger, str]]:
    core = FakeCore(SCHEMA, RESULTS)
    with serving(core) as address, Stranger(address) as stranger:
        yield core, stranger, address


@pytest.fixture
def scene(live: tuple[FakeCore, Stranger, str]) -> Iterator[tuple[FakeCore, Stranger, bytes]]:
    """A server, a stranger, and a manifest of node 0 that is right. Afterwards both nodes are still served."""
    core, stranger, address = live
    core.stored.uploads.clear()
    core.stored.complete.clear()
    core.refusals.clear()
    yield core, stranger, manifest_of(session_of(stranger), 0, TENSORS)
    for node in (0, 1):
        with joined(address, node) as client:
            upload(client)
            client.download(round=0, sink=Collects())
        assert bytes(core.stored.uploads[0, node]) == UPLOADED


def session_of(stranger: Stranger, node: int = 0) -> bytes:
    """Node ``node`` joins over the wire, so that the servicer knows it."""
    reply = sync_pb2.JoinReply.FromString(stranger.join(to_bytes(hello(node))))
    return bytes(reply.session)


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("a pickle was executed",))


CHUNK = pack(Kind.CHUNK, UPLOADED[:CHUNK_BYTES], tensor=0, offset=0)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_in_any_part_of_a_frame_is_refused_in_the_node_s_name(
    scene: tuple[FakeCore, Stranger, bytes], region: str, bit: int
) -> None:
    core, stranger, manifest = scene
    refused(lambda: stranger.send(manifest, with_flipped_bit(CHUNK, region, bit)))
    assert [node for node, _ in core.refusals] == [0] and not core.stored.uploads[0, 0]
    if region in ("tensor", "offset", "checksum", "payload"):
        assert "the checksum of a frame" in core.refusals[0][1]


@pytest.mark.parametrize("region", REGIONS)
def test_before_a_session_is_shown_nobody_is_blamed_but_an_address(
    scene: tuple[FakeCore, Stranger, bytes], region: str
) -> None:
    core, stranger, manifest = scene
    refused(lambda: stranger.send(with_flipped_bit(manifest, region)))
    ((node, reason),) = core.refusals
    assert node is None and "(from ipv4:127.0.0.1:" in reason


def test_a_pickle_is_refused_unread_wherever_it_comes(scene: tuple[FakeCore, Stranger, bytes]) -> None:
    core, stranger, manifest = scene
    bomb = pickle.dumps([Bomb(), "x" * 100])
    for call in (
        lambda: stranger.send(bomb),
        lambda: stranger.ask(bomb),
        lambda: stranger.send(manifest, bomb),
    ):
        assert "it looks like a pickle, and pickles are never read" in refused(call)
    for call in (lambda: stranger.join(bomb), lambda: stranger.heartbeat(bomb)):
        assert "cannot be read" in refused(call)
    assert [node for node, _ in core.refusals] == [None, None, 0, None, None]


def chunk(tensor: int, offset: int, nbytes: int) -> bytes:
    return pack(Kind.CHUNK, bytes(nbytes), tensor=tensor, offset=offset)


WRONG_STREAMS = [
    ("another tensor", [chunk(1, 0, 12)], "chunk of tensor 1 at byte 0 came where tensor 0 at byte 0 was due"),
    ("a tensor that is not there", [chunk(4_000_000_000, 0, 8)], "tensor 4000000000 at byte 0 came where"),
    ("a gap", [chunk(0, 4096, 4)], "tensor 0 at byte 4096 came where tensor 0 at byte 0 was due"),
    ("a repeated chunk", [chunk(0, 0, 4096), chunk(0, 0, 4096)], "where tensor 0 at byte 4096 was due"),
    ("no whole values", [chunk(0, 0, 1022)], "has 1022 bytes; the tensor has 8000 more, in blocks of 4"),
    ("more than the tensor has", [chunk(0, 0, 8004)], "has 8004 bytes; the tensor has 8000 more"),
    ("an empty chunk", [chunk(0, 0, 0)], "has 0 bytes"),
    ("an early end", [pack(Kind.END)], "the end came where tensor 0 at byte 0 was due"),
    ("a second manifest", [pack(Kind.MANIFEST)], "a frame of kind MANIFEST came inside an upload"),
    ("a confirmation", [pack(Kind.CONFIRM)], "a frame of kind CONFIRM came inside an upload"),
    ("two restarts", [pack(Kind.RESTART), pack(Kind.RESTART)], "a frame of kind RESTART came inside an upload"),
    ("nothing more", [], "the stream of node 0 ended early"),
]


@pytest.mark.parametrize(("name", "messages", "text"), WRONG_STREAMS, ids=[row[0] for row in WRONG_STREAMS])
def test_frames_that_are_well_made_but_wrong_are_refused(
    scene: tuple[FakeCore, Stranger, bytes], name: str, messages: list[bytes], text: str
) -> None:
    core, stranger, manifest = scene
    assert text in refused(lambda: stranger.send(manifest, *messages))
    assert all(node == 0 for node, _ in core.refusals)


@pytest.mark.parametrize("tensors", [(9,), (4_000_000_000,)])
def test_a_manifest_of_tensors_that_are_not_there_is_refused_before_anything_is_allocated(
    scene: tuple[FakeCore, Stranger, bytes], tensors: tuple[int, ...]
) -> None:
    _, stranger, _ = scene
    session = session_of(stranger)
    record = replace(RECORDS[3], node=0, session=session, tensors=tensors)
    assert "the announced tensors" in refused(lambda: stranger.send(pack(Kind.MANIFEST, to_bytes(record))))


@pytest.mark.parametrize(
    "schema",
    [
        (replace(SCHEMA[0], name="other"), *SCHEMA[1:]),
        (replace(SCHEMA[0], shape=(40, 50)), *SCHEMA[1:]),
        (replace(SCHEMA[0], dtype="float16"), *SCHEMA[1:]),
        (SCHEMA[1], SCHEMA[0], *SCHEMA[2:]),
        (replace(SCHEMA[0], shape=(2**63, 2**63)), *SCHEMA[1:]),
        (),
    ],
    ids=["name", "shape", "dtype", "order", "absurd shape", "none"],
)
def test_another_schema_cannot_join(scene: tuple[FakeCore, Stranger, bytes], schema: tuple[TensorSpec, ...]) -> None:
    _, stranger, _ = scene
    assert "the schema differs" in refused(lambda: stranger.join(to_bytes(replace(hello(), schema=schema))))


@pytest.mark.parametrize("node", [2, 77, 2**32 - 1])
def test_a_node_that_the_run_does_not_have_is_refused(scene: tuple[FakeCore, Stranger, bytes], node: int) -> None:
    _, stranger, _ = scene
    assert f"there is no node {node}" in refused(lambda: stranger.join(to_bytes(replace(hello(), node=node))))
    request = DownloadRequest(node=node, session=b"x" * 16, round=0)
    text = refused(lambda: stranger.ask(pack(Kind.REQUEST, to_bytes(request))))
    assert f"node {node} has not joined since this server was started" in text


def test_a_guessed_session_opens_nothing_and_does_not_blame_the_node(
    scene: tuple[FakeCore, Stranger, bytes],
) -> None:
    core, stranger, _ = scene
    for guess in (b"", b"0" * 16, b"\xff" * 1000):
        request = DownloadRequest(node=0, session=guess, round=0)
        assert "another process has joined" in refused(lambda r=request: stranger.ask(pack(Kind.REQUEST, to_bytes(r))))
    assert all(node is None and "which says it is node 0" in reason for node, reason in core.refusals)


def test_absurd_lengths_and_lists_are_refused_before_they_cost_memory(
    scene: tuple[FakeCore, Stranger, bytes],
) -> None:
    _, stranger, manifest = scene
    lying = bytearray(CHUNK)
    struct.pack_into("<I", lying, REGIONS["length"], 2**32 - 1)
    assert "claims a payload of 4294967295 bytes" in refused(lambda: stranger.send(manifest, bytes(lying)))
    with pytest.raises(grpc.RpcError) as raised:
        stranger.send(manifest, bytes(64 << 20))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    # Two bytes on the wire for each entry of a list; more than one megabyte is not even looked at.
    many = b"\x3a\x00" * (MAX_RECORD_BYTES // 2)
    tracemalloc.start()
    assert f"lists {MAX_RECORD_BYTES // 2} entries; at most {MAX_ITEMS}" in refused(lambda: stranger.join(many))
    assert "JoinRequest has 1048578 bytes; at most 1048576" in refused(lambda: stranger.join(many + b"\x3a\x00"))
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


def test_a_message_that_grows_when_unpacked_is_refused_packed(live: tuple[FakeCore, Stranger, str]) -> None:
    with Stranger(live[2], compression=grpc.Compression.Gzip) as bomber:
        zeros = bytes(64 << 20)
        for call in (lambda: bomber.join(zeros), lambda: bomber.send(zeros)):
            text = refused(call, grpc.StatusCode.UNIMPLEMENTED)
            assert "Compression algorithm 'gzip' is disabled" in text


def test_oversized_metadata_is_refused(live: tuple[FakeCore, Stranger, str]) -> None:
    text = refused(
        lambda: live[1].join(to_bytes(hello()), metadata=(("k", "v" * 100_000),)), grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    assert "metadata size exceeds hard limit" in text


def test_silent_callers_hold_no_thread_that_a_node_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Door, "FIRST_MESSAGE_S", 60.0)
    core, until = FakeCore(SCHEMA, RESULTS), threading.Event()
    server = grpc.server(ThreadPoolExecutor(2), options=channel.OPTIONS)
    threads = ThreadPoolExecutor(num_threads(2))
    server.add_generic_rpc_handlers((SyncServicer(core, CHUNK_BYTES, None, threads),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    strangers = [Stranger(address, ("silent", index)) for index in range(4)]
    calls: list[Any] = []
    for stranger in strangers:
        for _ in range(30):
            calls += [stranger.upload(silent(until)), stranger.download(silent(until))]
            calls.append(stranger.open_join.future(silent(until)))
    time.sleep(0.5)
    began_s = time.monotonic()
    for node in (0, 1):
        with joined(address, node, connect_timeout_s=5) as client:
            upload(client)
            client.download(round=0, sink=Collects())
    assert time.monotonic() - began_s < 5
    until.set()
    for stranger in strangers:
        stranger.channel.close()
    server.stop(0).wait()
    assert 0 < len(core.refusals) <= MOST_RECORDED
    assert all(
        node is None and "a call without a first message while 8 others came (from ipv4:127.0.0.1:" in reason
        for node, reason in core.refusals
    )


def test_a_silent_caller_is_sent_away_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Door, "FIRST_MESSAGE_S", 0.2)
    core, until = FakeCore(SCHEMA, RESULTS), threading.Event()
    with serving(core) as address, Stranger(address) as stranger:
        began_s = time.monotonic()
        refused(lambda: list(stranger.upload(silent(until), timeout=10)), grpc.StatusCode.CANCELLED)
        assert time.monotonic() - began_s < 5
        until.set()
    assert "a call without a first message for 0.2 s (from ipv4:127.0.0.1:" in core.refusals[0][1]


def test_a_node_holds_one_stream_of_each_kind_whatever_it_opens(live: tuple[FakeCore, Stranger, str]) -> None:
    core, stranger, address = live
    core.stored.uploads.clear()
    core.stored.complete.clear()
    core.is_released = False
    request = pack(Kind.REQUEST, to_bytes(DownloadRequest(node=0, session=session_of(stranger), round=0)))
    calls = [stranger.download(iter([request]), timeout=20) for _ in range(3 * num_threads(2))]
    time.sleep(0.3)
    assert core.waiting <= 2  # one, and perhaps one that is on its way out
    with joined(address, 1) as client:
        upload(client)
    core.release()
    for call in calls:
        call.cancel()


def test_refusals_of_strangers_fill_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    def refuse(node: int | None, reason: str) -> Refused:
        recorded.append(reason)
        return Refused(reason)

    now_s = [100.0]
    monkeypatch.setattr("spes_core.protocol.door.time.monotonic", lambda: now_s[0])
    door = Door(refuse)
    assert all("bad" in str(door.refusal("bad")) for _ in range(1000))
    now_s[0] += 11
    door.refusal("bad again")
    assert len(recorded) == MOST_RECORDED + 1
    assert recorded[-1] == f"bad again; {1000 - MOST_RECORDED} refusals before it were not recorded"


# Fuzzing: valid messages, spoiled

FUZZ_INPUTS = 2_000
"""Inputs of each of the three fuzzers below; every example of hypothesis makes `PER_SEED` of them."""
PER_SEED = 20
seeds = given(st.integers(0, 2**32))
fuzz = settings(
    max_examples=FUZZ_INPUTS // PER_SEED,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def spoil(message: bytes, choose: random.Random) -> bytes:
    """Replace, insert, delete or repeat bytes in up to four places."""
    data = bytearray(message)
    for _ in range(choose.randint(1, 4)):
        how, at, value = choose.randrange(4), choose.randint(0, len(data)), choose.randrange(400)
        if how == 0 and at < len(data):
            data[at] = value % 256
        elif how == 1:
            data[at:at] = bytes([value % 256]) * (1 + value % 9)
        elif how == 2:
            del data[at : at + 1 + value % 40]
        else:
            data[at:at] = data[at : at + value]
    return bytes(data)


FRAMES = [CHUNK[:200], pack(Kind.CHUNK, b"abc", tensor=3, offset=77), pack(Kind.END), pack(Kind.MANIFEST, b"x" * 60)]


@seeds
@fuzz
def test_fuzz_frames(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(PER_SEED):
        spoiled = spoil(choose.choice(FRAMES), choose)
        try:
            frame = unpack(spoiled)
        except ProtocolError:
            continue
        # What passes is a frame to the last bit.
        assert pack(frame.kind, frame.payload, tensor=frame.tensor, offset=frame.offset) == spoiled


@seeds
@fuzz
def test_fuzz_records(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(PER_SEED):
        kind = type(record := choose.choice(RECORDS))
        try:
            found = from_bytes(kind, spoil(to_bytes(record), choose))
        except ProtocolError:
            continue
        # Compared as bytes: a number may have become NaN.
        assert to_bytes(from_bytes(kind, to_bytes(found))) == to_bytes(found)


@seeds
@fuzz
def test_fuzz_streams(live: tuple[FakeCore, Stranger, str], seed: int) -> None:
    core, stranger, _ = live
    choose = random.Random(seed)
    if (session := SESSIONS.get(id(core))) is None or core.sessions.get(0) != session:
        session = SESSIONS[id(core)] = session_of(stranger)
    request = pack(Kind.REQUEST, to_bytes(DownloadRequest(node=0, session=session, round=0)))
    manifest = manifest_of(session, 0, TENSORS)
    valid = [manifest, request, CHUNK, chunk(1, 0, 12), *(pack(kind, b"?") for kind in Kind), *map(pack, Kind)]
    for _ in range(PER_SEED):
        core.stored.uploads.clear()
        is_upload = choose.random() < 0.7
        messages = [manifest if is_upload else request] if choose.random() < 0.7 else []
        for _ in range(choose.randint(1, 5)):
            message = choose.choice(valid)
            messages.append(spoil(message, choose) if choose.random() < 0.6 else message)
        try:
            answers = stranger.send(*messages) if is_upload else stranger.ask(*messages)
        except grpc.RpcError as error:
            assert error.code() in REFUSED, error
        else:
            assert not is_upload and unpack(answers[-1]).kind == Kind.END
        assert bytes(core.stored.uploads.get((0, 0), b"")) in (b"", UPLOADED[:CHUNK_BYTES])


SESSIONS: dict[int, bytes] = {}


def test_after_all_that_the_nodes_are_served(live: tuple[FakeCore, Stranger, str]) -> None:
    core, _, address = live
    core.stored.uploads.clear()
    with joined(address) as client:
        upload(client)
        client.download(round=0, sink=Collects())
    assert bytes(core.stored.uploads[0, 0]) == UPLOADED
