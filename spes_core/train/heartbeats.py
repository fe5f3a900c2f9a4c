"""Signs of life of a node, from a thread of its own: local steps may take longer than a server waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from spes_core.errors import SpesError


class Heartbeats:
    """While active, calls ``beat(step())`` every ``interval_s`` in a daemon thread.

    What goes wrong in it is left to the next round to say: a node whose server is away for a while goes on training.
    """

    def __init__(self, beat: Callable[[int], object], interval_s: float, step: Callable[[], int]) -> None:
        self._beat, self._interval_s, self._step = beat, interval_s, step
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            try:
                self._beat(self._step())
            except SpesError:
                continue
