"""What one node lacks of a round, or all of the global weights, while it is being sent: read from the round's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from spes_core.sync.journal import RoundReader, Segment
from spes_core.sync.messages import DownloadManifest, RoundSummary
from spes_core.sync.round import Round

if TYPE_CHECKING:
    from spes_core.sync.parameter_server import ParameterServer


class Download:
    """Manifest, chunks, summary. Used by one thread."""

    def __init__(
        self,
        server: ParameterServer,
        now: Round,
        node: int,
        manifest: DownloadManifest,
        is_cancelled: Callable[[], bool],
        snapshot: Sequence[Segment] | None = None,
    ) -> None:
        """``snapshot`` gives the place of every tensor, where not the round's result is sent but all weights are."""
        self._server, self.round, self.node, self.manifest = server, now, node, manifest
        self.is_cancelled, self._snapshot = is_cancelled, snapshot
        self.payload_bytes = 0

    @property
    def is_snapshot(self) -> bool:
        """Whether this sends all weights."""
        return self._snapshot is not None

    def chunks(self, chunk_bytes: int) -> Iterator[tuple[int, int, memoryview]]:
        """(tensor, offset, payload) of each chunk, as soon as it is ready; a payload is valid until the next one.

        Raises StaleRound when the run has gone on so far meanwhile that the round's files are gone.
        """
        wire = self._server.exact_wire if self.is_snapshot else self._server.wire
        reader = RoundReader(self._server.journal.path(self.round.index))
        buffer = memoryview(bytearray(max(chunk_bytes, wire.block_bytes)))
        try:
            for tensor in self.manifest.tensors:
                segment = self._segment(tensor)
                for offset, length in wire.chunks(segment.length, chunk_bytes):
                    payload = buffer[:length]
                    reader.read_into(segment.file, segment.offset + offset, payload)
                    self.payload_bytes += length
                    yield tensor, offset, payload
                self._server.heard_of(self.node)
        except FileNotFoundError as error:
            raise self._server.forgotten(self) from error
        finally:
            reader.close()

    def summary(self) -> RoundSummary:
        """How the round went; waits for its close."""
        return self._server.summarise(self)

    def delivered(self, framing_bytes: int = 0) -> None:
        """The node has confirmed that it applied everything."""
        self._server.complete_download(self, framing_bytes)

    def _segment(self, tensor: int) -> Segment:
        if self._snapshot is not None:
            return self._snapshot[tensor]
        segment = self._server.wait_for_tensor(self.round, tensor, self.is_cancelled)
        assert segment is not None, "a tensor was announced that the round does not change"
        return segment
