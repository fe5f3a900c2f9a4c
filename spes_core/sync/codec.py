"""Codecs: tensor values to bytes on the wire and back. Today exact float32; others take the same seat."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spes_core.sync.transfer import FORMATS, WireFormat

Values = NDArray[np.float32]
"""A flat, contiguous float32 array."""


class Codec(Protocol):
    """Translates values to wire bytes and back; ``format`` tells the sizes.

    Sender and receiver both adopt the decoded value, so every copy of a tensor stays identical under any codec.
    """

    format: WireFormat

    def encode(self, values: Values) -> memoryview:
        """The bytes of ``values``; may share its memory, so ``values`` must not change until they are sent."""

    def decode(self, payload: memoryview) -> Values:
        """The values in whole blocks of bytes; may share memory with ``payload``, possibly read-only."""


class Float32:
    """Exact little-endian float32: neither direction copies."""

    format = FORMATS["float32"]

    def encode(self, values: Values) -> memoryview:
        """The memory of ``values`` itself."""
        return values.data.cast("B")

    def decode(self, payload: memoryview) -> Values:
        """``payload`` itself, seen as values."""
        return np.frombuffer(payload, dtype="<f4")


def make_codec(name: str) -> Codec:
    """The codec that wire.dtype names."""
    return {"float32": Float32}[name]()
