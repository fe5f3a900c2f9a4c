"""The parameter server without its transport: who joined, which round is open, what has been added and delivered.

One thread for each request calls in; all state is guarded by one condition, and everything that waits, waits on it.
The arithmetic itself runs outside the lock: node order gives every region of the buffer one writer at a time.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from spes_core import schedules
from spes_core.config import RunConfig
from spes_core.errors import ProtocolError, Refused, RoundFailed
from spes_core.sync.codec import Values, make_codec
from spes_core.sync.download import Download
from spes_core.sync.global_state import GlobalState
from spes_core.sync.joining import differences
from spes_core.sync.messages import (
    DownloadRequest,
    Hello,
    Schema,
    UploadManifest,
    Welcome,
    make_hello,
)
from spes_core.sync.round import Contribution, Delivery, Round
from spes_core.sync.transfer import Transfer, WireFormat
from spes_core.sync.upload import Upload

OnEvent = Callable[..., None]
"""Called as on_event(kind, **fields), never by two threads at once."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a server has come, beside the global weights: what it stores, and goes on from."""

    round: int
    """Rounds closed."""
    step: int
    """Optimizer steps taken."""
    tokens: int
    """Training tokens of all nodes so far."""
    momentum: Values | None
    """Velocity of the outer optimizer, when it has one."""


FRESH = Standing(round=0, step=0, tokens=0, momentum=None)


class ParameterServer:
    """Takes what each node trained, forms the new global weights, hands out what each node lacks."""

    def __init__(
        self,
        config: RunConfig,
        schema: Schema,
        initial: Callable[[str], Values],
        on_event: OnEvent,
        standing: Standing = FRESH,
        checkpoint_steps: Collection[int] = (),
    ) -> None:
        """``initial(name)`` gives the flat first value of a tensor; the buffers are allocated here, once.

        After each of the ``checkpoint_steps`` no round begins until `wait_finished` has stored the state.
        """
        self._config, self.schema, self._on_event = config, schema, on_event
        self.partition = config.make_partition()
        self._steps = schedules.round_steps(config)
        self.state = GlobalState(schema, config.outer, initial, standing.momentum)
        self._digest = self.state.digest()
        self.codec = make_codec(config.wire.dtype)
        self._condition = threading.Condition()
        self._sessions: dict[int, bytes] = {}
        self._failure: str | None = None
        self._first_round, self._tokens = standing.round, standing.tokens
        self._checkpoint_steps = frozenset(checkpoint_steps)
        self._unsaved: Round | None = None
        self._closed: Round | None = None
        self._open: Round | None = self._make_round(standing.round)

    @property
    def wire(self) -> WireFormat:
        """Sizes of encoded tensors."""
        return self.codec.format

    # Requests of nodes

    def join(self, hello: Hello) -> Welcome:
        """Admit a node, or raise Refused with all that differs. Joining again replaces the node's former process."""
        with self._condition:
            self._check_running()
            if not 0 <= hello.node < self._config.nodes:
                raise self.refuse(hello.node, f"there is no node {hello.node}: this run has {self._config.nodes} nodes")
            if found := differences(hello, make_hello(self._config, self.schema, hello.node)):
                raise self.refuse(hello.node, "this node belongs to another run: " + "; ".join(found))
            self._sessions[hello.node] = session = secrets.token_bytes(16)
            self._on_event("join", node=hello.node)
            self._condition.notify_all()
            return Welcome(
                session=session,
                round=self._open.index if self._open else len(self._steps),
                digest=self._digest,
            )

    def begin_upload(self, manifest: UploadManifest) -> Upload:
        """Accept the announcement of an upload, or raise Refused."""
        node = manifest.node
        with self._condition:
            self._check_running()
            self._check_session(node, manifest.session)
            now = self._open
            if now is None or manifest.round != now.index:
                due = "none: all rounds are done" if now is None else now.index
                raise self.refuse(node, f"it uploads round {manifest.round}; the open round is {due}")
            if reason := self._reason_against(manifest, now):
                raise self.refuse(node, reason)
            if now.started_at_s is None:
                now.started_at_s = time.monotonic()
            part = now.contributions.setdefault(node, Contribution(manifest.tokens))
            return Upload(self, now, manifest, self._supersede(part, manifest))

    def open_download(self, request: DownloadRequest, is_cancelled: Callable[[], bool]) -> Download:
        """Wait until the round closes, then give what the node lacks. Raises Refused or RoundFailed."""
        node = request.node
        with self._condition:
            self._check_running()
            self._check_session(node, request.session)
            now = self._closed if self._closed and self._closed.index == request.round else self._open
            if now is None or now.index != request.round:
                raise self.refuse(node, f"it asks for round {request.round}, which is neither open nor the last closed")
            if node not in now.contributions or not now.contributions[node].is_complete:
                raise self.refuse(node, f"it asks for round {request.round} before its own upload is complete")
            if node in now.deliveries:
                raise self.refuse(node, f"it has confirmed its download of round {request.round} before")
            self.wait(lambda: now.is_closed, is_cancelled)
            return Download(self, now, node, self._tokens, all_changed=self._config.outer.kind != "none")

    def _supersede(self, part: Contribution, manifest: UploadManifest) -> int:
        """Make an earlier, broken upload of the same node let go of the buffer; the number of the new attempt."""
        part.attempt += 1
        attempt = part.attempt
        self._condition.notify_all()
        self.wait(lambda: not part.is_adding, lambda: part.attempt != attempt)
        if part.position == 0:
            part.tokens = manifest.tokens
        elif part.tokens != manifest.tokens:
            first, round = part.tokens, manifest.round
            reason = f"its new attempt at round {round} claims {manifest.tokens} tokens, the first one {first}"
            raise self.refuse(manifest.node, reason)
        return attempt

    def _reason_against(self, manifest: UploadManifest, now: Round) -> str | None:
        """Why an upload into the open round ``now`` cannot be accepted; None when it can."""
        node = manifest.node
        part = now.contributions.get(node)
        if part and part.is_complete:
            return f"it has already uploaded round {now.index}"
        if self._closed and node not in self._closed.deliveries:
            return f"it uploads round {now.index} before it has downloaded round {self._closed.index}"
        if manifest.step != now.step:
            return f"it uploads round {now.index} after step {manifest.step}; the round closes after step {now.step}"
        if not 1 <= manifest.tokens < 1 << 53:
            return f"a weight of {manifest.tokens} tokens is not possible; a round trains at least 1"
        if manifest.codec != self.codec.format.name:
            return f"its codec is {manifest.codec!r}; wire.dtype is {self.codec.format.name!r}"
        if manifest.tensors != self.trained_by(node):
            return "the announced tensors are not the ones that it trains"
        return None

    # What uploads and downloads call back

    def take_turn(self, upload: Upload, previous: tuple[int, ...], end: int) -> float:
        """Wait until the buffer is free and the nodes ``previous`` have passed position ``end``; seconds waited.

        From here to `pass_turn` this upload alone writes its region of the mean.
        """
        part = upload.contribution

        def is_due() -> bool:
            is_free = self._unsaved is None and (self._closed is None or self._closed.is_delivered)
            return is_free and all(upload.round.position(node) >= end for node in previous)

        with self._condition:
            waited_s = self.wait(is_due, upload.is_cancelled)
            self._check_attempt(upload)
            part.is_adding = True
            return waited_s

    def pass_turn(self, upload: Upload, position: int) -> None:
        """All that this node trains below ``position`` is in the mean."""
        with self._condition:
            upload.contribution.position = position
            upload.contribution.is_adding = False
            self._condition.notify_all()

    def complete_upload(self, upload: Upload, framing_bytes: int) -> float:
        """Note that an upload is whole; the one that completes the round also closes it, in the seconds returned."""
        now, part = upload.round, upload.contribution
        with self._condition:
            self._check_running()
            self._check_attempt(upload)
            part.position = self.state.starts[-1]
            part.framing_bytes += framing_bytes
            part.is_complete = True
            is_last = now.is_uploaded
            self._condition.notify_all()
        return self._close(now) if is_last else 0.0

    def _close(self, now: Round) -> float:
        """Form the new global weights and wake the downloads. No other thread touches the buffers meanwhile."""
        began_s = time.monotonic()
        try:
            self.state.adopt_mean()
            adopted_s = time.monotonic()
            if now.is_merged:
                self.state.merge(self._config.merge.num_neighbours, now.alpha)
            merged_s = time.monotonic()
            now.digest = self.state.digest()
        except Exception as error:
            self.fail(f"round {now.index} could not be closed: {error!r}")
            raise
        closed_s = time.monotonic()
        now.merge_s = merged_s - adopted_s
        now.adopt_s = closed_s - began_s - now.merge_s
        with self._condition:
            now.closed_at_s = closed_s
            self._digest = now.digest
            self._tokens += now.weight_of(now.contributions)
            self._closed, self._open = now, self._make_round(now.index + 1)
            self._unsaved = now if now.step in self._checkpoint_steps else None
            self._condition.notify_all()
        return closed_s - began_s

    def complete_download(self, download: Download, framing_bytes: int) -> None:
        """Note that a node has confirmed its download; the last confirmation ends the round."""
        now = download.round
        with self._condition:
            now.deliveries[download.node] = Delivery(download.payload_bytes, framing_bytes)
            if now.is_delivered:
                self._on_event("round", **now.summary(), tokens=self._tokens)
            self._condition.notify_all()

    # The life of the server

    @property
    def is_finished(self) -> bool:
        """Whether every round is closed and delivered."""
        return self._open is None and (self._closed is None or self._closed.is_delivered)

    @property
    def rounds_closed(self) -> int:
        """How many rounds have been closed."""
        return self._closed.index + 1 if self._closed else self._first_round

    def wait_finished(self, save: Callable[[Standing], None] = lambda standing: None) -> None:
        """Wait for the end of the last round, and store the state meanwhile: ``save`` may read it until it returns.

        It is called when a due round has been delivered, while nodes already take their next steps. Raises RoundFailed
        when a round failed or the server was stopped.
        """
        while True:
            with self._condition:
                self.wait(lambda: self.is_finished or self._must_save(), lambda: False)
                now = self._unsaved
                if now is None:
                    return
                momentum = self.state.momentum
                standing = Standing(round=now.index + 1, step=now.step, tokens=self._tokens, momentum=momentum)
            save(standing)
            with self._condition:
                self._unsaved = None
                self._condition.notify_all()

    def _must_save(self) -> bool:
        return self._unsaved is not None and self._unsaved.is_delivered

    def fail(self, reason: str) -> None:
        """End the run: everyone who waits, and every later request, gets ``reason``."""
        with self._condition:
            if self._failure is None:
                self._failure = reason
                self._on_event("failure", reason=reason)
            self._condition.notify_all()

    def refuse(self, node: int | None, reason: str) -> Refused:
        """Record that a request was refused; the caller raises what this returns."""
        with self._condition:
            self._on_event("refusal", node=node, reason=reason)
        sender = "an unknown sender" if node is None else f"node {node}"
        return Refused(f"the server refused {sender}: {reason}")

    def wake(self) -> None:
        """Let every waiting thread look again whether it was cancelled."""
        with self._condition:
            self._condition.notify_all()

    def wait(self, is_ready: Callable[[], bool], is_cancelled: Callable[[], bool]) -> float:
        """Wait, holding the lock, until ``is_ready``; seconds waited.

        Raises RoundFailed when the run has failed or a deadline passes, ProtocolError when the caller went away.
        """
        began_s = time.monotonic()
        while True:
            self._check_running()
            if is_ready():
                return time.monotonic() - began_s
            if is_cancelled():
                raise ProtocolError("the node went away")
            deadline_s, overdue = self._deadline()
            remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                self.fail(overdue)
                continue
            self._condition.wait(None if remaining_s is None else min(remaining_s, threading.TIMEOUT_MAX))

    def trained_by(self, node: int) -> tuple[int, ...]:
        """Indices of the tensors that a node trains."""
        return tuple(i for i, spec in enumerate(self.schema) if self.partition.trains(node, spec.name))

    def transfer(self, tensors: tuple[int, ...]) -> Transfer:
        """The order of chunks of these tensors."""
        wire = self.codec.format
        sizes_bytes = [wire.encoded_bytes(self.schema[index].num_elements) for index in tensors]
        return Transfer(tensors, sizes_bytes, wire.block_bytes)

    def _make_round(self, index: int) -> Round | None:
        if index >= len(self._steps):
            return None
        previous_step = self._steps[index - 1] if index else 0
        step = self._steps[index]
        alpha = schedules.due_merge_alpha(self._config.merge, previous_step, step)
        return Round(index, step, alpha, self._config.nodes)

    def _deadline(self) -> tuple[float | None, str]:
        """The monotonic time at which what is awaited is overdue, and what to say then."""
        for now in (self._closed, self._open):
            if now and (overdue := now.deadline(self._config.round.timeout_s)):
                return overdue
        return None, ""

    def _check_running(self) -> None:
        if self._failure is not None:
            raise RoundFailed(self._failure)

    def _check_attempt(self, upload: Upload) -> None:
        if upload.contribution.attempt != upload.attempt:
            raise self.refuse(upload.node, f"it has begun its upload of round {upload.round.index} again")

    def _check_session(self, node: int, session: bytes) -> None:
        if node not in self._sessions:
            raise self.refuse(node, "it has not joined this run")
        if not secrets.compare_digest(self._sessions[node], session):
            raise self.refuse(node, f"another process has joined as node {node} since")
