"""The rounds of a run: the open one, those whose results are still kept, and how both come back after a restart."""

from __future__ import annotations

import time
from dataclasses import dataclass

from spes_core import schedules
from spes_core.config import RunConfig
from spes_core.sync.codec import Values
from spes_core.sync.journal import Decision, Journal, ResultRecord
from spes_core.sync.members import Members
from spes_core.sync.monitor import OnEvent
from spes_core.sync.round import Contribution, Round


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a server has come, beside the global weights: what it stores, and goes on from."""

    round: int
    """Rounds closed."""
    step: int
    """Optimizer steps taken."""
    tokens: int
    """Training tokens of all nodes so far."""
    absences: tuple[int, ...] = ()
    """By node: rounds missed in a row; empty for none."""
    momentum: Values | None = None
    """Velocity of the outer optimizer, when it has one."""
    residual: Values | None = None
    """What a codec with error feedback has not yet told of the global weights."""


FRESH = Standing(round=0, step=0, tokens=0)


class Ledger:
    """No lock of its own."""

    def __init__(
        self, config: RunConfig, journal: Journal, members: Members, standing: Standing, on_event: OnEvent
    ) -> None:
        """Takes up what the journal has of the rounds from ``standing`` on, and the results of those before it."""
        self._config, self.journal, self._members, self._on_event = config, journal, members, on_event
        self.steps = schedules.round_steps(config)
        """The steps after which rounds close."""
        self.first_round, self.tokens = standing.round, standing.tokens
        self.known_rounds = standing.round
        """Rounds that an earlier process has closed: those after the checkpoint are formed again."""
        self.kept: dict[int, Round] = {}
        """Closed rounds whose results can still be fetched."""
        members.set_absences(standing.absences or (0,) * len(members.nodes))
        self._recall()
        self.open = self._make(standing.round, members.absent([member.absences for member in members.nodes]))
        """The open round; None when all are closed."""

    @property
    def rounds_closed(self) -> int:
        """How many rounds have been closed."""
        return len(self.steps) if self.open is None else self.open.index

    def find(self, index: int) -> Round | None:
        """A round that is open or kept."""
        return self.open if self.open is not None and self.open.index == index else self.kept.get(index)

    def close(self, now: Round, decision: Decision) -> None:
        """Take note that the open round has its result, and open the next one."""
        assert now is self.open
        self.tokens = now.tokens
        self._members.set_absences(decision.absences)
        self.kept[now.index] = now
        self.open = self._make(now.index + 1, decision.absent)

    def prune(self, before: int) -> None:
        """Forget the rounds below ``before``, on the disk too."""
        for index in [index for index in self.kept if index < before]:
            del self.kept[index]
        self.journal.prune(before)

    def _make(self, index: int, absent: tuple[int, ...]) -> Round | None:
        if index >= len(self.steps):
            return None
        previous_step, step = self.steps[index - 1] if index else 0, self.steps[index]
        alpha = schedules.due_merge_alpha(self._config.merge, previous_step, step)
        now = Round(index, step, alpha, self._members.partition(absent), absent)
        now.decision = self.journal.decision(index)
        for node in range(self._config.nodes):
            if part := self._stored(index, node):
                now.contributions[node] = part
        if now.contributions:
            now.started_at_s = time.monotonic()
        return now

    def _stored(self, index: int, node: int) -> Contribution | None:
        """A whole upload that an earlier process stored; a damaged one is dropped, and sent again."""
        record = self.journal.upload(index, node)
        if record is None:
            return None
        file = self.journal.open_upload(index, node)
        is_whole = file.digest == record.digest
        if not is_whole:
            file.cut(0)
        file.close()
        if not is_whole:
            self._on_event("damaged", node=node, round=index, file=str(self.journal.path(index) / file.name))
            return None
        return Contribution(
            record.tokens,
            record.tensors,
            payload_bytes=record.payload_bytes,
            framing_bytes=record.framing_bytes,
            digest=record.digest,
            is_complete=True,
            completed_at_s=time.monotonic(),
        )

    def _recall(self) -> None:
        """Bring back the results of rounds before the checkpoint, and drop what cannot follow it."""
        for index in self.journal.rounds():
            record, decision = self.journal.result(index), self.journal.decision(index)
            if index < self.first_round and record is not None and decision is not None:
                self.kept[index] = self._recalled(index, record, decision)
        while self.journal.result(self.known_rounds) is not None:
            self.known_rounds += 1
        gap = self.first_round
        while self.journal.decision(gap) is not None:
            gap += 1
        self.journal.discard(since=gap + 1)

    def _recalled(self, index: int, record: ResultRecord, decision: Decision) -> Round:
        previous_step, step = self.steps[index - 1] if index else 0, self.steps[index]
        alpha = schedules.due_merge_alpha(self._config.merge, previous_step, step)
        now = Round(index, step, alpha, self._members.partition(decision.absent_before), decision.absent_before)
        for node in range(self._config.nodes):
            if stored := self.journal.upload(index, node):
                now.contributions[node] = Contribution(
                    stored.tokens,
                    stored.tensors,
                    payload_bytes=stored.payload_bytes,
                    framing_bytes=stored.framing_bytes,
                    digest=stored.digest,
                    is_complete=True,
                )
        now.decision, now.segments, now.tokens, now.digest = (
            decision,
            list(record.segments),
            record.tokens,
            record.digest,
        )
        now.aggregate_s, now.merge_s, now.closed_at_s = record.aggregate_s, record.merge_s, time.monotonic()
        now.last_upload_at_s, now.is_recorded = now.closed_at_s, True
        return now
