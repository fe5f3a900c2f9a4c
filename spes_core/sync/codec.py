"""Codecs: tensor values to bytes on the wire and back, and the changes that lossy ones carry.

Every operation is one correctly rounded float32 operation or an exact integer one per value (no fused multiply-add), so
the bytes and the decoded values depend neither on the machine nor on how a tensor is cut into chunks of whole blocks.
No state is shared: any number of threads may use one codec.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from spes_core.errors import Unencodable
from spes_core.sync.transfer import FORMATS, WireFormat

Values = NDArray[np.float32]
"""A flat, contiguous float32 array."""

Buffer = bytearray | memoryview
"""Writable memory of the caller, at least as large as what goes in."""

PIECE_ELEMENTS = 1 << 16
"""Values handled at a time, in whole blocks: all scratch of a call together stays below 1 MiB, in cache."""

LARGEST = np.float32(2.0**127)
"""Largest magnitude that a lossy codec takes: neither it nor a block's rounded-up scale overflows."""

USABLE = np.float32(1e30)
"""Largest magnitude that a mean takes: no sum or difference of such values overflows."""

SMALLEST_SCALE = np.float32(2.0**-126)
"""Smallest scale of a block, the smallest normal number: an all-zero block divides by it too, and stays zero."""


class Codec(Protocol):
    """Translates values to wire bytes and back; ``format`` tells the sizes.

    Sender and receiver both adopt the decoded value, so every copy of a tensor stays identical under any codec.
    """

    format: WireFormat
    is_delta: bool
    """Whether the values are differences from the last global value; False: the values themselves, exactly."""
    has_feedback: bool
    """Whether the sender keeps what was lost (a float32 for each value) and adds it to the next change."""

    def encode(self, values: Values, out: Buffer | None = None) -> memoryview:
        """The bytes of ``values``, in ``out`` or, without it, in new memory.

        An exact codec gives the memory of ``values`` itself and leaves ``out`` alone: ``values`` must not change until
        the bytes are sent. Raises Unencodable for NaN, infinite and huge values.
        """

    def decode(self, payload: memoryview, out: Values | None = None) -> Values:
        """The values in whole blocks of bytes, in ``out``, whose size must fit, or in new memory.

        Without ``out`` an exact codec shares the memory of ``payload``, possibly read-only, and an odd number of int4
        values comes with one more. Any bytes decode to something; NaN and infinite values are for the caller to refuse.
        """

    def is_usable(self, payload: memoryview) -> bool:
        """Whether whole blocks of bytes decode to finite values of at most `USABLE` in magnitude, up to a rounding."""


class Float32:
    """Exact little-endian float32: neither direction copies."""

    format = FORMATS["float32"]
    is_delta = False
    has_feedback = False

    def encode(self, values: Values, out: Buffer | None = None) -> memoryview:
        """The memory of ``values`` itself."""
        return values.data.cast("B")

    def decode(self, payload: memoryview, out: Values | None = None) -> Values:
        """``payload`` itself, seen as values; a copy where ``out`` is given."""
        values = np.frombuffer(payload, dtype="<f4")
        if out is None:
            return values
        out[:] = values
        return out

    def is_usable(self, payload: memoryview) -> bool:
        """See `Codec`."""
        values = np.frombuffer(payload, dtype="<f4")
        with np.errstate(invalid="ignore"):
            # A NaN passes through max and min, and a comparison with it is false.
            return all(
                bool(values[part].max() <= USABLE and values[part].min() >= -USABLE) for part in _parts(values.size)
            )


class BFloat16:
    """The change rounded to bfloat16, to nearest, ties to even; nothing is fed back."""

    format = FORMATS["bfloat16"]
    is_delta = True
    has_feedback = False

    def encode(self, values: Values, out: Buffer | None = None) -> memoryview:
        """Two bytes a value: the upper half of the float32."""
        out = _memory(self.format, values.size, out)
        halves, source = torch.frombuffer(out, dtype=torch.bfloat16), torch.from_numpy(values)
        for part in _parts(values.size):
            _check(values[part].max(), values[part].min())
            halves[part].copy_(source[part])
        return out

    def decode(self, payload: memoryview, out: Values | None = None) -> Values:
        """Exact."""
        out = _values(self.format, len(payload), out)
        target = torch.from_numpy(out)
        for part in _parts(out.size):
            target[part].copy_(_halves(payload, part))
        return out

    def is_usable(self, payload: memoryview) -> bool:
        """See `Codec`."""
        largest = int(USABLE.view(np.uint32)) >> 16
        magnitudes = np.bitwise_and(np.frombuffer(payload, dtype="<u2"), 0x7FFF)
        return int(magnitudes.max()) <= largest


class Blocks:
    """Blocks of integers q in −limit … limit, each with one bfloat16 scale s: a value is q·s; the loss is fed back.

    s = absmax / limit, rounded to float32 and then up to bfloat16, at least `SMALLEST_SCALE`; q = v · (1 / s), both
    rounded to float32 and the product to the nearest integer, ties to even: so |v − q·s| ≤ s / 2 up to rounding, and
    q·s, of at most 15 significant bits, is exact. A block is s, then q as int8, or q + 8 in 4 bits with the earlier
    value in the lower half of a byte. A short last block is s and its values.
    """

    is_delta = True
    has_feedback = True

    def __init__(self, name: str) -> None:
        self.format = FORMATS[name]
        self._is_packed = name == "int4"
        self._limit, self._zero = (np.float32(7), 8) if self._is_packed else (np.float32(127), 0)
        # A float32 of this size has no fraction bits: adding it rounds to an integer, which its low bits then show.
        self._rounder = np.float32(1.5 * 2**23 + self._zero)

    def encode(self, values: Values, out: Buffer | None = None) -> memoryview:
        """Whole blocks, and a short last one where the size asks for it."""
        out = _memory(self.format, values.size, out)
        bytes_, size = np.frombuffer(out, dtype=np.uint8), self.format.block_elements
        whole = values.size // size * size
        for part in _parts(whole):
            place = slice(self.format.encoded_bytes(part.start), self.format.encoded_bytes(part.stop))
            self._encode(values[part].reshape(-1, size), bytes_[place].reshape(-1, self.format.block_bytes))
        if whole < values.size:
            last, encoded = np.zeros((1, size), dtype=np.float32), np.empty((1, self.format.block_bytes), np.uint8)
            last[0, : values.size - whole] = values[whole:]
            self._encode(last, encoded)
            rest = bytes_[self.format.encoded_bytes(whole) :]
            rest[:] = encoded[0, : rest.size]
        return out

    def decode(self, payload: memoryview, out: Values | None = None) -> Values:
        """Exact, and finite where the scales are and are not huge."""
        out = _values(self.format, len(payload), out)
        bytes_, size = np.frombuffer(payload, dtype=np.uint8), self.format.block_elements
        whole = out.size // size * size
        with np.errstate(over="ignore", invalid="ignore"):
            for part in _parts(whole):
                place = slice(self.format.encoded_bytes(part.start), self.format.encoded_bytes(part.stop))
                self._decode(bytes_[place].reshape(-1, self.format.block_bytes), out[part].reshape(-1, size))
            if whole < out.size:
                rest = bytes_[self.format.encoded_bytes(whole) :]
                encoded, last = np.zeros((1, self.format.block_bytes), np.uint8), np.empty((1, size), dtype=np.float32)
                encoded[0, : rest.size] = rest
                self._decode(encoded, last)
                out[whole:] = last[0, : out.size - whole]
        return out

    def is_usable(self, payload: memoryview) -> bool:
        """See `Codec`: a block's scale bounds its values."""
        bytes_, width = np.frombuffer(payload, dtype=np.uint8), self.format.block_bytes
        # Every block begins with its scale, also a short last one.
        upper = bytes_[1::width].astype(np.uint16) << 8
        bits = upper | bytes_[0::width][: upper.size]
        largest = int((USABLE / (self._limit + np.float32(1))).view(np.uint32)) >> 16
        return int(np.bitwise_and(bits, 0x7FFF).max()) <= largest

    def _encode(self, values_NB: NDArray[np.float32], blocks_NW: NDArray[np.uint8]) -> None:
        """N whole blocks of B values into blocks of W bytes."""
        # Magnitudes as integers order like the numbers, NaN above all, and their maximum takes half the time.
        magnitudes_NB = np.bitwise_and(values_NB.view(np.uint32), 0x7FFFFFFF)
        bits_N = magnitudes_NB.max(axis=1)
        scales_N, scratch_NB = bits_N.view(np.float32), magnitudes_NB.view(np.float32)
        _check(bits_N.max().view(np.float32))
        np.divide(scales_N, self._limit, out=scales_N)
        np.add(bits_N, 0xFFFF, out=bits_N)
        np.bitwise_and(bits_N, 0xFFFF0000, out=bits_N)
        np.maximum(scales_N, SMALLEST_SCALE, out=scales_N)
        np.multiply(values_NB, np.divide(np.float32(1), scales_N)[:, None], out=scratch_NB)
        np.add(scratch_NB, self._rounder, out=scratch_NB)
        blocks_NW[:, :2] = np.right_shift(bits_N, 16).astype("<u2").view(np.uint8).reshape(-1, 2)
        if not self._is_packed:
            np.copyto(blocks_NW[:, 2:], scratch_NB.view(np.uint32), casting="unsafe")
            return
        pairs = scratch_NB.view(np.uint32).astype(np.uint8).view("<u2")
        np.bitwise_or(pairs, np.right_shift(pairs, 4), out=pairs)
        np.copyto(blocks_NW[:, 2:], pairs, casting="unsafe")

    def _decode(self, blocks_NW: NDArray[np.uint8], values_NB: NDArray[np.float32]) -> None:
        """N whole blocks of W bytes into B values each."""
        bits_N = np.ascontiguousarray(blocks_NW[:, :2]).view("<u2")[:, 0].astype(np.uint32)
        scales_N = np.left_shift(bits_N, 16, out=bits_N).view(np.float32)
        if self._is_packed:
            pairs = blocks_NW[:, 2:].astype("<u2")
            np.bitwise_or(pairs, np.left_shift(pairs, 4), out=pairs)
            np.bitwise_and(pairs, 0x0F0F, out=pairs)
            np.subtract(pairs.view(np.uint8), np.float32(self._zero), out=values_NB)
        else:
            np.copyto(values_NB, blocks_NW[:, 2:].view(np.int8))
        np.multiply(values_NB, scales_N[:, None], out=values_NB)


def make_codec(name: str) -> Codec:
    """The codec that wire.dtype names."""
    if name == "float32":
        return Float32()
    return BFloat16() if name == "bfloat16" else Blocks(name)


def encode_change(
    codec: Codec, values: Values, base: Values, residual: Values | None, out: Buffer | None = None
) -> memoryview:
    """The bytes with which ``values`` travel to whoever knows ``base``, the last global values.

    A delta codec sends d = values − base (+ ``residual``, what earlier changes lost), and ``residual`` becomes
    d − decoded, in place: encoding a second time gives other bytes. An exact codec sends ``values`` and reads
    nothing else. Raises Unencodable, with ``residual`` changed in part.
    """
    if not codec.is_delta:
        return codec.encode(values, out)
    out = _memory(codec.format, values.size, out)
    scratch = np.empty((1 if residual is None else 2, _piece(values.size)), dtype=np.float32)
    for part in _parts(values.size):
        size = part.stop - part.start
        place = out[codec.format.encoded_bytes(part.start) : codec.format.encoded_bytes(part.stop)]
        with np.errstate(over="ignore", invalid="ignore"):
            change = np.subtract(values[part], base[part], out=scratch[0, :size])
            if residual is not None:
                np.add(change, residual[part], out=change)
        codec.encode(change, place)
        if residual is not None:
            np.subtract(change, codec.decode(place, scratch[1, :size]), out=residual[part])
    return out


def decode_change(codec: Codec, payload: memoryview, base: Values, out: Values) -> Values:
    """The values that sender and receiver of ``payload`` both adopt: base + decoded, or the payload's own.

    Written to ``out``, which may be ``base`` itself. ``base`` has as many values as travelled.
    """
    if not codec.is_delta:
        return codec.decode(payload, out)
    if isinstance(codec, BFloat16):
        # One pass: each value is widened exactly, then added with one rounding.
        source, target = torch.from_numpy(base), torch.from_numpy(out)
        for part in _parts(base.size):
            torch.add(source[part], _halves(payload, part), out=target[part])
        return out
    scratch = np.empty(_piece(base.size), dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in _parts(base.size):
            place = payload[codec.format.encoded_bytes(part.start) : codec.format.encoded_bytes(part.stop)]
            change = codec.decode(place, scratch[: part.stop - part.start])
            np.add(base[part], change, out=out[part])
    return out


def _halves(payload: memoryview, part: slice) -> torch.Tensor:
    """Some values of bfloat16 bytes; a copy, since what was received is read-only and a tensor must not be."""
    return torch.from_numpy(np.frombuffer(payload, dtype="<i2")[part].copy()).view(torch.bfloat16)


def _parts(size: int) -> Iterator[slice]:
    for start in range(0, size, PIECE_ELEMENTS):
        yield slice(start, min(start + PIECE_ELEMENTS, size))


def _piece(size: int) -> int:
    return min(size, PIECE_ELEMENTS)


def _memory(wire: WireFormat, num_elements: int, out: Buffer | None) -> memoryview:
    """The part of ``out`` that so many values take, or new memory."""
    size = wire.encoded_bytes(num_elements)
    if out is None:
        return np.empty(size, dtype=np.uint8).data
    memory = memoryview(out).cast("B")
    assert len(memory) >= size
    return memory[:size]


def _values(wire: WireFormat, encoded_bytes: int, out: Values | None) -> Values:
    """``out``, when so many bytes fill it, or new memory."""
    if out is None:
        return np.empty(wire.elements(encoded_bytes), dtype=np.float32)
    assert wire.encoded_bytes(out.size) == encoded_bytes
    return out


def _check(*extremes: np.float32) -> None:
    """The extreme values of a piece; a NaN in it shows in both, and compares false."""
    if not all(abs(extreme) <= LARGEST for extreme in extremes):
        raise Unencodable(f"a change holds NaN, infinite values or some above {LARGEST:g} in magnitude")
