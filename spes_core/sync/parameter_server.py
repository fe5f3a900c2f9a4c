"""The parameter server without its transport: requests of nodes, and what they find of the run.

One thread for each request calls in, and one thread is in `ParameterServer.run`: it alone decides when a round closes
and forms new weights (`closing`). All state is guarded by one lock (`monitor`); files are written and values are formed
outside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spes_core.config import RunConfig, digest
from spes_core.errors import ProtocolError, RoundFailed, StaleRound
from spes_core.partition import changes, downloads
from spes_core.sync.closing import Closing
from spes_core.sync.codec import Values, make_codec
from spes_core.sync.download import Download
from spes_core.sync.global_state import GlobalState
from spes_core.sync.joining import differences
from spes_core.sync.journal import Journal, Segment, UploadRecord
from spes_core.sync.ledger import FRESH, Ledger, Standing
from spes_core.sync.members import Members
from spes_core.sync.messages import (
    ANY_ROUND,
    DownloadManifest,
    DownloadRequest,
    Heartbeat,
    HeartbeatReply,
    Hello,
    RoundSummary,
    Schema,
    UploadManifest,
    Welcome,
    make_hello,
)
from spes_core.sync.monitor import Monitor, OnEvent
from spes_core.sync.round import Contribution, Delivery, Round
from spes_core.sync.status import status_of
from spes_core.sync.transfer import FORMATS, Transfer, WireFormat
from spes_core.sync.upload import Upload

_SNAPSHOT_FILE = "snapshot"


class ParameterServer:
    """Stores what each node trained, forms the new global weights, hands out what each node lacks."""

    exact_wire = FORMATS["float32"]
    """How snapshots travel."""

    def __init__(
        self,
        config: RunConfig,
        schema: Schema,
        initial: Callable[[str], Values],
        on_event: OnEvent,
        folder: Path,
        standing: Standing = FRESH,
        checkpoint_steps: Collection[int] = (),
    ) -> None:
        """``initial(name)`` gives the flat first value of a tensor; the buffers are allocated here, once.

        ``folder`` takes uploads and results; what it has from ``standing`` on is taken up. After each of the
        ``checkpoint_steps`` `run` stores the state.
        """
        self._config, self.schema = config, schema
        self.codec = make_codec(config.wire.dtype)
        self.journal = Journal(folder, digest(config))
        self._monitor = Monitor(on_event)
        self._members = Members(config.make_partition(), config.round)
        self._ledger = Ledger(config, self.journal, self._members, standing, self._monitor.record)
        self.state = GlobalState(
            schema,
            config.outer,
            initial,
            has_residual=self.codec.has_feedback,
            momentum=standing.momentum,
            residual=standing.residual,
        )
        self._first_digest = self.state.digest()
        self._closing = Closing(
            config, schema, self.state, self.codec, self._monitor, self._ledger, self._members, checkpoint_steps
        )
        self.wake, self.fail, self.refuse = self._monitor.wake, self._monitor.fail, self._monitor.refuse

    @property
    def wire(self) -> WireFormat:
        """Sizes of encoded tensors."""
        return self.codec.format

    def run(self, save: Callable[[Standing], None] = lambda standing: None) -> None:
        """See `Closing.run`: returns when every round is closed and delivered."""
        self._closing.run(save)

    # Requests of nodes

    def join(self, hello: Hello, is_cancelled: Callable[[], bool] = lambda: False) -> Welcome:
        """Admit a node, or raise Refused with all that differs. Joining again replaces the node's former process.

        Raises StaleRound when it asks for a round whose result is no longer kept, or that went on without it, and
        ProtocolError when the caller went away: a call that it has given up must not replace the one that follows.
        """
        with self._monitor:
            self._monitor.check_running()
            if not 0 <= hello.node < self._config.nodes:
                raise self.refuse(hello.node, f"there is no node {hello.node}: this run has {self._config.nodes} nodes")
            if found := differences(hello, make_hello(self._config, self.schema, hello.node)):
                raise self.refuse(hello.node, "this node belongs to another run: " + "; ".join(found))
            # A server that was started again first forms the rounds again that its nodes have gone beyond.
            formed = min(hello.round, self._ledger.known_rounds)
            self._monitor.wait(lambda: self._ledger.rounds_closed >= formed, is_cancelled)
            if is_cancelled():
                raise ProtocolError("the node went away")
            first = self._first_round_of(hello)
            session = self._members.admit(hello.node, first)
            self._closing.progress_at_s = time.monotonic()
            self._monitor.record("join", node=hello.node, round=first)
            self._monitor.wake()
            return Welcome(
                session=session,
                round=first,
                digest=self._digest_before(first),
                experts=self._experts(hello.node, first),
            )

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Note that a node lives. Raises Refused when it has not joined, RoundFailed when the run has failed."""
        with self._monitor:
            self._monitor.check_running()
            self._check_session(beat.node, beat.session)
            self._members.nodes[beat.node].step = beat.step
            return HeartbeatReply(round=self._ledger.rounds_closed)

    def begin_upload(self, manifest: UploadManifest) -> Upload:
        """Accept the announcement of an upload. Raises Refused, or StaleRound when the round is over without it."""
        node = manifest.node
        with self._monitor:
            self._monitor.check_running()
            self._check_session(node, manifest.session)
            now = self._round_of(node, manifest.round)
            part = now.contributions.get(node)
            if now.decision is not None and node not in now.decision.nodes:
                raise self._stale(node, now.index)
            if reason := self._reason_against(manifest, now, part):
                raise self.refuse(node, reason)
            member = self._members.nodes[node]
            member.round, member.safe_round = now.index, max(member.safe_round, manifest.safe_round)
            if now.started_at_s is None:
                now.started_at_s = time.monotonic()
            if part is None:
                part = now.contributions[node] = Contribution(manifest.tokens, manifest.tensors)
            part.attempt += 1
            attempt = part.attempt
            self._monitor.wake()
            if part.is_complete:
                self._closing.progress_at_s = time.monotonic()
                return Upload(self, now, manifest, attempt, None)
            # An earlier, broken attempt lets go of the file first.
            self._monitor.wait(lambda: not part.is_writing, lambda: part.attempt != attempt)
            if reason := self._reason_against(manifest, now, part):
                raise self.refuse(node, reason)  # what is true now: others went on meanwhile
            part.tokens, part.is_writing = manifest.tokens, True
        try:
            # Outside the lock: what an earlier attempt has stored is read and hashed here.
            with self.storing():
                return Upload(self, now, manifest, attempt, self.journal.open_upload(now.index, node))
        finally:
            with self._monitor:
                part.is_writing = False
                self._monitor.wake()

    def open_download(self, request: DownloadRequest, is_cancelled: Callable[[], bool]) -> Download:
        """What a node lacks of a round, or a snapshot. Waits until it is known who takes part.

        Raises Refused, RoundFailed, or StaleRound when the round went on without the node.
        """
        node = request.node
        if request.is_snapshot:
            return self._open_snapshot(request, is_cancelled)
        with self._monitor:
            self._monitor.check_running()
            self._check_session(node, request.session)
            now = self._round_of(node, request.round)
            if node not in now.contributions:
                raise self.refuse(node, f"it asks for round {request.round} before it has begun its own upload")
            self._monitor.wait(lambda: now.decision is not None, is_cancelled)
            assert now.decision is not None
            if node not in now.decision.nodes:
                raise self._stale(node, now.index)
            return Download(self, now, node, self._manifest(now, node), is_cancelled)

    def status(self) -> dict[str, Any]:
        """Where the run stands, in plain data."""
        with self._monitor:
            return status_of(self._config, self._ledger, self._members, self._monitor)

    # What uploads and downloads call back

    def begin_chunk(self, upload: Upload) -> None:
        """A chunk is about to be stored. Raises when this upload may not go on."""
        with self._monitor:
            self._monitor.check_running()
            self._check_upload(upload)
            upload.contribution.is_writing = True

    def begin_restart(self, upload: Upload) -> None:
        """What an upload has stored is about to be dropped. Raises Refused when it may have entered the new weights."""
        with self._monitor:
            self._monitor.check_running()
            self._check_upload(upload)
            now, part = upload.round, upload.contribution
            if part.is_complete or now.groups_begun:
                raise self.refuse(
                    upload.node,
                    f"it repeats its upload of round {now.index} with other values than before, and the first ones have"
                    " been used; it must join anew, from a snapshot",
                )
            part.is_writing, part.next_tensor = True, 0

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Around what is stored: where that fails everyone learns why at once, not only the node that sent it."""
        try:
            yield
        except RoundFailed as error:
            self.fail(str(error))
            raise
        except OSError as error:
            reason = self.journal.failed(error)
            self.fail(str(reason))
            raise reason from error

    def end_chunk(self, upload: Upload, next_tensor: int) -> None:
        """A chunk is stored; all that the node trains below ``next_tensor`` is."""
        with self._monitor:
            part = upload.contribution
            part.is_writing = False
            if next_tensor != part.next_tensor or part.attempt != upload.attempt:
                part.next_tensor = next_tensor
                self._members.hear(upload.node)
                self._monitor.wake()

    def complete_upload(self, upload: Upload, record: UploadRecord) -> None:
        """Note that an upload is whole."""
        with self._monitor:
            self._monitor.check_running()
            self._check_upload(upload)
            with self.storing():
                self.journal.finish_upload(upload.round.index, upload.node, record)
            part = upload.contribution
            part.payload_bytes, part.framing_bytes = record.payload_bytes, record.framing_bytes
            part.digest, part.is_complete, part.completed_at_s = record.digest, True, time.monotonic()
            self._members.hear(upload.node)
            self._monitor.wake()

    def wait_for_tensor(self, now: Round, tensor: int, is_cancelled: Callable[[], bool]) -> Segment | None:
        """Where the encoded change of a tensor lies, once it is ready."""
        with self._monitor:
            self._monitor.wait(lambda: len(now.segments) > tensor, is_cancelled)
            return now.segments[tensor]

    def forgotten(self, download: Download) -> StaleRound:
        """What to raise when the files of a download are gone: the node was too slow for the rounds that are kept."""
        with self._monitor:
            return self._stale(download.node, download.round.index)

    def summarise(self, download: Download) -> RoundSummary:
        """How the round of a download went; waits for its close."""
        now, node = download.round, download.node
        with self._monitor:
            if download.is_snapshot:
                index = now.index
                return RoundSummary(
                    round=index,
                    tokens=self._ledger.tokens,
                    nodes=(),
                    experts=self._experts(node, index),
                    aggregate_s=0.0,
                    merge_s=0.0,
                    wait_s=0.0,
                    digest=self._digest_before(index),
                )
            self._monitor.wait(lambda: now.is_closed, download.is_cancelled)
            assert now.decision is not None and now.closed_at_s is not None
            tail_s = max(0.0, now.closed_at_s - now.last_upload_at_s)
            merge_s = min(tail_s, now.merge_s)
            return RoundSummary(
                round=now.index,
                tokens=now.tokens,
                nodes=now.decision.nodes,
                experts=self._members.partition(now.decision.absent).experts_by_node[node],
                aggregate_s=tail_s - merge_s,
                merge_s=merge_s,
                wait_s=max(0.0, now.last_upload_at_s - now.contributions[node].completed_at_s),
                digest=now.digest,
            )

    def complete_download(self, download: Download, framing_bytes: int) -> None:
        """Note that a node has confirmed its download; the last confirmation completes the round's record."""
        now = download.round
        with self._monitor:
            self._members.hear(download.node)
            if download.is_snapshot:
                if (former := self._ledger.kept.get(now.index - 1)) is not None:
                    former.returned.add(download.node)
            else:
                now.deliveries[download.node] = Delivery(download.payload_bytes, framing_bytes)
                if now.is_delivered and not now.is_recorded:
                    now.is_recorded = True
                    self._monitor.record("round", **now.summary())
            self._monitor.wake()

    def heard_of(self, node: int) -> None:
        """A node gave a sign of life."""
        with self._monitor:
            self._members.hear(node)

    # The life of the server

    @property
    def is_finished(self) -> bool:
        """Whether every round is closed, and delivered to all who took part in it."""
        with self._monitor:
            last = self._ledger.kept.get(len(self._ledger.steps) - 1)
            return self._ledger.open is None and (last is None or not last.waited_for)

    @property
    def rounds_closed(self) -> int:
        """How many rounds have been closed."""
        return self._ledger.rounds_closed

    def trained_by(self, node: int, round: int = 0) -> tuple[int, ...]:
        """Indices of the tensors that a node trains in a round."""
        now = self._ledger.find(round)
        partition = self._members.base if now is None else now.partition
        return tuple(i for i, spec in enumerate(self.schema) if partition.trains(node, spec.name))

    def transfer(self, tensors: tuple[int, ...]) -> Transfer:
        """The order of chunks of these tensors."""
        sizes_bytes = [self.wire.encoded_bytes(self.schema[index].num_elements) for index in tensors]
        return Transfer(tensors, sizes_bytes, self.wire.block_bytes)

    # Snapshots

    def _open_snapshot(self, request: DownloadRequest, is_cancelled: Callable[[], bool]) -> Download:
        """All global weights with which the open round begins, in a file that stays as it is."""
        with self._monitor:
            self._monitor.check_running()
            self._check_session(request.node, request.session)
            index, closing = self._ledger.rounds_closed, self._closing

            def may_read() -> bool:
                # One thread writes the file; others then find it there.
                return self._ledger.rounds_closed != index or (self._is_undecided and not closing.readers)

            if request.round == index:
                self._monitor.wait(may_read, is_cancelled)
            if request.round != self._ledger.rounds_closed:
                raise self._stale(request.node, request.round)
            steps = self._ledger.steps
            now = self._ledger.open or Round(index, steps[-1], 0.0, self._members.base)
            manifest = DownloadManifest(
                round=index,
                step=steps[index - 1] if index else 0,
                codec=self.exact_wire.name,
                tensors=tuple(range(len(self.schema))),
                merged=False,
                experts=self._experts(request.node, index),
            )
            closing.readers += 1
        try:
            if not (self.journal.path(index) / _SNAPSHOT_FILE).exists():
                self._write_snapshot(index)
        finally:
            with self._monitor:
                closing.readers -= 1
                self._monitor.wake()
        segments = [
            Segment(_SNAPSHOT_FILE, 4 * start, 4 * spec.num_elements)
            for start, spec in zip(self.state.starts, self.schema, strict=False)
        ]
        return Download(self, now, request.node, manifest, is_cancelled, segments)

    @property
    def _is_undecided(self) -> bool:
        """Whether it is open who takes part in the open round: what it began with then still is of use."""
        now = self._ledger.open
        return not self._closing.is_forming and (now is None or now.decision is None)

    def _write_snapshot(self, index: int) -> None:
        folder = self.journal.path(index)
        with self.storing():
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{_SNAPSHOT_FILE}.partial"
            with open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(self.state.values.data.cast("B"))
            partial.replace(folder / _SNAPSHOT_FILE)

    # Rules

    def _first_round_of(self, hello: Hello) -> int:
        """The round that a node may go on with."""
        due, asked = self._ledger.rounds_closed, hello.round
        if asked in (ANY_ROUND, due):
            return due
        if asked > due:
            raise self.refuse(
                hello.node,
                f"it wants to go on with round {asked}, and the server has only come to round {due}: its folder is not"
                " the one of this run, or was restored from an older copy",
            )
        former = self._ledger.kept.get(asked)
        took_part = former is not None and former.decision is not None and hello.node in former.decision.nodes
        if not took_part or self._config.round.quorum < 1.0:
            raise self._stale(hello.node, asked)
        return asked

    def _round_of(self, node: int, index: int) -> Round:
        """The open or a kept round. Raises Refused for one to come, StaleRound for one that is forgotten."""
        due = self._ledger.rounds_closed
        if index > due or (index == due and self._ledger.open is None):
            what = "none: all rounds are done" if self._ledger.open is None else str(due)
            raise self.refuse(node, f"it names round {index}; the open round is {what}")
        now = self._ledger.find(index)
        if now is None:
            raise self._stale(node, index)
        return now

    def _reason_against(self, manifest: UploadManifest, now: Round, part: Contribution | None) -> str | None:
        """Why an upload into a round cannot be accepted; None when it can."""
        node = manifest.node
        if manifest.step != now.step:
            return f"it uploads round {now.index} after step {manifest.step}; the round closes after step {now.step}"
        steps = now.step - (self._ledger.steps[now.index - 1] if now.index else 0)
        most = steps * self._config.tokens_per_step // self._config.nodes
        if not 1 <= manifest.tokens <= most:
            return f"a weight of {manifest.tokens} tokens is not possible; a node trains 1 to {most} in this round"
        if manifest.codec != self.wire.name:
            return f"its codec is {manifest.codec!r}; wire.dtype is {self.wire.name!r}"
        if manifest.tensors != self.trained_by(node, now.index):
            return "the announced tensors are not the ones that it trains"
        if part is not None and (part.is_complete or now.decision is not None) and part.tokens != manifest.tokens:
            return f"its new attempt at round {now.index} claims {manifest.tokens} tokens, the first one {part.tokens}"
        return None

    def _manifest(self, now: Round, node: int) -> DownloadManifest:
        assert now.decision is not None
        stepped, present, merged = self._config.outer.kind != "none", now.decision.nodes, now.is_merged

        def is_sent(name: str) -> bool:
            is_changed = changes(now.partition, present, name, experts_changed=merged)
            return is_changed and downloads(now.partition, node, name, experts_changed=merged, all_changed=stepped)

        return DownloadManifest(
            round=now.index,
            step=now.step,
            codec=self.wire.name,
            tensors=tuple(index for index, spec in enumerate(self.schema) if is_sent(spec.name)),
            merged=now.is_merged,
            experts=now.partition.experts_by_node[node],
        )

    def _digest_before(self, index: int) -> str:
        """Digest of the global weights with which a round begins; "" when it is no longer known."""
        former = self._ledger.kept.get(index - 1)
        if former is not None:
            return former.digest
        return self._first_digest if index == self._ledger.first_round else ""

    def _experts(self, node: int, index: int) -> tuple[int, ...]:
        now = self._ledger.find(index)
        partition = self._members.base if now is None else now.partition
        return partition.experts_by_node[node]

    def _check_upload(self, upload: Upload) -> None:
        now = upload.round
        if upload.contribution.attempt != upload.attempt:
            raise self.refuse(upload.node, f"it has begun its upload of round {now.index} again")
        if now.decision is not None and upload.node not in now.decision.nodes:
            raise self._stale(upload.node, now.index)

    def _check_session(self, node: int, session: bytes) -> None:
        if not 0 <= node < self._config.nodes or not self._members.nodes[node].session:
            raise self.refuse(node, "it has not joined this run")
        if not self._members.owns_session(node, session):
            raise self.refuse(node, "another process has joined as this node since")
        self._members.hear(node)

    def _stale(self, node: int, index: int) -> StaleRound:
        due = self._ledger.rounds_closed
        self._monitor.record("stale", node=node, round=index, open_round=due)
        return StaleRound(f"round {index} is over without node {node}; the run is at round {due}: go on there")
