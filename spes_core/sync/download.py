"""What one node lacks of a closed round, while it is being sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spes_core.partition import downloads
from spes_core.sync.messages import DownloadManifest
from spes_core.sync.round import Round

if TYPE_CHECKING:
    from spes_core.sync.parameter_server import ParameterServer


class Download:
    """Manifest and data; the global weights stay as they are until every node has confirmed."""

    def __init__(self, server: ParameterServer, now: Round, node: int, tokens: int, *, all_changed: bool) -> None:
        self._server, self.round, self.node = server, now, node
        self.payload_bytes = 0
        self.manifest = DownloadManifest(
            round=now.index,
            step=now.step,
            tokens=tokens,
            codec=server.codec.format.name,
            tensors=tuple(
                index
                for index, spec in enumerate(server.schema)
                if downloads(server.partition, node, spec.name, experts_changed=now.is_merged, all_changed=all_changed)
            ),
            merged=now.is_merged,
            aggregate_s=now.adopt_s,
            merge_s=now.merge_s,
            digest=now.digest,
        )

    def payload(self, tensor: int) -> memoryview:
        """The encoded tensor: memory of the server, not to be changed."""
        payload = self._server.codec.encode(self._server.state.tensor(tensor))
        self.payload_bytes += len(payload)
        return payload

    def delivered(self, framing_bytes: int = 0) -> None:
        """The node has confirmed that it applied everything."""
        self._server.complete_download(self, framing_bytes)
