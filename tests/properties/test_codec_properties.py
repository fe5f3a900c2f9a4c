"""What every codec promises: bounded loss, the same bits for all, and nothing lost for good."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from spes_core.errors import Unencodable
from spes_core.sync.codec import PIECE_ELEMENTS, Values, decode_change, encode_change, make_codec
from spes_core.sync.transfer import FORMATS
from tests.reference import codec_slow

NAMES = tuple(FORMATS)
LOSSY = NAMES[1:]
BLOCKED = ("int8", "int4")
LIMITS = {"int8": 127, "int4": 7}

sizes = st.integers(1, 700)
magnitudes = st.floats(0, 2.0**126, width=32, allow_subnormal=True)
changes = sizes.flatmap(
    lambda size: arrays(
        np.float32,
        size,
        elements=st.one_of(st.floats(-(2.0**126), 2.0**126, width=32), st.floats(-1, 1, width=32)),
    )
)


def drawn(size: int, seed: int, scale: float = 1.0) -> Values:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def same_bits(one: Values, other: Values) -> bool:
    return bool(np.array_equal(one.view(np.uint32), other.view(np.uint32)))


@pytest.mark.parametrize("name", NAMES)
@given(values=changes)
@example(values=np.nextafter(np.float32([127, 3]), np.float32(np.inf)))  # a last bit that lifts the scale
@example(values=np.nextafter(np.float32([7, 3]), np.float32(np.inf)))
@settings(deadline=None, max_examples=60)
def test_bytes_and_values_are_those_of_the_definition(name: str, values: Values) -> None:
    codec = make_codec(name)
    payload = bytes(codec.encode(values))
    assert payload == codec_slow.encode(name, values.tolist())
    assert len(payload) == codec.format.encoded_bytes(values.size)
    decoded = codec.decode(memoryview(payload), np.empty_like(values))
    assert decoded.tolist() == codec_slow.decode(name, payload, values.size)


@pytest.mark.parametrize("name", BLOCKED)
@given(values=changes)
@settings(deadline=None, max_examples=60)
def test_no_value_of_a_block_is_off_by_more_than_half_its_scale(name: str, values: Values) -> None:
    codec = make_codec(name)
    decoded = codec.decode(codec.encode(values), np.empty_like(values))
    for start in range(0, values.size, 128):
        block, there = values[start : start + 128].astype(np.float64), decoded[start : start + 128]
        scale = np.abs(block).max() / LIMITS[name] * (1 + 2**-7) + 2.0**-126
        assert np.abs(block - there).max() <= scale / 2 * (1 + 1e-6)
        assert np.abs(there).max() <= np.abs(block).max() * (1 + 2**-7) + 2.0**-126


@given(values=changes)
@settings(deadline=None, max_examples=60)
def test_bfloat16_is_off_by_at_most_one_in_256(values: Values) -> None:
    codec = make_codec("bfloat16")
    loss = np.abs(codec.decode(codec.encode(values)).astype(np.float64) - values)
    assert (loss <= np.maximum(np.abs(values, dtype=np.float64) / 256, 2.0**-134)).all()


@pytest.mark.parametrize("name", BLOCKED)
@given(size=sizes, seed=st.integers(0, 2**16), exponent=st.integers(-126, 110), mantissa=st.integers(128, 255))
@settings(deadline=None, max_examples=60)
def test_multiples_of_a_scale_come_back_bitwise(name: str, size: int, seed: int, exponent: int, mantissa: int) -> None:
    codec, limit = make_codec(name), LIMITS[name]
    integers = np.random.default_rng(seed).integers(-limit, limit + 1, size)
    integers[::128] = limit
    values = (integers * np.float64(mantissa) * 2.0 ** (exponent - 7)).astype(np.float32)
    payload = codec.encode(values)
    assert same_bits(codec.decode(payload, np.empty_like(values)) + np.float32(0), values + np.float32(0))
    assert bytes(codec.encode(codec.decode(payload, np.empty_like(values)))) == bytes(payload)


@pytest.mark.parametrize("name", LOSSY)
@given(size=sizes, seed=st.integers(0, 2**16), cuts=st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_cutting_a_tensor_into_whole_blocks_changes_no_bit(name: str, size: int, seed: int, cuts: int) -> None:
    codec, values, base = make_codec(name), drawn(size, seed), drawn(size, seed + 1)
    payload = encode_change(codec, values, base, np.zeros_like(base) if codec.has_feedback else None)
    whole = decode_change(codec, payload, base, np.empty_like(base))
    parts = np.empty_like(base)
    for offset, length in codec.format.chunks(len(payload), cuts * codec.format.block_bytes):
        start = codec.format.elements(offset)
        part = slice(start, min(start + codec.format.elements(length), size))
        decode_change(codec, payload[offset : offset + length], base[part], parts[part])
        assert bytes(codec.encode(values[part] - base[part])) == bytes(payload[offset : offset + length])
    assert same_bits(parts, whole)


@pytest.mark.parametrize("name", LOSSY)
def test_pieces_of_a_large_tensor_are_encoded_as_one(name: str) -> None:
    size = 2 * PIECE_ELEMENTS + 129
    codec, values, base = make_codec(name), drawn(size, 0), drawn(size, 1)
    payload = bytes(encode_change(codec, values, base, None))
    assert payload == codec_slow.encode(name, (values - base).tolist()) and len(payload) == codec.format.encoded_bytes(
        size
    )
    decoded = np.array(codec_slow.decode(name, payload, size), dtype=np.float32)
    assert same_bits(decode_change(codec, memoryview(payload), base, base), decoded + drawn(size, 1))


@pytest.mark.parametrize("name", NAMES)
@given(size=sizes, seed=st.integers(0, 2**16), spread=st.sampled_from([0.0, 1e-40, 1e-3, 1.0, 1e30]))
@settings(deadline=None, max_examples=40)
def test_the_sender_adopts_what_the_receiver_adopts(name: str, size: int, seed: int, spread: float) -> None:
    sender, receiver = make_codec(name), make_codec(name)
    base, residual = drawn(size, seed), drawn(size, seed + 2, spread) if sender.has_feedback else None
    values = base + drawn(size, seed + 1, spread)
    out = bytearray(sender.format.encoded_bytes(size) + 5)
    payload = encode_change(sender, values, base, residual, out)
    there = decode_change(receiver, memoryview(bytes(payload)), base.copy(), np.empty_like(base))
    here = decode_change(sender, payload, base, base)
    assert here is base and same_bits(here, there)


@pytest.mark.parametrize("name", BLOCKED)
@given(size=sizes, seed=st.integers(0, 2**16), rounds=st.integers(1, 12))
@settings(deadline=None, max_examples=40)
def test_feedback_leaves_of_many_rounds_only_the_last_loss(name: str, size: int, seed: int, rounds: int) -> None:
    codec, residual = make_codec(name), np.zeros(size, dtype=np.float32)
    base, sent, arrived = np.zeros(size, dtype=np.float32), np.zeros(size), np.zeros(size)
    for turn in range(rounds):
        change = drawn(size, seed + turn, 1e-3)
        sent += change
        payload = encode_change(codec, change, base, residual)
        arrived += codec.decode(payload, np.empty_like(base))
    # What has not arrived is in the residual: the mean over rounds is off by residual / rounds.
    assert np.abs((sent - arrived) / rounds - residual / rounds).max() <= 1e-9
    assert np.abs(residual).max() <= 0.02 / LIMITS[name]
    # Without feedback small values would never arrive.
    lonely = np.zeros(128, dtype=np.float32)
    lonely[0], lonely[1:] = 1, 0.3 / LIMITS[name]
    residual, arrived = np.zeros_like(lonely), np.zeros(128)
    for _ in range(100):
        arrived += codec.decode(encode_change(codec, lonely, np.zeros_like(lonely), residual))
    assert np.abs(arrived / 100 - lonely).max() <= 1 / LIMITS[name] / 100


@pytest.mark.parametrize("name", BLOCKED)
@given(values=changes)
@settings(deadline=None, max_examples=60)
def test_decoded_and_residual_are_the_change_exactly(name: str, values: Values) -> None:
    codec, residual = make_codec(name), np.zeros_like(values)
    payload = encode_change(codec, values, np.zeros_like(values), residual)
    decoded = codec.decode(payload, np.empty_like(values))
    assert (decoded.astype(np.float64) + residual == values).all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38])
@given(size=sizes, place=st.floats(0, 1, exclude_max=True))
@settings(deadline=None, max_examples=15)
def test_a_value_that_no_codec_can_send_is_refused(name: str, bad: float, size: int, place: float) -> None:
    values = drawn(size, 0)
    values[int(place * size)] = bad
    with pytest.raises(Unencodable, match="NaN, infinite"):
        make_codec(name).encode(values)
    with pytest.raises(ValueError, match="NaN, infinite"):
        encode_change(make_codec(name), values, np.zeros_like(values), None)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_taken_stays_finite_up_to_its_largest_magnitude(name: str, sign: int) -> None:
    codec, largest = make_codec(name), np.full(130, sign * 2.0**127, dtype=np.float32)
    decoded = codec.decode(codec.encode(largest), np.empty_like(largest))
    assert np.abs(decoded / largest - 1).max() <= 2**-7
    with pytest.raises(Unencodable):
        codec.encode(np.nextafter(largest, np.float32(sign * np.inf)))


@pytest.mark.parametrize("name", LOSSY)
def test_a_change_that_overflows_is_refused(name: str) -> None:
    largest = np.full(3, np.finfo(np.float32).max)
    with pytest.raises(Unencodable):
        encode_change(make_codec(name), largest, -largest, None)


@pytest.mark.parametrize("name", NAMES)
@given(payload=st.binary(min_size=3, max_size=700))
@settings(deadline=None, max_examples=100)
def test_any_bytes_decode_without_error_to_as_many_values_as_they_hold(name: str, payload: bytes) -> None:
    codec = make_codec(name)
    length = codec.format.encoded_bytes(codec.format.elements(len(payload)))
    values = codec.decode(memoryview(payload)[:length])
    assert values.size == codec.format.elements(length)
    base = np.ones_like(values)
    assert decode_change(codec, memoryview(payload)[:length], base, np.empty_like(base)).size == base.size


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x7F7F])
def test_a_hostile_scale_decodes_to_values_that_nobody_uses(name: str, scale: int) -> None:
    codec = make_codec(name)
    payload = bytearray(codec.encode(np.linspace(-1, 1, 300, dtype=np.float32)))
    payload[codec.format.block_bytes : codec.format.block_bytes + 2] = scale.to_bytes(2, "little")
    with np.errstate(all="raise"):
        values = codec.decode(memoryview(payload), np.empty(300, dtype=np.float32))
        adopted = decode_change(codec, memoryview(payload), np.full(300, 1e38, dtype=np.float32), np.empty_like(values))
    assert not np.isfinite(adopted[128:256]).all() and np.isfinite(adopted[:128]).all()
    assert not np.isfinite(values[128:256]).all() and np.isfinite(values[:128]).all()
