"""A node's side of the wire: join the run, upload what was trained, download what is lacking."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import grpc

from spes_core.config import RunConfig
from spes_core.errors import ProtocolError, Refused, RoundFailed, SpesError, Unreachable
from spes_core.protocol import channel, frames
from spes_core.protocol.frames import HEADER_BYTES, Kind
from spes_core.protocol.servicer import SERVICE
from spes_core.protocol.translate import from_bytes, to_bytes
from spes_core.sync.client import DownloadReport, PayloadOf, Sink, UploadReport
from spes_core.sync.messages import (
    DownloadManifest,
    DownloadRequest,
    Hello,
    Receipt,
    Schema,
    UploadManifest,
    Welcome,
)
from spes_core.sync.transfer import FORMATS, Transfer

CONNECT_TIMEOUT_S = 60.0
"""How long `join` waits for a server that does not listen yet."""


class SyncClient:
    """One node's connection to the server; implements `spes_core.sync.client.Client`. Used by one thread.

    Payload bytes are encoded tensors; framing bytes are the frame headers and manifests around them. Requests, receipts
    and confirmations, some 200 bytes a round, and what gRPC and TCP add are not counted.
    """

    def __init__(
        self, address: str, config: RunConfig, node: int, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """``address`` is "host:port". Nothing is sent before `join`."""
        self._address, self._node, self._connect_timeout_s = address, node, connect_timeout_s
        self._wire, self._chunk_bytes = FORMATS[config.wire.dtype], config.wire.chunk_bytes
        self._channel = grpc.insecure_channel(address, options=channel.OPTIONS)
        # No serialisers: every message is bytes as it is.
        self._join = self._channel.unary_unary(f"/{SERVICE}/Join", None, None)
        self._upload = self._channel.stream_unary(f"/{SERVICE}/Upload", None, None)
        self._download = self._channel.stream_stream(f"/{SERVICE}/Download", None, None)
        self._schema: Schema = ()
        self._session = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def join(self, hello: Hello) -> Welcome:
        """See `spes_core.sync.client.Client`; waits for the server to listen."""
        assert hello.node == self._node
        try:
            reply = self._join(to_bytes(hello), timeout=self._connect_timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise self._translated(error) from error
        welcome = from_bytes(Welcome, reply)
        self._schema, self._session = hello.schema, welcome.session
        return welcome

    def upload(
        self, *, round: int, step: int, tokens: int, tensors: tuple[int, ...], payload_of: PayloadOf
    ) -> UploadReport:
        """See `spes_core.sync.client.Client`."""
        manifest = UploadManifest(
            node=self._node,
            session=self._session,
            round=round,
            step=step,
            tokens=tokens,
            codec=self._wire.name,
            tensors=tensors,
        )
        outgoing = _Outgoing(manifest, payload_of, self._wire.chunks, self._chunk_bytes)
        began_s = time.perf_counter()
        try:
            reply = self._upload(iter(outgoing))
        except grpc.RpcError as error:
            raise outgoing.error or self._translated(error) from error
        elapsed_s = time.perf_counter() - began_s
        receipt = from_bytes(Receipt, reply)
        elsewhere_s = outgoing.serialise_s + receipt.blocked_s + receipt.aggregate_s + receipt.close_s
        return UploadReport(
            payload_bytes=outgoing.payload_bytes,
            framing_bytes=outgoing.framing_bytes,
            serialise_s=outgoing.serialise_s,
            transfer_s=max(0.0, elapsed_s - elsewhere_s),
            wait_s=receipt.blocked_s,
            aggregate_s=receipt.aggregate_s,
        )

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        """See `spes_core.sync.client.Client`."""
        request = to_bytes(DownloadRequest(node=self._node, session=self._session, round=round))
        confirmation = _Confirmation(frames.pack(Kind.REQUEST, request))
        began_s = time.perf_counter()
        call: Any = self._download(iter(confirmation))
        try:
            message = next(call)
            manifest = from_bytes(DownloadManifest, frames.unpack(message, Kind.MANIFEST).payload)
            opened_s = time.perf_counter()
            sink.begin(manifest)
            payload_bytes, chunks, serialise_s = self._receive(call, manifest, sink)
            confirmation.give()
            if next(call, None) is not None:
                raise ProtocolError(f"the server at {self._address} sent more than it announced")
        except grpc.RpcError as error:
            raise self._translated(error) from error
        except StopIteration as error:
            raise ProtocolError(f"the server at {self._address} ended a download early") from error
        finally:
            confirmation.withdraw()
            call.cancel()
        work_s = manifest.aggregate_s + manifest.merge_s
        return DownloadReport(
            manifest=manifest,
            payload_bytes=payload_bytes,
            framing_bytes=len(message) + (chunks + 1) * HEADER_BYTES,
            serialise_s=serialise_s,
            transfer_s=max(0.0, time.perf_counter() - opened_s - serialise_s),
            wait_s=max(0.0, opened_s - began_s - work_s),
        )

    def close(self) -> None:
        """Close the connection; requests in progress are cancelled."""
        self._channel.close()

    def _receive(self, call: Iterator[bytes], manifest: DownloadManifest, sink: Sink) -> tuple[int, int, float]:
        """Pass every chunk to the sink; (payload bytes, chunks, seconds of checking and copying)."""
        transfer = self._make_transfer(manifest)
        payload_bytes, chunks, serialise_s = 0, 0, 0.0
        while True:
            message = next(call)
            began_s = time.perf_counter()
            frame = frames.unpack(message)
            if frame.kind != Kind.CHUNK:
                break
            transfer.accept(frame.tensor, frame.offset, len(frame.payload))
            sink.write(frame.tensor, frame.offset, frame.payload)
            payload_bytes += len(frame.payload)
            chunks += 1
            serialise_s += time.perf_counter() - began_s
        if frame.kind != Kind.END:
            raise ProtocolError(f"a frame of kind {frame.kind.name} came inside a download")
        transfer.finish()
        return payload_bytes, chunks, serialise_s

    def _make_transfer(self, manifest: DownloadManifest) -> Transfer:
        if manifest.codec != self._wire.name or any(index >= len(self._schema) for index in manifest.tensors):
            raise ProtocolError(f"the server at {self._address} announced a codec or tensors that were not agreed on")
        sizes_bytes = [self._wire.encoded_bytes(self._schema[index].num_elements) for index in manifest.tensors]
        return Transfer(manifest.tensors, sizes_bytes, self._wire.block_bytes)

    def _translated(self, error: Any) -> SpesError:
        """The error that a failed call stands for."""
        code, details = error.code(), error.details()
        if code == grpc.StatusCode.ABORTED:
            return RoundFailed(details)
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            return Refused(details)
        if code == grpc.StatusCode.UNAVAILABLE:
            return Unreachable(f"the server at {self._address} went away or cannot be reached ({details})")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unreachable(f"no server answered at {self._address} within {self._connect_timeout_s:g} s")
        return ProtocolError(f"the call to the server at {self._address} failed: {code.name}: {details}")


class _Outgoing:
    """The messages of one upload, made one at a time as gRPC takes them (in a thread of its own)."""

    def __init__(self, manifest: UploadManifest, payload_of: PayloadOf, chunks: Any, chunk_bytes: int) -> None:
        self._manifest, self._payload_of, self._chunks = manifest, payload_of, chunks
        self._chunk_bytes = chunk_bytes
        self.payload_bytes = 0
        self.framing_bytes = 0
        self.serialise_s = 0.0
        self.error: Exception | None = None
        """What went wrong while encoding: gRPC itself would only say that the call was cancelled."""

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield self._timed(Kind.MANIFEST, to_bytes(self._manifest))
            for tensor in self._manifest.tensors:
                began_s = time.perf_counter()
                payload = self._payload_of(tensor)
                self.serialise_s += time.perf_counter() - began_s
                for offset, length in self._chunks(len(payload), self._chunk_bytes):
                    yield self._timed(Kind.CHUNK, payload[offset : offset + length], tensor, offset)
            yield self._timed(Kind.END, b"")
        except Exception as error:
            self.error = error
            raise

    def _timed(self, kind: Kind, payload: bytes | memoryview, tensor: int = 0, offset: int = 0) -> bytes:
        began_s = time.perf_counter()
        message = frames.pack(kind, payload, tensor=tensor, offset=offset)
        if kind == Kind.CHUNK:
            self.payload_bytes += len(payload)
        self.framing_bytes += len(message) - (len(payload) if kind == Kind.CHUNK else 0)
        self.serialise_s += time.perf_counter() - began_s
        return message


class _Confirmation:
    """A request, and after it, once everything is applied, the confirmation."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._decided = threading.Event()
        self._is_given = False

    def __iter__(self) -> Iterator[bytes]:
        yield self._request
        self._decided.wait()
        if self._is_given:
            yield frames.pack(Kind.CONFIRM)

    def give(self) -> None:
        """Send the confirmation."""
        self._is_given = True
        self._decided.set()

    def withdraw(self) -> None:
        """Send none, if it has not been given."""
        self._decided.set()
