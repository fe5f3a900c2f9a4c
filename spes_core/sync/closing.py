"""How rounds end: who takes part, when the new weights are formed, what is stored, and when waiting is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from spes_core.config import RunConfig
from spes_core.errors import RoundFailed, Unencodable
from spes_core.schedules import validation_steps
from spes_core.sharding import Group, groups_of
from spes_core.sync.aggregation import Aggregation, Inputs, Lengths, lengths
from spes_core.sync.codec import Codec
from spes_core.sync.global_state import GlobalState
from spes_core.sync.journal import Decision, ResultRecord
from spes_core.sync.ledger import Ledger, Standing
from spes_core.sync.members import Members
from spes_core.sync.messages import Schema
from spes_core.sync.monitor import Monitor
from spes_core.sync.robust import clip_scales, needs_lengths, quarantined
from spes_core.sync.round import Round
from spes_core.sync.similarity import mean_similarity

_TICK_S = 0.2
"""How often it is asked whether time alone has changed something."""


class Closing:
    """Used by one thread, which forms the weights of all rounds one after another.

    With quorum 1.0 a round's values are formed while uploads still come in, once every node has begun its own; the
    order of nodes, not that of arrival, decides every bit. Otherwise they are formed when it is known who takes part.
    """

    def __init__(
        self,
        config: RunConfig,
        schema: Schema,
        state: GlobalState,
        codec: Codec,
        monitor: Monitor,
        ledger: Ledger,
        members: Members,
        checkpoint_steps: Collection[int],
    ) -> None:
        self._config, self._schema, self._state, self._codec = config, schema, state, codec
        self._monitor, self._ledger, self._members = monitor, ledger, members
        self._checkpoint_steps = frozenset(checkpoint_steps)
        self._validation_steps = frozenset(validation_steps(config))
        self._saved_round = ledger.first_round
        self.groups = groups_of([spec.name for spec in schema])
        self.is_forming = False
        """Whether the global weights are partly those of the next round."""
        self.readers = 0
        """Threads that copy the global weights; none are formed meanwhile."""
        self.progress_at_s = time.monotonic()
        """When a node last repeated an old round: deadlines count from there."""

    def run(self, save: Callable[[Standing], None]) -> None:
        """Close every round, then wait until all who took part in the last one have its result.

        ``save`` stores the state after each due round. Raises RoundFailed when a round fails or the server is stopped.
        """
        while (now := self._ledger.open) is not None:
            try:
                self._close(now, save)
            except Unencodable as error:
                reason = f"round {now.index} cannot be told to the nodes: {error}"
                self._monitor.fail(reason)
                raise RoundFailed(reason) from error
            except RoundFailed as error:
                self._monitor.fail(str(error))
                raise
            except Exception as error:
                # Whoever waits for this thread must not wait for ever.
                self._monitor.fail(f"round {now.index} could not be closed: {error!r}")
                raise
        self._wait_delivered()

    # Forming the weights of one round

    def _close(self, now: Round, save: Callable[[Standing], None]) -> None:
        decision = self._decide(now)
        with self._monitor:
            self._monitor.wait(lambda: self.readers == 0)
            self.is_forming = True
        parts = {node: now.contributions[node] for node in decision.nodes}
        scales = self._scales(now, decision)
        inputs = Inputs(
            round=now.index,
            partition=now.partition,
            tokens={node: part.tokens for node, part in parts.items()},
            tensors={node: part.tensors for node, part in parts.items()},
            scales=scales,
            alpha=now.alpha,
        )
        forming = Aggregation(self._config, self._schema, self._state, self._codec, self._ledger.journal, inputs)
        try:
            for group in self.groups:
                self._wait_stored(now, group)
                forming.form(group)
                with self._monitor:
                    now.segments = forming.segments
                    self._monitor.wake()
        finally:
            forming.close()
        with self._monitor:
            # The last values may be in before the last upload has said its end.
            self._wait_open(now, lambda: all(part.is_complete for part in parts.values()))
            now.last_upload_at_s = max(part.completed_at_s for part in parts.values())
        now.aggregate_s, now.merge_s, now.digest = forming.aggregate_s, forming.merge_s, forming.digest()
        now.tokens = self._ledger.tokens + sum(part.tokens for part in parts.values())
        self._publish(now, decision, save)

    def _publish(self, now: Round, decision: Decision, save: Callable[[Standing], None]) -> None:
        record = ResultRecord(
            tokens=now.tokens,
            digest=now.digest,
            segments=tuple(now.segments),
            aggregate_s=now.aggregate_s,
            merge_s=now.merge_s,
        )
        former = self._ledger.journal.result(now.index)
        if former is not None and former.digest != now.digest:
            raise RoundFailed(
                f"round {now.index} gave other weights than before the server was restarted (digest {now.digest}, then"
                f" {former.digest}): this machine does not repeat its own arithmetic, or a stored file was changed"
            )
        self._ledger.journal.finish(now.index, record)
        with self._monitor:
            now.closed_at_s = time.monotonic()
            self._record_former(now.index)
            self._ledger.close(now, decision)
            self._monitor.wake()
        if now.step in self._validation_steps:
            # Before the checkpoint: who goes on from there never closes this round again.
            self._record_experts(now)
        if now.step in self._checkpoint_steps:
            if not now.is_recorded:
                # Who goes on from here has no other word of this round; one with the deliveries may follow.
                self._monitor.record("round", **now.summary())
            save(self._standing(now, decision))
            self._saved_round = now.index + 1
        with self._monitor:
            self.is_forming = False
            self._prune()
            self._monitor.wake()

    def _record_experts(self, now: Round) -> None:
        """Tell how alike the experts of each layer are, where the global model is validated.

        Nodes fetch the round meanwhile; only this thread changes the values, and here it reads them. Costs about
        E²·P/2·layers multiply-adds for each validation (E experts of P input-projection values), as much as the
        comparing of one merge.
        """
        layers = [group.layer for group in self.groups if group.layer is not None and len(group.tensors) > 2]
        if layers:
            similarity = [mean_similarity(self._state.bank(layer, "gate_up")) for layer in layers]
            self._monitor.record("experts", round=now.index, step=now.step, layers=layers, similarity=similarity)

    def _standing(self, now: Round, decision: Decision) -> Standing:
        return Standing(
            round=now.index + 1,
            step=now.step,
            tokens=now.tokens,
            absences=decision.absences,
            momentum=self._state.momentum,
            residual=self._state.residual,
        )

    def _prune(self) -> None:
        """Drop what no restart of anyone needs."""
        closed, config = self._ledger.rounds_closed, self._config
        if config.round.quorum < 1.0 or not self._checkpoint_steps:
            safe = min((now.index for now in self._ledger.kept.values() if not now.is_delivered), default=closed)
            safe = max(min(safe, closed - 1), closed - 2)
        else:
            safe = self._members.safe_round
        if self._checkpoint_steps:
            safe = min(safe, self._saved_round)
        self._ledger.prune(safe)

    def _wait_stored(self, now: Round, group: Group) -> None:
        """Wait until everyone who takes part has sent all that belongs to a group."""
        assert now.decision is not None
        nodes, last = now.decision.nodes, group.tensors[-1]
        with self._monitor:
            self._wait_open(now, lambda: all(now.has_passed(node, last) for node in nodes))
            now.groups_begun += 1

    # Who takes part

    def _decide(self, now: Round) -> Decision:
        with self._monitor:
            if now.decision is None:
                self._wait_open(now, lambda: self._may_decide(now))
                taking_part = self._taking_part(now)
            else:
                # Decided before a restart: those who had only begun their upload begin it again.
                taking_part = now.decision.nodes
                self._wait_open(now, lambda: now.begun.issuperset(taking_part))
        if now.decision is None:
            left_out = self._quarantined(now, taking_part)
            nodes = tuple(node for node in taking_part if node not in left_out)
            absences = self._members.count_absences(nodes)
            absent = self._members.absent(absences)
            if len(absent) == len(absences):
                absent = ()
            decision = Decision(
                nodes=nodes, quarantined=left_out, absent_before=now.absent, absent=absent, absences=absences
            )
            self._ledger.journal.decide(now.index, decision)
            with self._monitor:
                now.decision = decision
                for node in left_out:
                    self._monitor.record("quarantine", node=node, round=now.index)
                self._monitor.wake()
        assert now.decision is not None
        return now.decision

    @property
    def _is_elastic(self) -> bool:
        return self._config.round.quorum < 1.0

    def _may_decide(self, now: Round) -> bool:
        if not self._is_elastic:
            if needs_lengths(self._config.aggregate):
                return len(now.complete) == self._config.nodes
            return len(now.begun) == self._config.nodes
        complete = set(now.complete)
        if len(complete) < self._members.needed:
            return False
        return complete.issuperset(self._members.live) or self._is_overdue(now)

    def _taking_part(self, now: Round) -> tuple[int, ...]:
        return tuple(now.complete) if self._is_elastic else tuple(sorted(now.begun))

    def _quarantined(self, now: Round, nodes: tuple[int, ...]) -> tuple[int, ...]:
        factor = self._config.aggregate.quarantine_factor
        if factor is None:
            return ()
        found = self._lengths(now, nodes)
        return tuple(nodes[place] for place in quarantined(found.shared, factor, found.own))

    def _scales(self, now: Round, decision: Decision) -> dict[int, float] | None:
        if self._config.aggregate.rule != "clipped":
            return None
        found = self._lengths(now, decision.nodes)
        scales = clip_scales(found.shared, self._config.aggregate.clip_factor)
        return dict(zip(decision.nodes, scales, strict=True))

    def _lengths(self, now: Round, nodes: tuple[int, ...]) -> Lengths:
        tensors = {node: now.contributions[node].tensors for node in nodes}
        return lengths(self._schema, self._state, self._codec, self._ledger.journal, now.index, tensors)

    # The end of waiting

    def _wait_open(self, now: Round, is_ready: Callable[[], bool]) -> None:
        """Wait for uploads, holding the lock. Raises RoundFailed, by name, when too few come in time."""

        def check() -> bool:
            if is_ready():
                return True
            self._check_time(now)
            return False

        self._monitor.wait(check, tick_s=_TICK_S)

    def _check_time(self, now: Round) -> None:
        timeout_s = self._config.round.timeout_s
        if self._is_overdue(now):
            missing = now.missing_uploads(self._config.nodes)
            raise RoundFailed(
                f"round {now.index} was not complete within round.timeout_s ({timeout_s:g}): {missing}"
                + (f"; round.quorum needs {self._members.needed} nodes" if self._is_elastic else "")
            )
        heard_s = self._members.last_heard_at_s
        longest_s = timeout_s + self._config.round.lost_after_s
        if heard_s is not None and time.monotonic() - max(heard_s, self.progress_at_s) > longest_s:
            raise RoundFailed(
                f"no node has been heard of for {longest_s:g} s (round.timeout_s + round.lost_after_s) in round"
                f" {now.index}; start all processes again: they go on from what is stored"
            )

    def _is_overdue(self, now: Round) -> bool:
        if now.started_at_s is None:
            return False
        return time.monotonic() - max(now.started_at_s, self.progress_at_s) > self._config.round.timeout_s

    def _wait_delivered(self) -> None:
        """Wait until everyone who took part in the last round has its result."""
        with self._monitor:
            last = self._ledger.kept.get(len(self._ledger.steps) - 1)
            if last is None or last.decision is None:
                return
            timeout_s, since_s = self._config.round.timeout_s, last.closed_at_s or 0.0

            def is_over() -> bool:
                if not last.waited_for:
                    return True
                is_late = time.monotonic() - max(since_s, self.progress_at_s) > timeout_s
                if self._is_elastic:
                    return is_late or not any(self._members.is_live(node) for node in last.waited_for)
                if is_late:
                    what = f"the result of round {last.index} was not fetched within round.timeout_s ({timeout_s:g})"
                    raise RoundFailed(f"{what}: {last.missing_deliveries()}")
                return False

            try:
                self._monitor.wait(is_over, tick_s=_TICK_S)
            except RoundFailed as error:
                self._monitor.fail(str(error))
                raise
            self._record_former(len(self._ledger.steps))

    def _record_former(self, before: int) -> None:
        """Write the events of closed rounds that not everyone has fetched."""
        for index in sorted(self._ledger.kept):
            former = self._ledger.kept[index]
            if index < before and not former.is_recorded:
                former.is_recorded = True
                self._monitor.record("round", **former.summary())
