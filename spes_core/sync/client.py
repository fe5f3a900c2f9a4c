"""What an exchange needs of its connection to the server, whatever carries it, and what it learns from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spes_core.sync.messages import DownloadManifest, HeartbeatReply, Hello, RoundSummary, Welcome

PayloadOf = Callable[[int], memoryview]
"""The encoded tensor with this index, valid until the next one is asked for.

Asked for in canonical order, every tensor at least once, in a thread of the client's. When a connection was lost it is
asked again from the tensor on in which what the server has stored ends, and must then give the same bytes. Where the
server has lost what it had stored, it is asked from the first tensor on: a node that has already adopted results of the
round can then only refuse.
"""


class Sink(Protocol):
    """Where a download goes."""

    def begin(self, manifest: DownloadManifest) -> None:
        """The announcement, before any data; may raise ProtocolError to refuse it. Called once, resumed or not."""

    def write(self, tensor: int, offset: int, payload: memoryview) -> None:
        """The next chunk: ``payload`` lies ``offset`` bytes into the encoded ``tensor``; valid during the call."""


@dataclass(frozen=True, kw_only=True)
class UploadReport:
    """Bytes and times of one upload; the times do not overlap."""

    payload_bytes: int
    """Encoded bytes that were sent, those sent twice after a cut counted twice."""
    framing_bytes: int
    """Frame headers and manifests."""
    serialise_s: float
    transfer_s: float
    """Sending and storing, also time in which the connection was lost."""
    earlier_bytes: int = 0
    """Encoded bytes of this upload that an earlier process of the node sent: it died with its record of the round."""


@dataclass(frozen=True, kw_only=True)
class DownloadReport:
    """Bytes and times of one download; the times do not overlap."""

    manifest: DownloadManifest
    summary: RoundSummary
    payload_bytes: int
    framing_bytes: int
    """Frame headers and manifest."""
    serialise_s: float
    """Checking, decoding and copying into place."""
    transfer_s: float
    wait_s: float
    """Waiting for the other nodes."""


class Client(Protocol):
    """One node's connection. An upload and the download of the same round may run in two threads at once."""

    def join(self, hello: Hello) -> Welcome:
        """Take part. Raises Refused with the difference, or Unreachable."""

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
        """Send the tensors of a round, going on where a lost connection stopped. ``payload_of`` is asked for every
        tensor, sent or not. Raises Refused, StaleRound, RoundFailed or Unreachable.
        """

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        """Receive what this node lacks of a round, while it closes. Raises as `upload` does, or ProtocolError."""

    def snapshot(self, *, round: int, sink: Sink) -> DownloadReport:
        """Receive all global weights with which the open round ``round`` begins, as exact float32."""

    def heartbeat(self, step: int) -> HeartbeatReply | None:
        """Tell that this node lives; None when the server cannot be reached."""

    def abort(self) -> None:
        """End uploads and downloads in progress in other threads; they raise Unreachable."""
