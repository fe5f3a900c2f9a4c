"""Where the wall time of a node goes: seconds by phase, and total."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["compute", "data", "serialise", "transfer", "wait", "merge", "aggregate", "validate"]
PHASES: tuple[Phase, ...] = (
    "compute",
    "data",
    "serialise",
    "transfer",
    "wait",
    "merge",
    "aggregate",
    "validate",
)


class Clock:
    """Adds up seconds by phase. Phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Count the time of the block under ``phase``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started

    def add(self, phase: Phase, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        self.seconds[phase] += seconds

    def wall_s(self) -> float:
        """Seconds since this clock was made."""
        return time.perf_counter() - self._started
