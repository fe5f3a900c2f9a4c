"""Frames carry any bytes unchanged, and nothing damaged, foreign or absurd passes."""

from __future__ import annotations

import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spes_core.errors import ProtocolError
from spes_core.protocol import frames
from spes_core.protocol.frames import HEADER_BYTES, Kind, pack, unpack
from spes_core.sync.transfer import WireFormat

dtypes = st.sampled_from(["float16", "float32", "float64", "int8", "uint16", "int64", "bool"])
shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@given(st.sampled_from(Kind), st.binary(max_size=300), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_a_frame_comes_back_as_it_was(kind: Kind, payload: bytes, tensor: int, offset: int) -> None:
    frame = unpack(pack(kind, payload, tensor=tensor, offset=offset))
    assert (frame.kind, frame.tensor, frame.offset, bytes(frame.payload)) == (kind, tensor, offset, payload)


@given(dtypes, shapes, st.integers(1, 64), st.integers(0, 2**32))
@settings(deadline=None)
def test_any_dtype_shape_and_chunk_size_round_trips(dtype: str, shape: tuple[int, ...], chunk: int, seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
    payload = memoryview(array.tobytes())
    wire = WireFormat("raw", 1, array.itemsize)
    received = np.empty(array.nbytes, dtype=np.uint8)
    for offset, length in wire.chunks(len(payload), chunk):
        frame = unpack(pack(Kind.CHUNK, payload[offset : offset + length], offset=offset), Kind.CHUNK)
        received[frame.offset : frame.offset + length] = np.frombuffer(frame.payload, dtype=np.uint8)
        assert length % wire.block_bytes == 0
    assert np.array_equal(received.view(dtype).reshape(shape), array)


@given(st.binary(min_size=0, max_size=60), st.data())
@settings(max_examples=300, deadline=None)
def test_one_flipped_bit_is_noticed_wherever_it_is(payload: bytes, data: st.DataObject) -> None:
    message = bytearray(pack(Kind.CHUNK, payload, tensor=7, offset=4096))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ProtocolError):
        unpack(bytes(message))


def test_a_flipped_bit_in_the_payload_is_named_with_its_place() -> None:
    message = bytearray(pack(Kind.CHUNK, bytes(100), tensor=7, offset=4096))
    message[60] ^= 4
    with pytest.raises(ProtocolError, match=r"checksum of a frame \(tensor 7, byte 4096, 100 bytes\) is wrong"):
        unpack(bytes(message))


def test_a_pickle_is_refused_unread() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (pytest.fail, ("a pickle was executed",))

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ProtocolError, match="looks like a pickle, and pickles are never read"):
            unpack(pickle.dumps([Bomb(), "x" * 100], protocol=protocol))


@given(st.binary(max_size=200))
@settings(deadline=None)
@example(b"")
@example(b"SPES")
def test_random_bytes_are_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(message)


@given(st.binary(min_size=1, max_size=100), st.integers(1, 131))
@settings(deadline=None)
def test_a_truncated_frame_is_refused(payload: bytes, cut: int) -> None:
    message = pack(Kind.CHUNK, payload)
    with pytest.raises(ProtocolError, match=r"shorter than a frame's header|claims a payload of"):
        unpack(message[: -min(cut, len(message))])


@pytest.mark.parametrize("length", [99, 101, frames.MAX_PAYLOAD_BYTES + 1, 2**32 - 1])
def test_a_wrong_length_is_refused_before_anything_is_allocated(length: int) -> None:
    message = bytearray(pack(Kind.CHUNK, bytes(100)))
    struct.pack_into("<I", message, 20, length)
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=f"claims a payload of {length} bytes and has 100"):
        unpack(bytes(message))
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_a_frame_of_another_version_or_kind_is_refused() -> None:
    message = bytearray(pack(Kind.END))
    message[4] = 9
    with pytest.raises(ProtocolError, match="version 9; this release reads version 2"):
        unpack(bytes(message))
    with pytest.raises(ProtocolError, match="kind END came where MANIFEST was due"):
        unpack(pack(Kind.END), Kind.MANIFEST)


def test_an_unknown_kind_is_refused_although_its_checksum_holds() -> None:
    fields = struct.pack("<4sBBHIQI", b"SPES", frames.VERSION, 77, 0, 0, 0, 0)
    message = fields + struct.pack("<Q", frames._checksum(fields, b""))
    assert len(message) == HEADER_BYTES
    with pytest.raises(ProtocolError, match="unknown kind 77"):
        unpack(message)


def test_unpacking_does_not_copy_the_payload() -> None:
    message = pack(Kind.CHUNK, bytes(1 << 20))
    assert unpack(message).payload.obj is message
