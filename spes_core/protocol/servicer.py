"""The server's side of the wire: translates requests and frames into calls of the server core, and nothing more."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

import grpc

from spes_core.errors import Damaged, ProtocolError, Refused, RoundFailed, SpesError, StaleRound
from spes_core.protocol import frames
from spes_core.protocol.door import Door, claimed
from spes_core.protocol.frames import HEADER_BYTES, Kind
from spes_core.protocol.translate import from_bytes, to_bytes
from spes_core.sync.messages import (
    DownloadManifest,
    DownloadRequest,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Receipt,
    RoundSummary,
    UploadManifest,
    UploadReady,
    Welcome,
)

SERVICE = "spes.Sync"


class UploadInProgress(Protocol):
    """One node's upload while it comes in; used by one thread."""

    @property
    def ready(self) -> UploadReady:
        """Where to go on."""

    def restart(self) -> None:
        """The node's bytes differ from those that are here: forget them, the next chunk is the first."""

    def add(self, tensor: int, offset: int, payload: memoryview) -> None:
        """The next chunk, strictly in order from ``ready.offset_bytes`` on; ``payload`` is valid during the call."""

    def finish(self, framing_bytes: int) -> Receipt:
        """All has been sent. Also called, at once, for an upload that was complete before: the same receipt again."""

    def close(self) -> None:
        """Nothing more comes from the thread that receives; what is stored stays."""


class DownloadInProgress(Protocol):
    """What one node lacks of a round, while it is being sent."""

    @property
    def manifest(self) -> DownloadManifest:
        """What is going to be sent."""

    def chunks(self, chunk_bytes: int) -> Iterable[tuple[int, int, memoryview]]:
        """(tensor, offset, payload) in canonical order, each as soon as it is known; a payload is valid until the
        next one is asked for."""

    def summary(self) -> RoundSummary:
        """After the last chunk."""

    def delivered(self, framing_bytes: int) -> None:
        """The node has confirmed that it applied everything."""


class ServerCore(Protocol):
    """What the servicer needs of `spes_core.sync.parameter_server.ParameterServer`: that module imports torch."""

    def join(self, hello: Hello, is_cancelled: Callable[[], bool]) -> Welcome: ...
    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply: ...
    def begin_upload(self, manifest: UploadManifest) -> UploadInProgress: ...
    def open_download(self, request: DownloadRequest, is_cancelled: Callable[[], bool]) -> DownloadInProgress: ...
    def refuse(self, node: int | None, reason: str) -> Refused: ...
    def wake(self) -> None: ...
    def status(self) -> dict[str, Any]: ...


class SyncServicer(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Serves the methods of sync.proto as raw bytes; one thread for each request in progress.

    Every method reads its first message as that of a stream, also where it is the only one, so that a caller who never
    sends it can be sent away.
    """

    def __init__(
        self, core: ServerCore, chunk_bytes: int, token: str | None = None, threads: ThreadPoolExecutor | None = None
    ) -> None:
        """``token``: what a node must know to join; None lets everyone in who can reach the server.

        ``threads`` (`num_threads` of them) serve these methods alone, whatever other services of the server are busy.
        """
        self._core, self._chunk_bytes, self._token = core, chunk_bytes, token
        self._door = Door(core.refuse)
        self._threads = threads
        self._sessions: dict[int, bytes] = {}
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        self._handlers = {
            f"/{SERVICE}/Join": unary(self._guarded(self._join)),
            f"/{SERVICE}/Heartbeat": unary(self._guarded(self._heartbeat)),
            f"/{SERVICE}/Status": unary(self._guarded(self._status)),
            f"/{SERVICE}/Upload": stream(self._guarded_stream(self._upload)),
            f"/{SERVICE}/Download": stream(self._guarded_stream(self._download)),
        }

    def service(self, handler_call_details: Any) -> Any:
        """The method that a call asks for; gRPC answers UNIMPLEMENTED for None."""
        return self._handlers.get(handler_call_details.method)

    # The methods

    def _join(self, requests: Iterator[bytes], context: Any) -> bytes:
        hello = self._read(Hello, self._door.first(requests, context), context)
        who = claimed(hello.node, context)
        if (certified := certified_name(context)) is not None and certified != f"node-{hello.node}":
            reason = f'a certificate for "{certified}" cannot join as node {hello.node} (from {context.peer()})'
            raise _Unproven(self._door.refusal(reason))
        if self._token is not None and not secrets.compare_digest(hello.token.encode(), self._token.encode()):
            what = "another run's join token" if hello.token else "no join token"
            where = "the right one is in join.token, beside run.json of the server or among the run's credentials"
            raise _Unproven(self._door.refusal(f"it shows {what}; {where} ({who})"))
        context.add_callback(self._core.wake)
        welcome = self._core.join(hello, lambda: not context.is_active())
        self._door.end_streams(hello.node)
        self._sessions[hello.node] = welcome.session
        return to_bytes(welcome)

    def _heartbeat(self, requests: Iterator[bytes], context: Any) -> bytes:
        beat = self._read(Heartbeat, self._door.first(requests, context), context)
        self._prove(beat.node, beat.session, context)
        return to_bytes(self._core.heartbeat(beat))

    def _status(self, requests: Iterator[bytes], context: Any) -> bytes:
        self._door.first(requests, context)
        return json.dumps(self._core.status()).encode()

    def _upload(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        first = self._first_frame(requests, Kind.MANIFEST, context)
        manifest = self._read(UploadManifest, first.payload, context)
        node = manifest.node
        self._prove(node, manifest.session, context)
        with self._door.only(node, "upload", context):
            upload = self._core.begin_upload(manifest)
            try:
                yield frames.pack(Kind.READY, to_bytes(upload.ready))
                receipt = self._take_in(requests, upload, node, HEADER_BYTES + len(first.payload))
                yield frames.pack(Kind.RECEIPT, to_bytes(receipt))
            finally:
                upload.close()

    def _take_in(self, requests: Iterator[bytes], upload: UploadInProgress, node: int, framing_bytes: int) -> Receipt:
        """What a node sends after it was told where to go on."""
        frame = self._next(requests, node)
        framing_bytes += HEADER_BYTES
        if frame.kind == Kind.RESTART:
            upload.restart()
            frame = self._next(requests, node)
            framing_bytes += HEADER_BYTES
        while frame.kind == Kind.CHUNK:
            upload.add(frame.tensor, frame.offset, frame.payload)
            frame = self._next(requests, node)
            framing_bytes += HEADER_BYTES
        if frame.kind != Kind.END:
            raise self._core.refuse(node, f"a frame of kind {frame.kind.name} came inside an upload")
        return upload.finish(framing_bytes)

    def _download(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        first = self._first_frame(requests, Kind.REQUEST, context)
        request = self._read(DownloadRequest, first.payload, context)
        node = request.node
        self._prove(node, request.session, context)
        with self._door.only(node, "download", context):
            context.add_callback(self._core.wake)
            download = self._core.open_download(request, lambda: not context.is_active())
            message = frames.pack(Kind.MANIFEST, to_bytes(download.manifest))
            framing_bytes, at = len(message), 0
            yield message
            for tensor, offset, payload in download.chunks(self._chunk_bytes):
                known = min(max(request.offset_bytes - at, 0), len(payload))
                at += len(payload)
                if known < len(payload):
                    framing_bytes += HEADER_BYTES
                    yield frames.pack(Kind.CHUNK, payload[known:], tensor=tensor, offset=offset + known)
            message = frames.pack(Kind.END, to_bytes(download.summary()))
            yield message
            if self._next(requests, node).kind != Kind.CONFIRM:
                raise self._core.refuse(node, "another frame came where the confirmation of a download was due")
            download.delivered(framing_bytes + len(message))

    # What they share

    def _guarded(self, method: Callable[[Iterator[bytes], Any], bytes]) -> Callable[[Iterator[bytes], Any], bytes]:
        def call(requests: Iterator[bytes], context: Any) -> bytes:
            try:
                return method(requests, context)
            except SpesError as error:
                _abort(context, error)

        self._on_threads(call)
        return call

    def _guarded_stream(
        self, method: Callable[[Iterator[bytes], Any], Iterator[bytes]]
    ) -> Callable[[Iterator[bytes], Any], Iterator[bytes]]:
        def call(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            try:
                yield from method(requests, context)
            except SpesError as error:
                _abort(context, error)

        self._on_threads(call)
        return call

    def _on_threads(self, call: Any) -> None:
        if self._threads is not None:
            call.experimental_thread_pool = self._threads

    def _first_frame(self, requests: Iterator[bytes], kind: Kind, context: Any) -> frames.Frame:
        """The frame that a stream begins with, from a sender who has proved nothing yet."""
        message = self._door.first(requests, context)
        try:
            return frames.unpack(message, kind)
        except ProtocolError as error:
            raise self._door.refusal(f"{error} (from {context.peer()})") from error

    def _next(self, requests: Iterator[bytes], node: int) -> frames.Frame:
        """The next frame of a node's stream; a bad one is refused in its name."""
        message = next(requests, None)
        if message is None:
            raise ProtocolError(f"the stream of node {node} ended early")
        try:
            return frames.unpack(message)
        except Damaged as error:
            raise Damaged(str(self._core.refuse(node, str(error)))) from error
        except ProtocolError as error:
            raise self._core.refuse(node, str(error)) from error

    def _read(self, kind: type[Any], data: bytes | memoryview, context: Any) -> Any:
        try:
            return from_bytes(kind, data)
        except ProtocolError as error:
            raise self._door.refusal(f"{error} (from {context.peer()})") from error

    def _prove(self, node: int, session: bytes, context: Any) -> None:
        """Raises unless the sender is the process that joined last as ``node``: only then is the node to blame."""
        who = claimed(node, context)
        if (certified := certified_name(context)) is not None and certified != f"node-{node}":
            reason = f'a certificate for "{certified}" cannot speak for node {node} ({who})'
            raise _Unproven(self._door.refusal(reason))
        known = self._sessions.get(node)
        if known is None:
            raise _UnknownSession(f"node {node} has not joined since this server was started")
        if not secrets.compare_digest(known, session):
            raise self._door.refusal(f"another process has joined as node {node} since; end one of the two ({who})")


class Opening(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Asks callers to come again until there is a servicer: a server listens before it has read its state."""

    def __init__(self) -> None:
        self.servicer: SyncServicer | None = None

    def service(self, handler_call_details: Any) -> Any:
        """See `SyncServicer.service`."""
        if not handler_call_details.method.startswith(f"/{SERVICE}/"):
            return None
        if self.servicer is not None:
            return self.servicer.service(handler_call_details)
        return grpc.stream_unary_rpc_method_handler(_not_yet)


def _not_yet(_: Iterator[bytes], context: Any) -> bytes:
    context.abort(grpc.StatusCode.UNAVAILABLE, "the server is reading its state; it will be ready soon")
    raise AssertionError("context.abort returned")


class _Unproven(ProtocolError):
    """The sender is not who it says, or not of this run."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(str(refused))


class _UnknownSession(ProtocolError):
    """The server was started again since the node joined."""


def num_threads(nodes: int) -> int:
    """Threads that a server needs: per node both streams, each with one that is being replaced; callers at the door."""
    return 4 * nodes + Door.MAX_WAITING + 4


def certified_name(context: Any) -> str | None:
    """The common name in the caller's certificate; None without mutual TLS."""
    names = context.auth_context().get("x509_common_name")
    return names[0].decode(errors="replace") if names else None


_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (RoundFailed, grpc.StatusCode.ABORTED),
    (StaleRound, grpc.StatusCode.OUT_OF_RANGE),
    (_Unproven, grpc.StatusCode.UNAUTHENTICATED),
    (_UnknownSession, grpc.StatusCode.NOT_FOUND),
    (Damaged, grpc.StatusCode.DATA_LOSS),
    (ProtocolError, grpc.StatusCode.FAILED_PRECONDITION),
    (SpesError, grpc.StatusCode.INTERNAL),
)


def _abort(context: Any, error: Exception) -> NoReturn:
    """Tell the node why, in the status of the call; gRPC leaves the method through an exception of its own."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    # The details of a status travel in a header, which is limited.
    context.abort(code, str(error)[:2000])
    raise AssertionError("context.abort returned")
