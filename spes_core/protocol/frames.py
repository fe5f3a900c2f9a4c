"""Frames: the only thing that travels in an upload or download stream.

One gRPC message is one frame: a header of 32 bytes, little-endian, then the payload::

    magic "SPES" · version u8 · kind u8 · zero u16 · tensor u32 · offset u64 · length u32 · checksum u64

``tensor`` is an index into the joined schema and ``offset`` a position in its encoded bytes (both 0 except for CHUNK);
``length`` is the payload's; the checksum is XXH3-64 of the payload, seeded with XXH3-64 of the header before it.
Nothing is ever unpickled, and a payload is only looked at once the header has been checked.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import xxhash

from spes_core.errors import Damaged, ProtocolError

VERSION = 2
MAX_PAYLOAD_BYTES = 4 << 20
"""Largest payload of one frame: the upper bound of wire.chunk_bytes."""

_FIELDS = struct.Struct("<4sBBHIQI")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"SPES"
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
MAX_FRAME_BYTES = HEADER_BYTES + MAX_PAYLOAD_BYTES


class Kind(enum.IntEnum):
    """What a frame is for."""

    MANIFEST = 1
    CHUNK = 2
    END = 3
    REQUEST = 4
    CONFIRM = 5
    READY = 6
    RESTART = 7
    RECEIPT = 8


_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """A checked frame; ``payload`` is a view into the received message."""

    kind: Kind
    tensor: int
    offset: int
    payload: memoryview


def pack(kind: Kind, payload: bytes | memoryview = b"", *, tensor: int = 0, offset: int = 0) -> bytes:
    """The message for one frame: the one copy of the payload on this side that gRPC's interface makes necessary."""
    assert len(payload) <= MAX_PAYLOAD_BYTES, f"a frame of {len(payload)} bytes"
    fields = _FIELDS.pack(_MAGIC, VERSION, kind, 0, tensor, offset, len(payload))
    return b"".join((fields, _CHECKSUM.pack(_checksum(fields, payload)), payload))


def unpack(message: bytes, kind: Kind | None = None) -> Frame:
    """Check one message. Raises ProtocolError, which says what is wrong, also when another ``kind`` is due.

    A message that was changed on its way raises Damaged.
    """
    if len(message) < HEADER_BYTES:
        raise ProtocolError(f"a message of {len(message)} bytes is shorter than a frame's header ({HEADER_BYTES})")
    magic, version, number, zero, tensor, offset, length = _FIELDS.unpack_from(message)
    if magic != _MAGIC:
        guess = "; it looks like a pickle, and pickles are never read" if message[:1] == b"\x80" else ""
        raise ProtocolError(f"a message begins with {bytes(magic)!r} where a frame begins with {_MAGIC!r}{guess}")
    if version != VERSION:
        raise ProtocolError(f"a frame has version {version}; this release reads version {VERSION}")
    if length > MAX_PAYLOAD_BYTES or length != len(message) - HEADER_BYTES:
        raise ProtocolError(
            f"a frame claims a payload of {length} bytes and has {len(message) - HEADER_BYTES}; at most"
            f" {MAX_PAYLOAD_BYTES} are allowed"
        )
    payload = memoryview(message)[HEADER_BYTES:]
    (checksum,) = _CHECKSUM.unpack_from(message, _FIELDS.size)
    if checksum != _checksum(memoryview(message)[: _FIELDS.size], payload):
        raise Damaged(f"the checksum of a frame (tensor {tensor}, byte {offset}, {length} bytes) is wrong")
    found = _KINDS.get(number)
    if zero or found is None:
        raise ProtocolError(f"a frame has the unknown kind {number}")
    if kind is not None and found != kind:
        raise ProtocolError(f"a frame of kind {found.name} came where {kind.name} was due")
    return Frame(found, tensor, offset, payload)


def _checksum(fields: bytes | memoryview, payload: bytes | memoryview) -> int:
    checksum: int = xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(fields))
    return checksum
