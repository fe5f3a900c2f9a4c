"""Between the records of `spes_core.sync.messages` and their protobuf messages, field by field of the same name."""

from __future__ import annotations

import threading
from dataclasses import asdict, fields
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from spes_core.errors import ProtocolError
from spes_core.protocol import sync_pb2
from spes_core.sync import messages
from spes_core.sync.messages import TensorSpec

Record = TypeVar("Record")

MAX_RECORD_BYTES = 1 << 20
"""Largest serialised record: names and shapes of some 15,000 tensors."""
MAX_ITEMS = 1 << 16
"""Most entries of a repeated field."""

_MESSAGES: dict[type, Any] = {
    messages.Hello: sync_pb2.JoinRequest,
    messages.Welcome: sync_pb2.JoinReply,
    messages.UploadManifest: sync_pb2.UploadManifest,
    messages.UploadReady: sync_pb2.UploadReady,
    messages.Receipt: sync_pb2.UploadReceipt,
    messages.DownloadRequest: sync_pb2.DownloadRequest,
    messages.DownloadManifest: sync_pb2.DownloadManifest,
    messages.RoundSummary: sync_pb2.RoundSummary,
    messages.Heartbeat: sync_pb2.HeartbeatRequest,
    messages.HeartbeatReply: sync_pb2.HeartbeatReply,
}
_reading = threading.Lock()
"""One at a time: a hostile message of a million bytes takes some fifty million while protobuf reads it."""


def to_bytes(record: Any) -> bytes:
    """The serialised protobuf message of a record."""
    values = asdict(record)
    if isinstance(record, messages.Hello):
        values["schema"] = [
            sync_pb2.TensorSpec(name=spec.name, shape=spec.shape, dtype=spec.dtype) for spec in record.schema
        ]
    message: Message = _MESSAGES[type(record)](**values)
    return message.SerializeToString()


def from_bytes(kind: type[Record], data: bytes | memoryview) -> Record:
    """The record in a serialised protobuf message. Raises ProtocolError when it is none, or absurdly large."""
    name = _MESSAGES[kind].DESCRIPTOR.name
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError(f"{name} has {len(data)} bytes; at most {MAX_RECORD_BYTES} are allowed")
    with _reading:
        try:
            message = _MESSAGES[kind].FromString(bytes(data))
        except DecodeError as error:
            raise ProtocolError(f"{name} cannot be read: {error}") from error
        return kind(**{field.name: _plain(getattr(message, field.name), name) for field in fields(kind)})  # type: ignore[arg-type]


def _plain(value: Any, message: str) -> Any:
    """A protobuf field as the record holds it: repeated fields as tuples."""
    if isinstance(value, str | bytes | int | float):
        return value
    if len(value) > MAX_ITEMS:
        raise ProtocolError(f"{message} lists {len(value)} entries; at most {MAX_ITEMS} are allowed")
    return tuple(_spec(item, message) if isinstance(item, sync_pb2.TensorSpec) else item for item in value)


def _spec(item: Any, message: str) -> TensorSpec:
    return TensorSpec(item.name, _plain(item.shape, message), item.dtype)
