"""Where the wall time of a node goes: seconds by phase, and total."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

Phase = Literal["compute", "data", "serialise", "transfer", "wait", "merge", "aggregate", "validate", "checkpoint"]
PHASES: tuple[Phase, ...] = (
    "compute",
    "data",
    "serialise",
    "transfer",
    "wait",
    "merge",
    "aggregate",
    "validate",
    "checkpoint",
)


class Clock:
    """Adds up seconds by phase. Phases do not nest."""

    def __init__(self, seconds: Mapping[str, float] | None = None, wall_s: float = 0.0) -> None:
        """A process that resumes gives what its clock showed when the checkpoint was stored."""
        self.seconds: dict[Phase, float] = {phase: (seconds or {}).get(phase, 0.0) for phase in PHASES}
        self._started = time.perf_counter() - wall_s

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
        """Seconds since the run began, without those in which it stood still or that a resume has undone."""
        return time.perf_counter() - self._started
