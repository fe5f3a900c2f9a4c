"""Between the records of `spes_core.sync.messages` and their protobuf messages, field by field of the same name."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from spes_core.errors import ProtocolError
from spes_core.protocol import sync_pb2
from spes_core.sync import messages
from spes_core.sync.messages import TensorSpec

Record = TypeVar("Record")

_MESSAGES: dict[type, Any] = {
    messages.Hello: sync_pb2.JoinRequest,
    messages.Welcome: sync_pb2.JoinReply,
    messages.UploadManifest: sync_pb2.UploadManifest,
    messages.Receipt: sync_pb2.UploadReceipt,
    messages.DownloadRequest: sync_pb2.DownloadRequest,
    messages.DownloadManifest: sync_pb2.DownloadManifest,
}


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
    """The record in a serialised protobuf message. Raises ProtocolError when it is none."""
    try:
        message = _MESSAGES[kind].FromString(bytes(data))
    except DecodeError as error:
        raise ProtocolError(f"{_MESSAGES[kind].DESCRIPTOR.name} cannot be read: {error}") from error
    return kind(**{field.name: _plain(getattr(message, field.name)) for field in fields(kind)})  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    """A protobuf field as the record holds it: repeated fields as tuples."""
    if isinstance(value, str | bytes | int | float):
        return value
    return tuple(
        TensorSpec(item.name, tuple(item.shape), item.dtype) if isinstance(item, sync_pb2.TensorSpec) else item
        for item in value
    )
