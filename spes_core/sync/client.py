"""What an exchange needs of its connection to the server, whatever carries it, and what it learns from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spes_core.sync.messages import DownloadManifest, Hello, Welcome

PayloadOf = Callable[[int], memoryview]
"""The encoded tensor with this index; asked for in canonical order, and valid until the next one is asked for."""


class Sink(Protocol):
    """Where a download goes."""

    def begin(self, manifest: DownloadManifest) -> None:
        """The announcement, before any data; may raise ProtocolError to refuse it."""

    def write(self, tensor: int, offset: int, payload: memoryview) -> None:
        """The next chunk: ``payload`` lies ``offset`` bytes into the encoded ``tensor``; valid during the call."""


@dataclass(frozen=True, kw_only=True)
class UploadReport:
    """Bytes and times of one upload; the times do not overlap."""

    payload_bytes: int
    framing_bytes: int
    """Frame headers and manifest."""
    serialise_s: float
    transfer_s: float
    wait_s: float
    """How long the server let it wait for other nodes."""
    aggregate_s: float


@dataclass(frozen=True, kw_only=True)
class DownloadReport:
    """Bytes and times of one download; the times do not overlap."""

    manifest: DownloadManifest
    payload_bytes: int
    framing_bytes: int
    """Frame headers and manifest."""
    serialise_s: float
    """Checking and copying into place."""
    transfer_s: float
    wait_s: float
    """Until the round closed, without the server's own work."""


class Client(Protocol):
    """One node's connection."""

    def join(self, hello: Hello) -> Welcome:
        """Take part. Raises Refused with the difference, or Unreachable."""

    def upload(
        self, *, round: int, step: int, tokens: int, tensors: tuple[int, ...], payload_of: PayloadOf
    ) -> UploadReport:
        """Send the tensors of a round. Raises Refused, RoundFailed or Unreachable."""

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        """Wait for the round to close and receive what this node lacks. Raises as `upload` does, or ProtocolError."""
