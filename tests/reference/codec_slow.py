"""Codecs value by value in Python numbers: what the bytes must be, from the definition alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction

BLOCK = 128


def float32(number: float) -> float:
    """The nearest float32; a double holds sums, products and quotients of two float32 well enough for that."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def bfloat16_near(value: float) -> int:
    """The 16 bits of the nearest bfloat16, of two equally near ones the even one."""
    magnitude = abs(value)
    lower = struct.unpack("<I", struct.pack("<f", magnitude))[0] >> 16
    below = Fraction(magnitude) - Fraction(bfloat16_value(lower))
    above = Fraction(bfloat16_value(lower + 1)) - Fraction(magnitude)
    code = lower + 1 if above < below or (above == below and lower % 2) else lower
    return code | (0x8000 if struct.pack("<f", value)[3] & 0x80 else 0)


def bfloat16_above(magnitude: float) -> int:
    """The 16 bits of the smallest bfloat16 that is not below a magnitude."""
    code = struct.unpack("<I", struct.pack("<f", magnitude))[0] >> 16
    return code if bfloat16_value(code) == magnitude else code + 1


def bfloat16_value(code: int) -> float:
    """The value of 16 bits."""
    return float(struct.unpack("<f", struct.pack("<I", code << 16))[0])


def encode(name: str, values: Sequence[float]) -> bytes:
    """The bytes of float32 ``values`` under wire.dtype ``name``."""
    if name == "float32":
        return struct.pack(f"<{len(values)}f", *values)
    if name == "bfloat16":
        return b"".join(struct.pack("<H", bfloat16_near(value)) for value in values)
    limit = {"int8": 127, "int4": 7}[name]
    blocks = (values[start : start + BLOCK] for start in range(0, len(values), BLOCK))
    return b"".join(_block(block, limit) for block in blocks)


def _block(values: Sequence[float], limit: int) -> bytes:
    code = max(bfloat16_above(float32(max(map(abs, values)) / limit)), 0x0080)
    inverse = float32(1 / bfloat16_value(code))
    integers = [round(float32(value * inverse)) for value in values]  # Python rounds ties to even
    assert all(abs(integer) <= limit for integer in integers)
    if limit == 127:
        return struct.pack(f"<H{len(values)}b", code, *integers)
    nibbles = [integer + 8 for integer in integers] + [8] * (len(values) % 2)
    pairs = zip(nibbles[::2], nibbles[1::2], strict=True)
    return struct.pack("<H", code) + bytes(lower + 16 * upper for lower, upper in pairs)


def decode(name: str, payload: bytes, num_elements: int) -> list[float]:
    """The values that so many bytes stand for."""
    if name == "float32":
        return list(struct.unpack(f"<{num_elements}f", payload))
    if name == "bfloat16":
        return [bfloat16_value(code) for code in struct.unpack(f"<{num_elements}H", payload)]
    width = 2 + (BLOCK if name == "int8" else BLOCK // 2)
    values: list[float] = []
    for start in range(0, len(payload), width):
        (code,), body = struct.unpack("<H", payload[start : start + 2]), payload[start + 2 : start + width]
        if name == "int8":
            integers = list(struct.unpack(f"{len(body)}b", body))
        else:
            integers = [nibble - 8 for byte in body for nibble in (byte % 16, byte // 16)]
        values += [integer * bfloat16_value(code) for integer in integers]
    return values[:num_elements]
