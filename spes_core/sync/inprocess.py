"""A client without a network: calls the server core of the same process, one thread for each node."""

from __future__ import annotations

import threading
import time

import xxhash

from spes_core.errors import Unreachable
from spes_core.sync.client import DownloadReport, PayloadOf, Sink, UploadReport
from spes_core.sync.messages import DownloadRequest, Heartbeat, HeartbeatReply, Hello, UploadManifest, Welcome
from spes_core.sync.parameter_server import ParameterServer


class LocalClient:
    """Gives the same bits as `spes_core.protocol.client.SyncClient`, with no framing and no transfer time."""

    def __init__(self, server: ParameterServer, chunk_bytes: int = 1 << 20) -> None:
        self._server, self._chunk_bytes = server, chunk_bytes
        self._node = -1
        self._session = b""
        self._stop = threading.Event()

    def join(self, hello: Hello) -> Welcome:
        """See `spes_core.sync.client.Client`."""
        welcome = self._server.join(hello)
        self._node, self._session = hello.node, welcome.session
        return welcome

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
        manifest = UploadManifest(
            node=self._node,
            session=self._session,
            round=round,
            step=step,
            tokens=tokens,
            codec=self._server.wire.name,
            tensors=tensors,
            safe_round=safe_round,
        )
        upload = self._server.begin_upload(manifest)
        try:
            whole = xxhash.xxh3_64()
            if not upload.ready.is_complete:
                upload.restart()
            for tensor in tensors:
                payload = payload_of(tensor)
                whole.update(payload)
                if not upload.ready.is_complete:
                    for offset, length in self._server.wire.chunks(len(payload), self._chunk_bytes):
                        upload.add(tensor, offset, payload[offset : offset + length])
            if upload.ready.is_complete and upload.ready.prefix_digest != whole.hexdigest():
                upload.restart()
            receipt = upload.finish()
        finally:
            upload.close()
        elapsed_s = time.perf_counter() - began_s
        return UploadReport(
            payload_bytes=0 if upload.ready.is_complete else receipt.payload_bytes,
            framing_bytes=0,
            serialise_s=elapsed_s,
            transfer_s=0.0,
        )

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        """See `spes_core.sync.client.Client`."""
        return self._receive(DownloadRequest(node=self._node, session=self._session, round=round), sink)

    def snapshot(self, *, round: int, sink: Sink) -> DownloadReport:
        """See `spes_core.sync.client.Client`."""
        return self._receive(
            DownloadRequest(node=self._node, session=self._session, round=round, is_snapshot=True), sink
        )

    def heartbeat(self, step: int) -> HeartbeatReply | None:
        """See `spes_core.sync.client.Client`."""
        return self._server.heartbeat(Heartbeat(node=self._node, session=self._session, step=step))

    def abort(self) -> None:
        """See `spes_core.sync.client.Client`."""
        self._stop.set()
        self._stop = threading.Event()
        self._server.wake()

    def _receive(self, request: DownloadRequest, sink: Sink) -> DownloadReport:
        began_s = time.perf_counter()
        stop = self._stop
        download = self._server.open_download(request, stop.is_set)
        sink.begin(download.manifest)
        for tensor, offset, payload in download.chunks(self._chunk_bytes):
            if stop.is_set():
                raise Unreachable("the download was ended by this node itself")
            sink.write(tensor, offset, payload)
        summary = download.summary()
        download.delivered()
        elapsed_s = time.perf_counter() - began_s
        waited_s = summary.wait_s + summary.aggregate_s + summary.merge_s
        return DownloadReport(
            manifest=download.manifest,
            summary=summary,
            payload_bytes=download.payload_bytes,
            framing_bytes=0,
            serialise_s=max(0.0, elapsed_s - waited_s),
            transfer_s=0.0,
            wait_s=min(elapsed_s, summary.wait_s),
        )
