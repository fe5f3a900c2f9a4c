"""What a running trial says about itself while it runs: one small record, handed to a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The newest state of a trial, taken from its event files."""

    trial: str
    """Name of the trial."""
    step: int
    """Optimizer steps taken; 0 before the first training event."""
    total_steps: int
    """Optimizer steps that the trial takes."""
    loss_nats: float | None
    """Mean training cross-entropy since the previous training event; None before the first."""
    tokens_per_s: float | None
    """Training tokens per second over all nodes; None before the first training event."""
    round: int
    """Rounds completed."""
    elapsed_s: float
    """Seconds since the trial was started, or started again."""
    resumed_at_step: int = 0
    """The step of the checkpoint that it goes on from; 0 when it began anew."""

    @property
    def remaining_s(self) -> float | None:
        """Expected seconds to the last step at the mean pace since the start; None before the first step."""
        taken = self.step - self.resumed_at_step
        return self.elapsed_s / taken * (self.total_steps - self.step) if taken > 0 else None


OnProgress = Callable[[Progress], None]
