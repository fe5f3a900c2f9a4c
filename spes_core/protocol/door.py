"""The door of the server: callers who have not yet proved to be a node of the run may wait there, few and not for long.

What one of them does wrong is recorded under its network address, never in the name of a node that it claims to be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spes_core.errors import ProtocolError, Refused

MOST_RECORDED = 20
"""Refusals of strangers that are recorded in each `RECORDING_S`; more are counted, so that they fill no disk."""
RECORDING_S = 10.0


class Door:
    """Bounds what callers may hold: a thread each, from their call until their first message has come."""

    MAX_WAITING = 8
    """Callers whose first message has not come; one more sends away the one that has waited longest."""
    FIRST_MESSAGE_S = 10.0
    """How long a caller may wait with its first message. An honest one sends it with its call."""

    def __init__(self, refuse: Callable[[int | None, str], Refused]) -> None:
        self._refuse = refuse
        self._lock = threading.Lock()
        self._waiting: dict[Any, threading.Timer] = {}
        self._streams: dict[tuple[int, str], Any] = {}
        self._recorded, self._left_out, self._window_began_s = 0, 0, 0.0

    def first(self, requests: Iterator[bytes], context: Any) -> bytes:
        """The caller's first message. Raises ProtocolError when it sends none."""
        timer = threading.Timer(self.FIRST_MESSAGE_S, self._send_away, (context, f"for {self.FIRST_MESSAGE_S:g} s"))
        timer.daemon = True
        with self._lock:
            oldest = next(iter(self._waiting), None) if len(self._waiting) >= self.MAX_WAITING else None
            self._waiting[context] = timer
        if oldest is not None:
            self._send_away(oldest, f"while {self.MAX_WAITING} others came")
        timer.start()
        try:
            message = next(requests, None)
        finally:
            timer.cancel()
            with self._lock:
                self._waiting.pop(context, None)
        if message is None:
            raise ProtocolError("the call ended before its first message")
        return message

    @contextmanager
    def only(self, node: int, kind: str, context: Any) -> Iterator[None]:
        """While inside, ``context`` is the node's one stream of this kind: an earlier one, left by a connection that
        was lost, is ended."""
        with self._lock:
            earlier = self._streams.get((node, kind))
            self._streams[node, kind] = context
        if earlier is not None:
            earlier.cancel()
        try:
            yield
        finally:
            with self._lock:
                if self._streams.get((node, kind)) is context:
                    del self._streams[node, kind]

    def end_streams(self, node: int) -> None:
        """Another process speaks for the node from now on."""
        with self._lock:
            streams = [context for (owner, _), context in self._streams.items() if owner == node]
        for context in streams:
            context.cancel()

    def refusal(self, reason: str) -> Refused:
        """The refusal of a caller who has proved nothing; ``reason`` names its address."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._window_began_s > RECORDING_S:
                self._window_began_s, self._recorded = now_s, 0
            if is_recorded := self._recorded < MOST_RECORDED:
                self._recorded += 1
                left_out, self._left_out = self._left_out, 0
            else:
                self._left_out += 1
        if not is_recorded:
            return Refused(f"the server refused an unknown sender: {reason}")
        return self._refuse(None, f"{reason}; {left_out} refusals before it were not recorded" if left_out else reason)

    def _send_away(self, context: Any, when: str) -> None:
        with self._lock:
            if self._waiting.pop(context, None) is None:
                return
        self.refusal(f"a call without a first message {when} (from {context.peer()})")
        context.cancel()


def claimed(node: int, context: Any) -> str:
    """How to name a caller that says to be ``node`` and may lie."""
    return f"from {context.peer()}, which says it is node {node}"
