"""The state of one round: who has contributed how much, who takes part, how far its result is. No lock, no tensors."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from spes_core.partition import Partition
from spes_core.sync.journal import Decision, Segment


@dataclass
class Contribution:
    """What one node has uploaded into a round."""

    tokens: int
    tensors: tuple[int, ...]
    next_tensor: int = 0
    """Every tensor below this index that the node trains is stored."""
    payload_bytes: int = 0
    framing_bytes: int = 0
    store_s: float = 0.0
    digest: str = ""
    """Of the whole upload."""
    is_complete: bool = False
    completed_at_s: float = 0.0
    """Monotonic time."""
    attempt: int = 0
    """Number of the upload that may go on with this contribution; an earlier one is dead."""
    is_writing: bool = False
    """Whether a thread is storing a chunk right now."""


@dataclass
class Delivery:
    """What one node has received of a round."""

    payload_bytes: int = 0
    framing_bytes: int = 0


@dataclass
class Round:
    """A round from its opening until it is forgotten."""

    index: int
    step: int
    """Optimizer steps taken when it closes."""
    alpha: float
    """Weight of the merge at its close; 0 for none."""
    partition: Partition
    """Who trains what in it."""
    absent: tuple[int, ...] = ()
    """Nodes whose experts others train in it."""
    started_at_s: float | None = None
    """Monotonic time of the first upload."""
    decision: Decision | None = None
    """Who takes part, once that is known."""
    groups_begun: int = 0
    """Groups of tensors whose uploads are being read, or have been."""
    segments: list[Segment | None] = field(default_factory=list)
    """By tensor, as far as groups are done: where its encoded change lies."""
    closed_at_s: float | None = None
    """Monotonic time at which the new global weights were ready."""
    last_upload_at_s: float = 0.0
    """Monotonic time at which the last upload that takes part was whole."""
    contributions: dict[int, Contribution] = field(default_factory=dict)
    deliveries: dict[int, Delivery] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    """Nodes that have fetched all weights after it."""
    tokens: int = 0
    """Training tokens of all nodes in all rounds up to this one; set when it closes."""
    aggregate_s: float = 0.0
    merge_s: float = 0.0
    digest: str = ""
    is_recorded: bool = False
    """Whether its event is written."""

    @property
    def is_merged(self) -> bool:
        """Whether experts are merged when it closes."""
        return self.alpha > 0

    @property
    def is_closed(self) -> bool:
        """Whether the new global weights are ready."""
        return self.closed_at_s is not None

    @property
    def begun(self) -> set[int]:
        """Nodes that have begun their upload."""
        return set(self.contributions)

    @property
    def complete(self) -> list[int]:
        """Nodes whose upload is whole, ascending."""
        return sorted(node for node, part in self.contributions.items() if part.is_complete)

    @property
    def is_delivered(self) -> bool:
        """Whether everyone who takes part has its result."""
        return self.decision is not None and all(node in self.deliveries for node in self.decision.nodes)

    @property
    def waited_for(self) -> list[int]:
        """Nodes that do not yet have its outcome: of those that take part, and of those in quarantine."""
        if self.decision is None:
            return []
        missing = [node for node in self.decision.nodes if node not in self.deliveries]
        return missing + [node for node in self.decision.quarantined if node not in self.returned]

    def has_passed(self, node: int, tensor: int) -> bool:
        """Whether all that ``node`` trains up to and including ``tensor`` is stored."""
        part = self.contributions.get(node)
        return part is not None and (part.is_complete or part.next_tensor > tensor)

    def missing_uploads(self, nodes: int) -> str:
        """Who has not uploaded, in words."""
        parts = []
        for node in range(nodes):
            if node not in self.contributions:
                parts.append(f"node {node} has not uploaded")
            elif not self.contributions[node].is_complete:
                parts.append(f"node {node} has not finished its upload")
        return "; ".join(parts)

    def missing_deliveries(self) -> str:
        """Who has not fetched the result, in words."""
        return "; ".join(f"node {node} has not downloaded" for node in self.waited_for)

    def summary(self) -> dict[str, Any]:
        """The fields of the "round" event of a closed round."""
        assert self.decision is not None and self.closed_at_s is not None
        nodes = self.decision.nodes
        sent = sorted({*nodes, *(node for node in self.decision.quarantined if node in self.contributions)})
        uploads = {node: self.contributions[node] for node in sent}
        deliveries = {node: self.deliveries.get(node, Delivery()) for node in nodes}
        began_s = self.closed_at_s if self.started_at_s is None else self.started_at_s
        return {
            "round": self.index,
            "step": self.step,
            "nodes": list(nodes),
            "quarantined": list(self.decision.quarantined),
            "merged": self.is_merged,
            "alpha": self.alpha,
            "aggregate_s": self.aggregate_s,
            "merge_s": self.merge_s,
            "round_time_s": time.monotonic() - began_s,
            "uplink_payload_bytes": {node: part.payload_bytes for node, part in uploads.items()},
            "uplink_framing_bytes": {node: part.framing_bytes for node, part in uploads.items()},
            "downlink_payload_bytes": {node: part.payload_bytes for node, part in deliveries.items()},
            "downlink_framing_bytes": {node: part.framing_bytes for node, part in deliveries.items()},
            "digest": self.digest,
            "tokens": self.tokens,
        }
