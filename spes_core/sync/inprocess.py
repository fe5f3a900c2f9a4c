"""A client without a network: calls the server core of the same process, one thread for each node."""

from __future__ import annotations

import time

from spes_core.sync.client import DownloadReport, PayloadOf, Sink, UploadReport
from spes_core.sync.messages import DownloadRequest, Hello, UploadManifest, Welcome
from spes_core.sync.parameter_server import ParameterServer


class LocalClient:
    """Gives the same bits as `spes_core.protocol.client.SyncClient`, with no framing and no transfer time."""

    def __init__(self, server: ParameterServer) -> None:
        self._server = server
        self._node = -1
        self._session = b""

    def join(self, hello: Hello) -> Welcome:
        """See `spes_core.sync.client.Client`."""
        welcome = self._server.join(hello)
        self._node, self._session = hello.node, welcome.session
        return welcome

    def upload(
        self, *, round: int, step: int, tokens: int, tensors: tuple[int, ...], payload_of: PayloadOf
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
        )
        upload = self._server.begin_upload(manifest)
        for tensor in tensors:
            upload.add(tensor, 0, payload_of(tensor))
        receipt = upload.finish()
        elapsed_s = time.perf_counter() - began_s
        return UploadReport(
            payload_bytes=receipt.payload_bytes,
            framing_bytes=0,
            serialise_s=max(0.0, elapsed_s - receipt.blocked_s - receipt.aggregate_s - receipt.close_s),
            transfer_s=0.0,
            wait_s=receipt.blocked_s,
            aggregate_s=receipt.aggregate_s,
        )

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        """See `spes_core.sync.client.Client`."""
        began_s = time.perf_counter()
        request = DownloadRequest(node=self._node, session=self._session, round=round)
        download = self._server.open_download(request, lambda: False)
        opened_s = time.perf_counter()
        manifest = download.manifest
        sink.begin(manifest)
        for tensor in manifest.tensors:
            sink.write(tensor, 0, download.payload(tensor))
        download.delivered()
        return DownloadReport(
            manifest=manifest,
            payload_bytes=download.payload_bytes,
            framing_bytes=0,
            serialise_s=time.perf_counter() - opened_s,
            transfer_s=0.0,
            wait_s=max(0.0, opened_s - began_s - manifest.aggregate_s - manifest.merge_s),
        )
