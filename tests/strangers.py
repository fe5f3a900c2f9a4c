"""A caller that sends whatever bytes it likes, and streams of frames to spoil."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from spes_core.protocol.frames import HEADER_BYTES, Kind, pack
from spes_core.protocol.translate import to_bytes
from spes_core.sync.messages import UploadManifest

REFUSED = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.DATA_LOSS,
)


class Stranger:
    """Raw methods of a server, over a connection with no limits of its own."""

    def __init__(self, address: str, *options: tuple[str, int], **more: Any) -> None:
        unlimited = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        self.channel = grpc.insecure_channel(address, options=(*unlimited, *options), **more)
        self.join = self.channel.unary_unary("/spes.Sync/Join", None, None)
        self.heartbeat = self.channel.unary_unary("/spes.Sync/Heartbeat", None, None)
        self.status = self.channel.unary_unary("/spes.Sync/Status", None, None)
        self.upload = self.channel.stream_stream("/spes.Sync/Upload", None, None)
        self.download = self.channel.stream_stream("/spes.Sync/Download", None, None)
        self.open_join = self.channel.stream_unary("/spes.Sync/Join", None, None)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def send(self, *messages: bytes) -> list[bytes]:
        """All answers to an upload stream of these messages."""
        return list(self.upload(iter(messages), timeout=20))

    def ask(self, *messages: bytes) -> list[bytes]:
        """All answers to a download stream of these messages."""
        return list(self.download(iter(messages), timeout=20))


def refused(call: Callable[[], Any], *codes: grpc.StatusCode) -> str:
    """What the server says to a call that it must refuse."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    assert raised.value.code() in (codes or REFUSED), raised.value
    return str(raised.value.details())


def manifest_of(session: bytes, node: int, tensors: tuple[int, ...], **changes: Any) -> bytes:
    """The first frame of a node's upload."""
    values = {"round": 0, "step": 2, "tokens": 100, "codec": "float32", "safe_round": 0} | changes
    record = UploadManifest(node=node, session=session, tensors=tensors, **values)
    return pack(Kind.MANIFEST, to_bytes(record))


REGIONS = {
    "magic": 0,
    "version": 4,
    "kind": 5,
    "zero": 6,
    "tensor": 8,
    "offset": 12,
    "length": 20,
    "checksum": 24,
    "payload": HEADER_BYTES,
}
"""First byte of each part of a frame."""


def with_flipped_bit(message: bytes, region: str, bit: int = 3) -> bytes:
    spoiled = bytearray(message)
    spoiled[REGIONS[region]] ^= 1 << bit
    return bytes(spoiled)


def silent(until: threading.Event) -> Iterator[bytes]:
    """A request stream that sends nothing."""
    until.wait(30)
    return
    yield b""
