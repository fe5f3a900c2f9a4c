"""The server's side of the wire: translates requests and frames into calls of the server core, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import grpc

from spes_core.errors import ProtocolError, Refused, RoundFailed
from spes_core.protocol import frames
from spes_core.protocol.frames import HEADER_BYTES, Kind
from spes_core.protocol.translate import from_bytes, to_bytes
from spes_core.sync.messages import (
    DownloadManifest,
    DownloadRequest,
    Hello,
    Receipt,
    UploadManifest,
    Welcome,
)
from spes_core.sync.transfer import WireFormat

SERVICE = "spes.Sync"


class UploadInProgress(Protocol):
    """What the servicer needs of `spes_core.sync.upload.Upload`."""

    def add(self, tensor: int, offset: int, payload: memoryview) -> None: ...
    def finish(self, framing_bytes: int) -> Receipt: ...
    def cancel(self) -> None: ...


class DownloadInProgress(Protocol):
    """What the servicer needs of `spes_core.sync.download.Download`."""

    manifest: DownloadManifest

    def payload(self, tensor: int) -> memoryview: ...
    def delivered(self, framing_bytes: int) -> None: ...


class ServerCore(Protocol):
    """What the servicer needs of `spes_core.sync.parameter_server.ParameterServer`: that module imports torch."""

    @property
    def wire(self) -> WireFormat: ...
    def join(self, hello: Hello) -> Welcome: ...
    def begin_upload(self, manifest: UploadManifest) -> UploadInProgress: ...
    def open_download(self, request: DownloadRequest, is_cancelled: Callable[[], bool]) -> DownloadInProgress: ...
    def refuse(self, node: int | None, reason: str) -> Refused: ...
    def wake(self) -> None: ...


class SyncServicer(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Serves the three methods of sync.proto as raw bytes; one thread for each request in progress."""

    def __init__(self, core: ServerCore, chunk_bytes: int) -> None:
        self._core, self._chunk_bytes = core, chunk_bytes
        self._handlers = {
            f"/{SERVICE}/Join": grpc.unary_unary_rpc_method_handler(self._join),
            f"/{SERVICE}/Upload": grpc.stream_unary_rpc_method_handler(self._upload),
            f"/{SERVICE}/Download": grpc.stream_stream_rpc_method_handler(self._download),
        }

    def service(self, handler_call_details: Any) -> Any:
        """The method that a call asks for; gRPC answers UNIMPLEMENTED for None."""
        return self._handlers.get(handler_call_details.method)

    def _join(self, request: bytes, context: Any) -> bytes:
        try:
            return to_bytes(self._core.join(self._read(Hello, request, context)))
        except (ProtocolError, RoundFailed) as error:
            _abort(context, error)

    def _upload(self, requests: Iterator[bytes], context: Any) -> bytes:
        try:
            first = self._next(requests, Kind.MANIFEST, context)
            manifest = self._read(UploadManifest, first.payload, context)
            upload = self._core.begin_upload(manifest)
            if not context.add_callback(upload.cancel):
                raise ProtocolError("the node went away")
            framing_bytes = HEADER_BYTES + len(first.payload)
            while True:
                frame = self._next(requests, None, context, manifest.node)
                framing_bytes += HEADER_BYTES
                if frame.kind != Kind.CHUNK:
                    break
                upload.add(frame.tensor, frame.offset, frame.payload)
            if frame.kind != Kind.END:
                raise self._core.refuse(manifest.node, f"a frame of kind {frame.kind.name} came inside an upload")
            return to_bytes(upload.finish(framing_bytes))
        except (ProtocolError, RoundFailed) as error:
            _abort(context, error)

    def _download(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            context.add_callback(self._core.wake)
            frame = self._next(requests, Kind.REQUEST, context)
            request = self._read(DownloadRequest, frame.payload, context)
            download = self._core.open_download(request, lambda: not context.is_active())
            message = frames.pack(Kind.MANIFEST, to_bytes(download.manifest))
            framing_bytes = len(message)
            yield message
            for tensor in download.manifest.tensors:
                payload = download.payload(tensor)
                for offset, length in self._core.wire.chunks(len(payload), self._chunk_bytes):
                    framing_bytes += HEADER_BYTES
                    yield frames.pack(Kind.CHUNK, payload[offset : offset + length], tensor=tensor, offset=offset)
            yield frames.pack(Kind.END)
            self._next(requests, Kind.CONFIRM, context, request.node)
            download.delivered(framing_bytes + HEADER_BYTES)
        except (ProtocolError, RoundFailed) as error:
            _abort(context, error)

    def _next(
        self, requests: Iterator[bytes], kind: Kind | None, context: Any, node: int | None = None
    ) -> frames.Frame:
        """The next frame of a stream; a bad one is refused, in the name of the node or of its network address."""
        message = next(requests, None)
        if message is None:
            raise ProtocolError("the stream ended early")
        try:
            return frames.unpack(message, kind)
        except ProtocolError as error:
            raise self._core.refuse(
                node, f"{error}{'' if node is not None else f' (from {context.peer()})'}"
            ) from error

    def _read(self, kind: type[Any], data: bytes | memoryview, context: Any) -> Any:
        try:
            return from_bytes(kind, data)
        except ProtocolError as error:
            raise self._core.refuse(None, f"{error} (from {context.peer()})") from error


def _abort(context: Any, error: Exception) -> NoReturn:
    """Tell the node why, in the status of the call; gRPC leaves the method through an exception of its own."""
    code = grpc.StatusCode.ABORTED if isinstance(error, RoundFailed) else grpc.StatusCode.FAILED_PRECONDITION
    context.abort(code, str(error)[:2000])
    raise AssertionError("context.abort returned")
