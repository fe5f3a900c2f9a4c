"""The one lock of a server, what waits on it, and how a run ends that cannot go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from spes_core.errors import ProtocolError, Refused, RoundFailed

OnEvent = Callable[..., None]
"""Called as on_event(kind, **fields), never by two threads at once."""


class Monitor:
    """A condition, the reason why the run failed, and the record of what happens. Usable with `with`."""

    def __init__(self, on_event: OnEvent) -> None:
        self._condition, self._on_event = threading.Condition(threading.RLock()), on_event
        self.failure: str | None = None
        """Why the run cannot go on; None while it can."""
        self.last_refusal: dict[str, Any] | None = None

    def __enter__(self) -> Monitor:
        self._condition.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._condition.release()

    def wait(
        self,
        is_ready: Callable[[], bool],
        is_cancelled: Callable[[], bool] = lambda: False,
        tick_s: float | None = None,
    ) -> None:
        """Wait, holding the lock, until ``is_ready``; with ``tick_s`` it is asked at least so often.

        Raises RoundFailed when the run has failed, ProtocolError when the caller went away.
        """
        while True:
            self.check_running()
            if is_ready():
                return
            if is_cancelled():
                raise ProtocolError("the node went away")
            self._condition.wait(tick_s)

    def wake(self) -> None:
        """Let every waiting thread look again."""
        with self._condition:
            self._condition.notify_all()

    def check_running(self) -> None:
        """Raises RoundFailed when the run has failed."""
        if self.failure is not None:
            raise RoundFailed(self.failure)

    def fail(self, reason: str) -> None:
        """End the run: everyone who waits, and every later request, gets ``reason``."""
        with self._condition:
            if self.failure is None:
                self.failure = reason
                self._on_event("failure", reason=reason)
            self._condition.notify_all()

    def refuse(self, node: int | None, reason: str) -> Refused:
        """Record that a request was refused; the caller raises what this returns."""
        with self._condition:
            self.last_refusal = {"node": node, "reason": reason, "time_s": time.time()}
            self._on_event("refusal", node=node, reason=reason)
        sender = "an unknown sender" if node is None else f"node {node}"
        return Refused(f"the server refused {sender}: {reason}")

    def record(self, kind: str, **fields: Any) -> None:
        """Record an event."""
        with self._condition:
            self._on_event(kind, **fields)
