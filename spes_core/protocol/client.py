"""A node's side of the wire: join, upload what was trained, download what is lacking, through lost connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import grpc

from spes_core.config import RunConfig
from spes_core.errors import Damaged, ProtocolError, SpesError
from spes_core.protocol import frames
from spes_core.protocol.channel import Line, NoServerError
from spes_core.protocol.credentials import OPEN, Credentials
from spes_core.protocol.frames import Kind
from spes_core.protocol.link import Pace
from spes_core.protocol.receiving import Confirmation, Receiving
from spes_core.protocol.retrying import Patience, ended_from_within, is_lost, is_unknown_session, translated
from spes_core.protocol.sending import Attempt, Sending
from spes_core.protocol.translate import from_bytes, to_bytes
from spes_core.sync.client import DownloadReport, PayloadOf, Sink, UploadReport
from spes_core.sync.messages import (
    DownloadRequest,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Receipt,
    Schema,
    UploadManifest,
    UploadReady,
    Welcome,
)
from spes_core.sync.transfer import FORMATS

CONNECT_TIMEOUT_S = 60.0
"""How long `join` waits for a server that does not listen yet."""
_ANSWER_TIMEOUT_S = 30.0
"""How long the answer to one small request may take before it is asked again."""
_CONFIRM_S = 5.0
"""How long a node that has everything tries to say so."""


class SyncClient:
    """One node's connection to the server; implements `spes_core.sync.client.Client`.

    A lost connection is tried again for round.retry_s without progress, and transfers go on where they stopped; also
    when it is the server that was started again, which this client then joins once more by itself.

    Payload bytes are encoded tensors; framing bytes are the frame headers, manifests and summaries around them.
    Requests, receipts and confirmations, some 300 bytes a round, and what gRPC and TCP add are not counted.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        config: RunConfig,
        node: int,
        credentials: Credentials = OPEN,
        *,
        allow_plaintext: bool = False,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        pace: Pace | None = None,
    ) -> None:
        """``address`` is "host:port", or tells it whenever a connection is made. Nothing is sent before `join`.

        ``pace`` is the node's link where it has several connections.
        """
        self._line = Line(address, credentials, allow_plaintext)
        self._node, self._connect_timeout_s, self._token = node, connect_timeout_s, credentials.token
        self._wire, self._chunk_bytes = FORMATS[config.wire.dtype], config.wire.chunk_bytes
        self._retry_s = config.round.retry_s
        self._pace = pace or Pace(config.link)
        self._lock, self._joining = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._calls: list[Any] = []
        self._hello: Hello | None = None
        self._schema: Schema = ()
        self._session = b""
        self._is_uploading, self._announced_in = False, b""
        """Whether an upload is in progress, and the session in which the server has last heard of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def join(self, hello: Hello) -> Welcome:
        """See `spes_core.sync.client.Client`; waits for the server to listen."""
        assert hello.node == self._node
        hello = replace(hello, token=self._token)
        patience, stop = Patience(self._connect_timeout_s), self._stop
        while True:
            try:
                return self._join(hello)
            except (grpc.RpcError, NoServerError) as error:
                self._recover(error, patience, stop, self._session)

    def upload(
        self,
        *,
        round: int,
        step: int,
        tokens: int,
        tensors: tuple[int, ...],
        payload_of: PayloadOf,
        safe_round: int = 0,
    ) -> UploadReport:
        """See `spes_core.sync.client.Client`."""
        began_s = time.perf_counter()
        self._going_on_with(round)
        sending = Sending(tensors, payload_of, self._wire, self._chunk_bytes)
        manifest = UploadManifest(
            node=self._node,
            session=b"",
            round=round,
            step=step,
            tokens=tokens,
            codec=self._wire.name,
            tensors=tensors,
            safe_round=safe_round,
        )
        patience, stop = Patience(self._retry_s), self._stop
        self._is_uploading = True
        try:
            while True:
                session = self._session
                try:
                    self._upload_once(replace(manifest, session=session), sending, patience, stop)
                    break
                except (grpc.RpcError, NoServerError, Damaged) as error:
                    if sending.error is not None:
                        raise sending.error from error
                    self._recover(error, patience, stop, session)
        finally:
            self._is_uploading = False
        return UploadReport(
            payload_bytes=sending.payload_bytes,
            framing_bytes=sending.framing_bytes,
            serialise_s=sending.serialise_s,
            transfer_s=max(0.0, time.perf_counter() - began_s - sending.serialise_s),
            earlier_bytes=sending.earlier_bytes,
        )

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        """See `spes_core.sync.client.Client`."""
        return self._receive(round, sink, is_snapshot=False)

    def snapshot(self, *, round: int, sink: Sink) -> DownloadReport:
        """See `spes_core.sync.client.Client`."""
        return self._receive(round, sink, is_snapshot=True)

    def heartbeat(self, step: int) -> HeartbeatReply | None:
        """See `spes_core.sync.client.Client`."""
        session = self._session
        beat = Heartbeat(node=self._node, session=session, step=step)
        try:
            reply = self._line.connected().heartbeat(to_bytes(beat), timeout=_ANSWER_TIMEOUT_S)
            return from_bytes(HeartbeatReply, reply)
        except grpc.RpcError as error:
            if is_unknown_session(error):
                self._join_again(session)
                return None
            if is_lost(error):
                return None
            raise translated(error, self._line.address) from error
        except NoServerError:
            return None

    def abort(self) -> None:
        """See `spes_core.sync.client.Client`."""
        with self._lock:
            self._stop.set()
            self._stop = threading.Event()
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def close(self) -> None:
        """Close the connection; requests in progress are cancelled."""
        self.abort()
        self._pace.close()
        self._line.close()

    # One attempt

    def _join(self, hello: Hello) -> Welcome:
        welcome = from_bytes(Welcome, self._line.connected().join(to_bytes(hello), timeout=_ANSWER_TIMEOUT_S))
        self._hello, self._schema, self._session = hello, hello.schema, welcome.session
        return welcome

    def _upload_once(
        self, manifest: UploadManifest, sending: Sending, patience: Patience, stop: threading.Event
    ) -> None:
        attempt = Attempt(sending, to_bytes(manifest))
        call = self._begin(self._line.connected().upload, self._pace.outgoing(attempt), stop)
        try:
            ready = from_bytes(UploadReady, self._answer(call, Kind.READY))
            self._announced_in = manifest.session
            if ready.offset_bytes > sending.stored_bytes:
                sending.stored_bytes = ready.offset_bytes
                patience.progress()
            self._pace.turn()
            attempt.go_on(ready)
            from_bytes(Receipt, self._answer(call, Kind.RECEIPT))
            self._pace.turn()
        finally:
            attempt.end()
            self._end(call)

    def _receive(self, round: int, sink: Sink, *, is_snapshot: bool) -> DownloadReport:
        began_s = time.perf_counter()
        self._going_on_with(round)
        receiving = Receiving(sink, self._schema, FORMATS["float32"] if is_snapshot else self._wire)
        patience, confirming, stop = Patience(self._retry_s), Patience(_CONFIRM_S), self._stop
        while True:
            self._wait_announced(stop)
            session = self._session
            request = DownloadRequest(
                node=self._node,
                session=session,
                round=round,
                is_snapshot=is_snapshot,
                offset_bytes=receiving.payload_bytes,
            )
            try:
                self._receive_once(request, receiving, patience, stop)
                break
            except (grpc.RpcError, SpesError) as error:
                if receiving.summary is not None:
                    patience = confirming
                try:
                    self._recover(error, patience, stop, session)
                except SpesError:
                    if receiving.summary is None:
                        raise
                    break  # It has everything; only its confirmation could not be delivered.
        return self._report(receiving, time.perf_counter() - began_s)

    def _receive_once(
        self, request: DownloadRequest, receiving: Receiving, patience: Patience, stop: threading.Event
    ) -> None:
        confirmation = Confirmation(to_bytes(request))
        call = self._begin(self._line.connected().download, iter(confirmation), stop)
        try:
            self._pace.turn()
            receiving.take(self._pace.incoming(call), patience.progress)
            confirmation.give()
            if next(call, None) is not None:
                raise ProtocolError(f"the server at {self._line.address} sent more than it announced")
        finally:
            confirmation.withdraw()
            self._end(call)

    @staticmethod
    def _report(receiving: Receiving, elapsed_s: float) -> DownloadReport:
        manifest, summary = receiving.manifest, receiving.summary
        assert manifest is not None and summary is not None
        left_s = max(0.0, elapsed_s - receiving.serialise_s)
        wait_s = min(summary.wait_s, left_s)
        server_s = summary.aggregate_s + summary.merge_s
        return DownloadReport(
            manifest=manifest,
            summary=summary,
            payload_bytes=receiving.payload_bytes,
            framing_bytes=receiving.framing_bytes,
            serialise_s=receiving.serialise_s,
            transfer_s=max(0.0, left_s - wait_s - server_s),
            wait_s=wait_s,
        )

    # Calls in progress, and what to do when one fails

    def _begin(self, method: Callable[..., Any], messages: Any, stop: threading.Event) -> Any:
        """Start a call that `abort` can end."""
        call = method(messages)
        with self._lock:
            self._calls.append(call)
        if stop.is_set():
            call.cancel()
        return call

    def _end(self, call: Any) -> None:
        call.cancel()
        with self._lock:
            self._calls.remove(call)

    def _answer(self, call: Any, kind: Kind) -> memoryview:
        """The payload of the server's next frame."""
        message = next(call, None)
        if message is None:
            raise ProtocolError(f"the server at {self._line.address} ended an upload without a receipt")
        return frames.unpack(message, kind).payload

    def _wait_announced(self, stop: threading.Event) -> None:
        """A server that was started again must hear of an upload in progress before its result is asked for."""
        while self._is_uploading and self._announced_in != self._session:
            if stop.wait(0.02):
                raise ended_from_within(self._line.address)

    def _going_on_with(self, round: int) -> None:
        """Remember the round, in case the server is started again and must be joined once more."""
        assert self._hello is not None, "join first"
        self._hello = replace(self._hello, round=round)

    def _recover(self, error: Exception, patience: Patience, stop: threading.Event, session: bytes) -> None:
        """Return when the failed call is worth another attempt; raise what it stands for when it is not."""
        address = self._line.address
        if stop.is_set():
            raise ended_from_within(address) from error
        if isinstance(error, NoServerError | Damaged):
            patience.pause(address, str(error), stop)
            return
        if not isinstance(error, grpc.RpcError):
            raise error
        if self._session != session:
            return  # Another thread has joined again meanwhile.
        if is_unknown_session(error):
            patience.pause(address, "the server was started again", stop)
            self._join_again(session)
        elif is_lost(error):
            patience.pause(address, f"{error.code().name}: {error.details()}", stop)
        else:
            raise translated(error, address) from error

    def _join_again(self, session: bytes) -> None:
        """Join a server that was started again, unless another thread has. A lost connection is left to the caller."""
        with self._joining:
            if self._session != session or self._hello is None:
                return
            try:
                self._join(self._hello)
            except NoServerError:
                return
            except grpc.RpcError as error:
                if not is_lost(error):
                    raise translated(error, self._line.address) from error
