"""Pacing: a node slows its own connection down to the link that the run describes, on one machine and without root.

Each direction is a line that carries one message after another. A message is handed on when the line would have
carried its last byte, so short and long transfers take equally exact times, whatever the buffers of gRPC and the kernel
swallow: they run ahead only on the server's side, which thinks an answer delivered a few megabytes early.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from spes_core.config import LinkConfig
from spes_core.link import rate_bytes_per_s

AHEAD_BYTES = 1 << 20
"""What a socket's buffers hold: the line goes on for so many bytes while a process encodes or copies."""
_PRESENT_S = 0.005
"""A message that comes within so long (and 5 ns a byte) of being asked for had been there before."""


class Pace:
    """The two directions of one node's link; any number of streams share them. Does nothing unless emulate is set."""

    def __init__(
        self,
        link: LinkConfig,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """``clock`` and ``sleep`` are for tests."""
        self._rtt_s = link.rtt_ms / 1e3 if link.emulate else 0.0
        self._closed = threading.Event()
        self._clock, self._sleep = clock, sleep or self._closed.wait
        self._up, self._down = (
            _Line(rate_bytes_per_s(link, direction)) if link.emulate else None for direction in ("up", "down")
        )

    def outgoing(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        """The messages, each handed on when the uplink has carried it."""
        for message in messages:
            self.sent(len(message))
            yield message

    def incoming(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """The messages of a stream, each handed on when the downlink has carried it."""
        while True:
            asked_s = self._clock()
            message = next(messages, None)
            if message is None:
                return
            self.received(len(message), self._clock() - asked_s)
            yield message

    def turn(self) -> None:
        """Call once for each request that an answer is waited for: takes one round trip."""
        if self._rtt_s:
            self._sleep(self._rtt_s)
        for line in (self._up, self._down):
            if line is not None:
                line.rest(self._clock())

    def sent(self, num_bytes: int) -> None:
        """Call before a message is sent: returns when the uplink has carried it."""
        if self._up is not None:
            self._until(self._up.carry(num_bytes, self._clock()))

    def received(self, num_bytes: int, waited_s: float = 0.0) -> None:
        """Call when a message has come, ``waited_s`` after it was asked for: returns when the downlink has carried it.

        A message that was there when it was asked for had been under way while the node was busy; one that was not
        cannot have been on the line before now.
        """
        if self._down is None:
            return
        now_s = self._clock()
        if waited_s > _PRESENT_S + 5e-9 * num_bytes:
            self._down.rest(now_s)
        self._until(self._down.carry(num_bytes, now_s))

    def close(self) -> None:
        """From now on nothing waits."""
        self._closed.set()

    def _until(self, due_s: float) -> None:
        if (left_s := due_s - self._clock()) > 0:
            self._sleep(left_s)


class _Line:
    """One direction: when it will have carried all that was given to it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def rest(self, now_s: float) -> None:
        """Nothing was there to carry until now."""
        with self._lock:
            self._free_s = max(self._free_s, now_s)

    def carry(self, num_bytes: int, now_s: float) -> float:
        """When the line has carried these bytes too."""
        with self._lock:
            began_s = max(self._free_s, now_s - AHEAD_BYTES / self._bytes_per_s)
            self._free_s = began_s + num_bytes / self._bytes_per_s
            return self._free_s
