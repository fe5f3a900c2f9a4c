"""The float32 codec is exact and copies nothing; chunks are cut and checked by one arithmetic, for every format."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.config import WireConfig
from spes_core.errors import ProtocolError
from spes_core.sync.codec import decode_change, encode_change, make_codec
from spes_core.sync.transfer import FORMATS, Transfer, WireFormat

FLOAT32 = make_codec("float32")


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100))
@settings(deadline=None)
def test_float32_is_exact_for_every_bit_pattern(bits: list[int]) -> None:
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    payload = FLOAT32.encode(values)
    assert bytes(FLOAT32.decode(payload).data.cast("B")) == values.tobytes()
    assert len(payload) == FLOAT32.format.encoded_bytes(values.size)


def test_float32_shares_memory_both_ways() -> None:
    values = np.arange(8, dtype=np.float32)
    assert np.shares_memory(FLOAT32.decode(FLOAT32.encode(values)), values)


def test_every_wire_dtype_has_a_codec_of_the_same_name() -> None:
    assert set(get_args(get_type_hints(WireConfig)["dtype"])) == set(FORMATS)
    for name, wire in FORMATS.items():
        assert make_codec(name).format is wire and wire.name == name


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_grow_with_values_and_tell_their_number(name: str) -> None:
    wire, before = FORMATS[name], 0
    for count in range(1, 1000):
        size = wire.encoded_bytes(count)
        assert size >= before and count <= wire.elements(size) <= count + (name == "int4" and count % 2)
        before = size
    assert wire.encoded_bytes(0) == wire.elements(0) == 0


@pytest.mark.parametrize(("name", "sizes"), [("int8", (3, 129, 130, 133)), ("int4", (3, 66, 66, 69))])
def test_a_short_last_block_is_its_header_and_its_values(name: str, sizes: tuple[int, ...]) -> None:
    assert tuple(FORMATS[name].encoded_bytes(count) for count in (1, 127, 128, 129)) == sizes


wires = st.one_of(
    st.sampled_from(sorted(FORMATS.values(), key=str)),
    st.builds(WireFormat, st.just("block"), st.integers(1, 64), st.integers(4, 80), st.integers(0, 3)),
)


@given(wires, st.integers(1, 5000), st.integers(1, 700))
@settings(deadline=None)
def test_chunks_cover_a_tensor_in_whole_blocks(wire: WireFormat, num_elements: int, chunk_bytes: int) -> None:
    size = wire.encoded_bytes(num_elements)
    chunks = list(wire.chunks(size, chunk_bytes))
    assert list(wire.chunks(size, chunk_bytes, start=chunks[-1][0])) == chunks[-1:]
    ends = [offset + length for offset, length in chunks]
    assert [offset for offset, _ in chunks] == [0, *ends[:-1]] and ends[-1] == size
    assert all(length % wire.block_bytes == 0 for _, length in chunks[:-1])
    assert all(length <= max(chunk_bytes, wire.block_bytes) for _, length in chunks)


@given(wires, st.lists(st.integers(1, 500), min_size=1, max_size=5), st.integers(1, 8))
@settings(deadline=None)
def test_a_transfer_accepts_the_announced_chunks_and_then_no_more(
    wire: WireFormat, elements: list[int], chunk_blocks: int
) -> None:
    sizes = [wire.encoded_bytes(count) for count in elements]
    transfer = Transfer(range(3, 3 + len(sizes)), sizes, wire.block_bytes)
    completed = []
    for tensor, size in enumerate(sizes, start=3):
        for offset, length in wire.chunks(size, wire.block_bytes * chunk_blocks):
            if transfer.accept(tensor, offset, length):
                completed.append(tensor)
    transfer.finish()
    assert completed == list(range(3, 3 + len(sizes)))
    with pytest.raises(ProtocolError, match="after the last announced one"):
        transfer.accept(3, 0, 4)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ((6, 0, 4), "chunk of tensor 6 at byte 0 came where tensor 5 at byte 8 was due"),
        ((5, 0, 4), "chunk of tensor 5 at byte 0 came where tensor 5 at byte 8 was due"),
        ((5, 8, 16), "has 16 bytes; the tensor has 12 more, in blocks of 4"),
        ((5, 8, 2**40), "the tensor has 12 more"),
        ((5, 8, 3), "in blocks of 4"),
        ((5, 8, 0), "has 0 bytes"),
    ],
)
def test_a_transfer_refuses_any_other_chunk(chunk: tuple[int, int, int], message: str) -> None:
    transfer = Transfer((5, 6), (20, 8), 4)
    transfer.accept(5, 0, 8)
    with pytest.raises(ProtocolError, match=message):
        transfer.accept(*chunk)
    with pytest.raises(ProtocolError, match="the end came where tensor 5 at byte 8 was due"):
        transfer.finish()


@given(wires, st.lists(st.integers(1, 500), min_size=1, max_size=5), st.integers(1, 8), st.floats(0, 1.1))
@settings(deadline=None)
def test_a_transfer_goes_on_after_the_whole_blocks_that_are_stored(
    wire: WireFormat, elements: list[int], chunk_blocks: int, share: float
) -> None:
    sizes = [wire.encoded_bytes(count) for count in elements]
    stored = int(share * sum(sizes))
    transfer = Transfer(range(len(sizes)), sizes, wire.block_bytes)
    whole = transfer.skip(stored)
    assert stored - wire.block_bytes < whole <= stored or whole == sum(sizes) <= stored
    start = 0
    for tensor, size in enumerate(sizes):
        if start + size > whole:
            assert max(whole - start, 0) % wire.block_bytes == 0
            for offset, length in wire.chunks(size, wire.block_bytes * chunk_blocks, start=max(whole - start, 0)):
                transfer.accept(tensor, offset, length)
        start += size
    transfer.finish()
    with pytest.raises(ProtocolError, match="after the last announced one"):
        transfer.accept(0, 0, 4)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_takes_at_most_1_mib_beside_what_it_is_given(name: str) -> None:
    codec, size = make_codec(name), 1 << 20
    values, base, residual = (np.zeros(size, dtype=np.float32) for _ in range(3))
    out = bytearray(codec.format.encoded_bytes(size))
    tracemalloc.start()
    try:
        payload = encode_change(codec, values, base, residual if codec.has_feedback else None, out)
        decode_change(codec, payload, base, base)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 1 << 20


@pytest.mark.parametrize("name", FORMATS)
def test_threads_may_share_a_codec(name: str) -> None:
    codec = make_codec(name)
    tensors = [np.random.default_rng(seed).standard_normal(200_001).astype(np.float32) for seed in range(6)]
    alone = [bytes(codec.encode(values)) for values in tensors]
    with ThreadPoolExecutor(6) as threads:
        for _ in range(4):
            together = list(threads.map(lambda values: bytes(codec.encode(values)), tensors))
            assert together == alone
            decoded = threads.map(lambda payload: codec.decode(memoryview(payload)).tobytes(), alone)
            assert list(decoded) == [codec.decode(memoryview(payload)).tobytes() for payload in alone]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e30, -3e38])
def test_one_bad_value_anywhere_makes_a_chunk_unusable(name: str, bad: float) -> None:
    codec = make_codec(name)
    for size in (1, 5, 128, 129, 70_000):
        for place in {0, size // 2, size - 1}:
            values = np.full(size, 0.5, dtype=np.float32)
            assert codec.is_usable(memoryview(bytes(codec.encode(values))))
            if name in ("int8", "int4"):
                # No such value can be encoded; its block's scale can be forged.
                payload, width = bytearray(codec.encode(values)), codec.format.block_bytes
                upper = np.array([bad], dtype=np.float32).view(np.uint32) >> 16
                payload[place // 128 * width : place // 128 * width + 2] = upper.astype("<u2").tobytes()
            elif name == "bfloat16":
                payload = bytearray(codec.encode(values))
                payload[2 * place : 2 * place + 2] = (
                    (np.array([bad], dtype=np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
                )
            else:
                values[place] = bad
                payload = bytearray(values.tobytes())
            assert not codec.is_usable(memoryview(bytes(payload)))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_usable_decodes_to_what_a_mean_can_take(name: str) -> None:
    codec = make_codec(name)
    values = np.array([1e30, -1e30, 1e-40, -0.0], dtype=np.float32) * np.float32(1 if name == "float32" else 0.8)
    payload = memoryview(bytes(codec.encode(values)))
    assert codec.is_usable(payload)
    decoded = codec.decode(payload, np.empty_like(values))
    assert np.isfinite(decoded).all() and np.abs(decoded).max() <= 1e30
