"""The state of one round: who has contributed how much so far. Plain Python, no lock of its own, no tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import xxhash


@dataclass
class Contribution:
    """What one node has put into the mean of the open round."""

    tokens: int
    position: int = 0
    """All values that this node trains below this position of the flat global buffer are in the mean."""
    payload_bytes: int = 0
    framing_bytes: int = 0
    aggregate_s: float = 0.0
    is_complete: bool = False
    is_adding: bool = False
    """Whether a thread is writing this node's values into the mean right now."""
    attempt: int = 0
    """Number of the upload that may continue this contribution; an earlier one is dead."""
    hasher: Any = field(default_factory=xxhash.xxh3_64)
    """Running checksum of the bytes that are in the mean: what a second attempt must begin with."""


@dataclass
class Delivery:
    """What one node has received of the closed round."""

    payload_bytes: int = 0
    framing_bytes: int = 0


@dataclass
class Round:
    """A round from its opening to its last delivery."""

    index: int
    step: int
    """Optimizer steps taken when it closes."""
    alpha: float
    """Weight of the merge at its close; 0 for none."""
    num_nodes: int
    started_at_s: float | None = None
    """Monotonic time of the first upload."""
    closed_at_s: float | None = None
    """Monotonic time at which the new global weights were ready."""
    contributions: dict[int, Contribution] = field(default_factory=dict)
    deliveries: dict[int, Delivery] = field(default_factory=dict)
    adopt_s: float = 0.0
    merge_s: float = 0.0
    digest: str = ""

    def position(self, node: int) -> int:
        """Position of a node's contribution; 0 before it begins."""
        return self.contributions[node].position if node in self.contributions else 0

    def weight_of(self, nodes: Iterable[int]) -> int:
        """Tokens of several nodes together; each has begun its contribution."""
        return sum(self.contributions[node].tokens for node in nodes)

    @property
    def is_merged(self) -> bool:
        """Whether experts are merged when it closes."""
        return self.alpha > 0

    @property
    def is_uploaded(self) -> bool:
        """Whether every node's upload is complete."""
        return sum(part.is_complete for part in self.contributions.values()) == self.num_nodes

    @property
    def is_closed(self) -> bool:
        """Whether the new global weights are ready."""
        return self.closed_at_s is not None

    @property
    def is_delivered(self) -> bool:
        """Whether every node has what it lacked."""
        return len(self.deliveries) == self.num_nodes

    def deadline(self, timeout_s: float) -> tuple[float, str] | None:
        """The monotonic time at which this round is overdue, and what to say then; None while nothing is awaited.

        Uploads are awaited from the first one on, deliveries from the close on, each for ``timeout_s``.
        """
        if self.closed_at_s is not None and not self.is_delivered:
            what = f"the result of round {self.index} was not fetched by all within round.timeout_s ({timeout_s:g})"
            return self.closed_at_s + timeout_s, f"{what}: {self._missing_deliveries()}"
        if self.started_at_s is not None and not self.is_uploaded:
            what = f"round {self.index} was not complete within round.timeout_s ({timeout_s:g})"
            return self.started_at_s + timeout_s, f"{what}: {self._missing_uploads()}"
        return None

    def summary(self) -> dict[str, Any]:
        """The fields of the "round" event of a delivered round, apart from the tokens so far."""
        uploads = [self.contributions[node] for node in range(self.num_nodes)]
        deliveries = [self.deliveries[node] for node in range(self.num_nodes)]
        assert self.started_at_s is not None
        return {
            "round": self.index,
            "step": self.step,
            "merged": self.is_merged,
            "alpha": self.alpha,
            "aggregate_s": sum(part.aggregate_s for part in uploads) + self.adopt_s,
            "merge_s": self.merge_s,
            "round_time_s": time.monotonic() - self.started_at_s,
            "uplink_payload_bytes": {node: part.payload_bytes for node, part in enumerate(uploads)},
            "uplink_framing_bytes": {node: part.framing_bytes for node, part in enumerate(uploads)},
            "downlink_payload_bytes": {node: part.payload_bytes for node, part in enumerate(deliveries)},
            "downlink_framing_bytes": {node: part.framing_bytes for node, part in enumerate(deliveries)},
            "digest": self.digest,
        }

    def _missing_uploads(self) -> str:
        parts = []
        for node in range(self.num_nodes):
            if node not in self.contributions:
                parts.append(f"node {node} has not uploaded")
            elif not self.contributions[node].is_complete:
                parts.append(f"node {node} has not finished its upload")
        return "; ".join(parts)

    def _missing_deliveries(self) -> str:
        missing = [node for node in range(self.num_nodes) if node not in self.deliveries]
        return "; ".join(f"node {node} has not downloaded" for node in missing)
