"""Who has joined a run, who has been heard of lately, and who trains what while some are away."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil

from spes_core.config import RoundConfig
from spes_core.partition import Partition, reassigned


@dataclass
class Member:
    """What is known about one node."""

    session: bytes = b""
    """Proof of the process that joined last; empty before the first one."""
    heard_at_s: float = 0.0
    """Monotonic time of its last sign of life."""
    step: int = 0
    """Optimizer steps that it last told of."""
    round: int = -1
    """The round that it last joined for or uploaded."""
    safe_round: int = 0
    """Results of rounds below this one it will never ask for again."""
    absences: int = 0
    """Rounds that it has missed in a row."""


class Members:
    """The nodes of a run. No lock of its own."""

    def __init__(self, partition: Partition, policy: RoundConfig) -> None:
        self.base, self._policy = partition, policy
        self.nodes = [Member() for _ in range(partition.num_nodes)]

    def admit(self, node: int, round: int) -> bytes:
        """A new session of a node; the former one ends."""
        member = self.nodes[node]
        member.session, member.round = secrets.token_bytes(16), round
        self.hear(node)
        return member.session

    def owns_session(self, node: int, session: bytes) -> bool:
        """Whether a request comes from the process that joined last as this node."""
        known = self.nodes[node].session
        return bool(known) and secrets.compare_digest(known, session)

    def hear(self, node: int) -> None:
        """Note a sign of life."""
        self.nodes[node].heard_at_s = time.monotonic()

    def is_live(self, node: int) -> bool:
        """Whether a node has joined and has been heard of within round.lost_after_s."""
        member = self.nodes[node]
        return bool(member.session) and time.monotonic() - member.heard_at_s <= self._policy.lost_after_s

    @property
    def live(self) -> list[int]:
        """The live nodes, ascending."""
        return [node for node in range(len(self.nodes)) if self.is_live(node)]

    @property
    def needed(self) -> int:
        """How many uploads a round needs to close."""
        # Shares such as 0.7 of 10 nodes must not become 8 by a rounding error.
        return max(1, ceil(self._policy.quorum * len(self.nodes) - 1e-9))

    @property
    def last_heard_at_s(self) -> float | None:
        """Monotonic time of the last sign of life of any node; None before the first."""
        times = [member.heard_at_s for member in self.nodes if member.session]
        return max(times, default=None)

    @property
    def safe_round(self) -> int:
        """The round below which no node will ask for anything."""
        return min(member.safe_round for member in self.nodes)

    def count_absences(self, present: Collection[int]) -> tuple[int, ...]:
        """Absences in a row of each node after a round in which ``present`` took part."""
        return tuple(0 if node in present else member.absences + 1 for node, member in enumerate(self.nodes))

    def set_absences(self, absences: Sequence[int]) -> None:
        """Take over what `count_absences` gave."""
        for member, count in zip(self.nodes, absences, strict=True):
            member.absences = count

    def absent(self, absences: Sequence[int]) -> tuple[int, ...]:
        """The nodes whose experts others train from the next round on."""
        after = self._policy.reassign_after
        if self._policy.quorum == 1.0 or after == 0:
            return ()
        return tuple(node for node, count in enumerate(absences) if count >= after)

    def partition(self, absent: Collection[int]) -> Partition:
        """Who trains what while some nodes are absent."""
        return reassigned(self.base, absent)
