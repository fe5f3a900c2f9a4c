"""One download as a node receives it: what has been applied over all attempts, so that nothing is applied twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from spes_core.errors import ProtocolError
from spes_core.protocol import frames
from spes_core.protocol.frames import HEADER_BYTES, Kind
from spes_core.protocol.translate import from_bytes
from spes_core.sync.client import Sink
from spes_core.sync.messages import DownloadManifest, RoundSummary, Schema
from spes_core.sync.transfer import Transfer, WireFormat


class Receiving:
    """Passes chunks to a sink, each byte once, whatever number of attempts it takes."""

    def __init__(self, sink: Sink, schema: Schema, wire: WireFormat) -> None:
        self._sink, self._schema, self._wire = sink, schema, wire
        self.manifest: DownloadManifest | None = None
        self.summary: RoundSummary | None = None
        self.payload_bytes = 0
        self.framing_bytes = 0
        self.serialise_s = 0.0
        self._transfer: Transfer | None = None

    def take(self, messages: Iterator[bytes], on_progress: Callable[[], None]) -> None:
        """Read one attempt up to its end, which carries the summary. Raises ProtocolError, or what the sink raises."""
        message = _next(messages)
        transfer = self._begin(from_bytes(DownloadManifest, frames.unpack(message, Kind.MANIFEST).payload))
        self.framing_bytes += len(message)
        on_progress()
        while True:
            message = _next(messages)
            began_s = time.perf_counter()
            frame = frames.unpack(message)
            if frame.kind != Kind.CHUNK:
                break
            transfer.accept(frame.tensor, frame.offset, len(frame.payload))
            self._sink.write(frame.tensor, frame.offset, frame.payload)
            self.payload_bytes += len(frame.payload)
            self.framing_bytes += HEADER_BYTES
            self.serialise_s += time.perf_counter() - began_s
            on_progress()
        if frame.kind != Kind.END:
            raise ProtocolError(f"the server sent a frame of kind {frame.kind.name} inside a download")
        transfer.finish()
        self.framing_bytes += len(message)
        self.summary = from_bytes(RoundSummary, frame.payload)

    def _begin(self, manifest: DownloadManifest) -> Transfer:
        if self.manifest is None or self._transfer is None:
            if manifest.codec != self._wire.name:
                raise ProtocolError(f"the server announced codec {manifest.codec!r}, {self._wire.name!r} was agreed on")
            if any(index >= len(self._schema) for index in manifest.tensors):
                raise ProtocolError("the server announced tensors that are not in the schema")
            sizes_bytes = [self._wire.encoded_bytes(self._schema[index].num_elements) for index in manifest.tensors]
            self._sink.begin(manifest)
            self.manifest = manifest
            self._transfer = Transfer(manifest.tensors, sizes_bytes, self._wire.block_bytes)
        elif manifest != self.manifest:
            raise ProtocolError(
                f"the server began round {manifest.round} again with another announcement than before the connection"
                " was lost; what was received cannot be completed"
            )
        return self._transfer


def _next(messages: Iterator[bytes]) -> bytes:
    message = next(messages, None)
    if message is None:
        raise ProtocolError("the server ended a download before its end")
    return message


class Confirmation:
    """A request, and after it, once everything is applied, the confirmation."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._is_decided = threading.Event()
        self._is_given = False

    def __iter__(self) -> Iterator[bytes]:
        yield frames.pack(Kind.REQUEST, self._request)
        self._is_decided.wait()
        if self._is_given:
            yield frames.pack(Kind.CONFIRM)

    def give(self) -> None:
        """Send the confirmation."""
        self._is_given = True
        self._is_decided.set()

    def withdraw(self) -> None:
        """Send none, if it has not been given."""
        self._is_decided.set()
