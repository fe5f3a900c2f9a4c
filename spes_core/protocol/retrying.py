"""What a failed call means for a node: an error to raise, or a lost connection to try again after a pause."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc

from spes_core.errors import ProtocolError, Refused, RoundFailed, SpesError, StaleRound, Unreachable

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

CLOSED_AT_ONCE = (
    "A server with certificates closes connections like this one when the caller has none, or one that is not of the"
    " same `credentials` command: see `credentials` in run.json."
)
_LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS,
)
# What gRPC says of a connection that was cut in the middle of a call, depending on where.
_LOST_WORDS = ("RST_STREAM", "Stream removed", "Socket closed", "Connection reset", "GOAWAY")
_FOREIGN_WORDS = ("CERTIFICATE", "SSL_ERROR", "Hostname Verification", "handshake", "WRONG_VERSION_NUMBER")


class Patience:
    """How long a node goes on trying: with pauses of 0.1 s, then twice as long each time, up to 5 s; none is random."""

    def __init__(self, limit_s: float) -> None:
        """``limit_s``: longest time without progress."""
        self._limit_s = limit_s
        self._lost_at_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def progress(self) -> None:
        """The connection works."""
        if self._lost_at_s is not None:
            self._lost_at_s, self._pause_s = None, FIRST_PAUSE_S

    def pause(self, address: str, reason: str, stop: threading.Event) -> None:
        """Wait before the next attempt. Raises Unreachable when there have been enough, or ``stop`` is set."""
        now_s = time.monotonic()
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        left_s = self._lost_at_s + self._limit_s - now_s
        if left_s <= 0:
            hint = f" {CLOSED_AT_ONCE}" if "Socket closed" in reason else ""
            raise Unreachable(
                f"the server at {address} cannot be reached, after trying for {now_s - self._lost_at_s:.1f} s"
                f" ({reason}); see whether it runs and what its log says, start it again, then this node: both go on"
                f" from what they have stored.{hint}"
            )
        if stop.wait(min(self._pause_s, left_s)):
            raise ended_from_within(address)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


def ended_from_within(address: str) -> Unreachable:
    """What a transfer raises that another thread of this process has ended."""
    return Unreachable(f"the transfer with the server at {address} was ended by this node itself")


def is_lost(error: Any) -> bool:
    """Whether a failed call says no more than that the connection was lost."""
    code, details = error.code(), str(error.details())
    if code == grpc.StatusCode.UNAVAILABLE:
        return not _is_foreign(details)
    cut = code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and any(word in details for word in _LOST_WORDS)
    return code in _LOST or cut


def is_unknown_session(error: Any) -> bool:
    """Whether the server was started again since this node joined."""
    return bool(error.code() == grpc.StatusCode.NOT_FOUND)


def translated(error: Any, address: str) -> SpesError:
    """The error that a failed call stands for."""
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.ABORTED:
        return RoundFailed(details)
    if code == grpc.StatusCode.OUT_OF_RANGE:
        return StaleRound(details)
    if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.NOT_FOUND):
        return Refused(details)
    if is_lost(error):
        hint = f" {CLOSED_AT_ONCE}" if "Socket closed" in str(details) else ""
        return Unreachable(f"no server answers at {address} ({details}).{hint}")
    if code == grpc.StatusCode.UNAVAILABLE:
        return Unreachable(
            f"the server at {address} and this node do not accept each other's encryption ({details}); both need"
            " certificates of the same `python -m spes_core.server credentials` command, and the server's must name"
            " the host that this node calls"
        )
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"what listens at {address} is no SPES server, or one of another release ({details})")
    return ProtocolError(f"the call to the server at {address} failed: {code.name}: {details}")


def _is_foreign(details: str) -> bool:
    """Whether an attempt to connect failed for its encryption, which no repetition mends."""
    return any(word.lower() in details.lower() for word in _FOREIGN_WORDS)
