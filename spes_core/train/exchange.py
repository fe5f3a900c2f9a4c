"""One node's part in the rounds: send what it trained, adopt the new global weights in place.

Of a node with several ranks only rank 0 talks to the server (`LeadingExchange`); the others give and take their parts
of one tensor after another (`FollowingExchange`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spes_core.config import RunConfig
from spes_core.errors import Diverged, ProtocolError, StaleRound, Unencodable
from spes_core.model.decoder import Decoder
from spes_core.names import expert_of
from spes_core.partition import Partition
from spes_core.sync.client import Client, DownloadReport, UploadReport
from spes_core.sync.codec import Values
from spes_core.sync.messages import ANY_ROUND, Welcome, make_hello, schema_of
from spes_core.train.adoption import Adoption, Gate, SnapshotAdoption, digest_of
from spes_core.train.faults import make_fault
from spes_core.train.global_copy import GlobalCopy
from spes_core.train.parallel import Group, Piece
from spes_core.train.redivide import redivide
from spes_core.train.weights import DividedWeights, LocalWeights, Weights, follow

_GRACE_S = 1.0
"""How long an upload may take to say itself why it fails, once the download beside it has failed."""
_ABORT_S = 0.1
"""How often a failed upload ends the download beside it, until that has ended."""
_SNAPSHOT_ATTEMPTS = 5
"""Rounds may close while a snapshot is asked for; so often it is asked for again."""


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What one round cost this node; the fields are those of its "round" event. Its times do not overlap."""

    round: int
    step: int
    tokens: int
    """Training tokens of all nodes in all rounds so far."""
    local_tokens: int
    """Those of this node in this round: its weight."""
    uplink_payload_bytes: int
    uplink_framing_bytes: int
    downlink_payload_bytes: int
    downlink_framing_bytes: int
    serialise_s: float
    """Encoding, framing, checking and copying on this node."""
    transfer_s: float
    wait_s: float
    """Waiting for other nodes."""
    merge_s: float
    aggregate_s: float
    """Waiting for the server's work on the new global weights."""
    merged: bool
    nodes_present: tuple[int, ...]
    """The nodes whose uploads are in the new weights."""
    experts: tuple[int, ...]
    """The experts that this node trains from here on."""
    digest: str
    """XXH3-64 of the new global weights."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a node that joined begins."""

    round: int
    """The round that it is going to upload next."""
    experts: tuple[int, ...]
    """The experts that it trains in that round."""
    is_snapshot: bool
    """Whether its weights are now those with which that round begins: its own were given up."""


class Exchange:
    """Carries a model's weights through the rounds. Optimizer moments are not touched.

    Memory beside the model: what `GlobalCopy` keeps, one chunk, and one tensor where the weights are not contiguous
    float32 on the CPU.
    """

    safe_round = 0
    """The round with which this node's newest checkpoint begins; to be kept up to date by whoever stores them."""

    def __init__(
        self,
        client: Client,
        weights: Weights,
        partition: Partition,
        node: int,
        config: RunConfig,
        *,
        exact: Callable[[str], Values] | None = None,
        experts: tuple[int, ...] | None = None,
    ) -> None:
        """``weights`` hold the global weights; ``exact(name)`` gives those that they hold rounded (frozen.dtype).

        ``experts`` are the ones that ``weights`` train where that differs from ``partition``.
        """
        self._client, self._partition, self._node, self._config = client, partition, node, config
        self._weights, self._fault = weights, make_fault(weights, node, config)
        self._schema = schema_of(weights.shapes)
        self._experts = partition.experts_by_node[node] if experts is None else experts
        self._copy = GlobalCopy(config, weights, self._trained_by(self._experts), exact)

    @property
    def buffer_bytes(self) -> int:
        """Memory that rounds take beside the model."""
        largest_bytes = max(4 * spec.num_elements for spec in self._schema)
        chunk_bytes = min(self._config.wire.chunk_bytes, largest_bytes)
        return self._copy.nbytes + chunk_bytes + self._weights.staged_bytes

    # Joining

    def join(self, round: int = 0) -> Entry:
        """Join the run with the weights that round ``round`` begins with, or with a snapshot where that is over.

        Raises Refused with the difference when the server runs something else, and ProtocolError when it begins that
        round with other weights.
        """
        try:
            welcome = self._hello(round)
        except StaleRound:
            return self.rejoin()
        if welcome.round > round:
            return self.rejoin()
        if welcome.round < round:
            raise ProtocolError(
                f"node {self._node} is about to enter round {round}, and the server is at round {welcome.round};"
                " remove the checkpoints and the rounds of this run and start all its processes anew"
            )
        if welcome.digest and self._copy.is_whole:
            what = "the initial weights" if round == 0 else f"the weights of checkpoint {round}"
            self._verify(digest_of(self._copy), welcome.digest, what)
        self._remember()
        return Entry(round=round, experts=welcome.experts, is_snapshot=False)

    def rejoin(self) -> Entry:
        """Give up what was trained since the last round, and take all weights with which the open round begins."""
        for _ in range(_SNAPSHOT_ATTEMPTS):
            welcome = self._hello(ANY_ROUND)
            sink = SnapshotAdoption(self._copy)
            try:
                self._client.snapshot(round=welcome.round, sink=sink)
            except StaleRound:
                continue
            self._copy.forget_residuals()
            if welcome.digest:
                self._verify(sink.finish(), welcome.digest, f"the snapshot of round {welcome.round}")
            self._remember()
            return Entry(round=welcome.round, experts=welcome.experts, is_snapshot=True)
        raise StaleRound(
            f"node {self._node} asked {_SNAPSHOT_ATTEMPTS} times for a snapshot, and each time the round closed before"
            " it came; raise round.timeout_s"
        )

    def _hello(self, round: int) -> Welcome:
        return self._client.join(make_hello(self._config, self._schema, self._node, round))

    def _remember(self) -> None:
        if self._fault is not None:
            self._fault.remember()

    def heartbeat(self, step: int) -> None:
        """Tell the server that this node lives."""
        self._client.heartbeat(step)

    # Rounds

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """Upload with weight ``tokens`` (this node's in this round), wait, and adopt the new global weights in place.

        Raises StaleRound when the round is over without this node, which then must `rejoin`; and Diverged, RoundFailed,
        Refused, Unreachable or ProtocolError, after which the weights may be partly old and partly new.
        """
        self.begin_round(round)
        return self.carry_round(round, step, tokens)

    def begin_round(self, round: int) -> None:
        """The first part of `run_round`: nothing of an update that is not finite is sent. Raises Diverged."""
        if self._fault is not None:
            self._fault.apply(round)
        if (index := self._weights.first_not_finite(self._copy.trained)) is not None:
            raise self._diverged(index, round)

    def carry_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """The second part of `run_round`."""
        began_s = time.perf_counter()
        self._copy.begin_round()
        gate = Gate(self._trained_name)
        sink = Adoption(self._copy, gate, self._experts, self._lacking)

        def encode(index: int) -> memoryview:
            gate.encoding(index)
            try:
                return self._copy.encode(index)
            except Unencodable as error:
                raise self._diverged(index, round) from error

        def upload() -> UploadReport:
            report = self._client.upload(
                round=round,
                step=step,
                tokens=tokens,
                tensors=self._copy.trained,
                payload_of=encode,
                safe_round=self.safe_round,
            )
            gate.open()
            return report

        up, uploaded_s, down = self._transfer(upload, lambda: self._client.download(round=round, sink=sink), gate)
        if self._node not in down.summary.nodes:
            raise StaleRound(f"the server left the upload of node {self._node} out of round {round}")
        self._verify(sink.finish(), down.summary.digest, f"the weights after round {round}")
        self._remember()
        times = _times(up, down, uploaded_s - began_s, time.perf_counter() - began_s)
        return RoundReport(
            round=round,
            step=step,
            tokens=down.summary.tokens,
            local_tokens=tokens,
            uplink_payload_bytes=up.payload_bytes + up.earlier_bytes,
            uplink_framing_bytes=up.framing_bytes,
            downlink_payload_bytes=down.payload_bytes,
            downlink_framing_bytes=down.framing_bytes,
            merged=down.manifest.merged,
            nodes_present=down.summary.nodes,
            experts=down.summary.experts,
            digest=down.summary.digest,
            **times,
        )

    def _transfer(
        self, upload: Callable[[], UploadReport], download: Callable[[], DownloadReport], gate: Gate
    ) -> tuple[UploadReport, float, DownloadReport]:
        """Both, and when the upload was done; at once where results may come before all is sent."""
        if not self._weights.is_plain or self._config.round.quorum < 1:
            report = upload()
            return report, time.perf_counter(), download()
        outcome: list[tuple[UploadReport | BaseException, float]] = []
        is_over = threading.Event()

        def run() -> None:
            try:
                outcome.append((upload(), time.perf_counter()))
            except BaseException as error:
                outcome.append((error, time.perf_counter()))
                gate.close()
                self._client.abort()
                # The download may only be about to begin, and would wait for what never comes.
                while not is_over.wait(_ABORT_S):
                    self._client.abort()

        thread = threading.Thread(target=run, name="upload", daemon=True)
        thread.start()
        try:
            gate.wait_begun()
            down = download()
        except BaseException as error:
            is_over.set()
            thread.join(_GRACE_S)
            has_ended = bool(outcome)
            gate.close()
            self._client.abort()
            thread.join()
            if has_ended and isinstance(outcome[0][0], BaseException):
                raise outcome[0][0] from error
            raise
        is_over.set()
        thread.join()
        up, ended_s = outcome[0]
        if isinstance(up, BaseException):
            raise up
        return up, ended_s, down

    def _lacking(self, experts: tuple[int, ...], merged: bool) -> tuple[set[int], set[int]]:
        """The tensors that the server must send, and those that it may send: its rule, as far as this node knows it.

        Whether a tensor that this node trains has other trainers, or one that it does not train had any in this round,
        is certain only where all nodes take part and experts stay where they are.
        """
        everything = set(range(len(self._schema)))
        rounds, partition = self._config.round, self._partition
        if rounds.quorum < 1 or self._config.aggregate.quarantine_factor is not None:
            return set(), everything
        is_all = self._config.outer.kind != "none"
        own = {
            index
            for index in self._trained_by(experts)
            if partition.trainers(self._schema[index].name) == (self._node,)
            and not (is_all or (merged and expert_of(self._schema[index].name) is not None))
        }
        return everything - own, everything - own

    def _trained_by(self, experts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for i, spec in enumerate(self._schema) if (e := expert_of(spec.name)) is None or e in experts)

    def _trained_name(self, index: int) -> str:
        return self._schema[index].name

    def _diverged(self, index: int, round: int) -> Diverged:
        return Diverged(
            f"{self._schema[index].name} holds NaN, infinite or huge values before the upload of round {round}: node"
            f" {self._node} has diverged and ends here; lower optim.lr or optim.clip_norm"
        )

    def _verify(self, found: str, expected: str, what: str) -> None:
        if found != expected:
            raise ProtocolError(
                f"{what} differ between node {self._node} and the server (digest {found}, there {expected})"
            )

    # Between rounds

    def redivide(
        self, decoder: Decoder, optimizer: torch.optim.Optimizer, experts: tuple[int, ...]
    ) -> torch.optim.Optimizer:
        """Train other experts from now on: divides the banks of ``decoder`` anew; its optimizer from now on."""
        moving = set(experts) ^ set(self._experts)
        indices = [i for i, spec in enumerate(self._schema) if expert_of(spec.name) in moving]
        moved = {index: self._copy.exact(index).copy() for index in indices}
        optimizer = redivide(decoder, optimizer, self._config.optim, experts)
        self._weights, self._experts = LocalWeights(decoder.tensors()), experts
        self._copy.rebind(self._weights, self._trained_by(experts), moved)
        self._fault = make_fault(self._weights, self._node, self._config)
        self._remember()
        return optimizer

    def abort(self) -> None:
        """End a round in progress in another thread; it raises Unreachable."""
        self._client.abort()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside the weights."""
        return self._copy.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave, once the weights are those of the same checkpoint."""
        self._copy.restore(state)


def _times(up: UploadReport, down: DownloadReport, upload_s: float, total_s: float) -> dict[str, float]:
    """Seconds of a round by purpose; they add up to ``total_s`` though transfers overlap each other.

    The upload counts whole; of the download what was left when the upload had ended: first the waiting, then the
    server's work, and the rest by the download's own shares of computing and transfer.
    """
    left_s = max(0.0, total_s - upload_s)
    parts = {}
    for name, seconds in (
        ("wait_s", down.summary.wait_s),
        ("merge_s", down.summary.merge_s),
        ("aggregate_s", down.summary.aggregate_s),
    ):
        parts[name] = min(left_s, seconds)
        left_s -= parts[name]
    share = down.serialise_s / (down.serialise_s + down.transfer_s or 1.0)
    up_share = up.serialise_s / (up.serialise_s + up.transfer_s or 1.0)
    parts["serialise_s"] = up_share * upload_s + share * left_s
    parts["transfer_s"] = (1 - up_share) * upload_s + (1 - share) * left_s
    return parts


class LeadingExchange:
    """An exchange on rank 0 of a group: the other ranks follow, and learn how it ended."""

    def __init__(self, exchange: Exchange, weights: DividedWeights) -> None:
        self._exchange, self._weights = exchange, weights
        self.buffer_bytes = exchange.buffer_bytes
        self.heartbeat, self.state, self.restore = exchange.heartbeat, exchange.state, exchange.restore

    @property
    def safe_round(self) -> int:
        """See `Exchange`."""
        return self._exchange.safe_round

    @safe_round.setter
    def safe_round(self, round: int) -> None:
        self._exchange.safe_round = round

    def join(self, round: int = 0) -> Entry:
        """See `Exchange.join`."""
        return self._weights.lead(lambda: self._exchange.join(round), asdict)

    def rejoin(self) -> Entry:
        """See `Exchange.rejoin`."""
        return self._weights.lead(self._exchange.rejoin, asdict)

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """See `Exchange.run_round`."""
        return self._weights.lead(lambda: self._exchange.run_round(round, step, tokens), asdict)

    def redivide(self, decoder: Decoder, optimizer: torch.optim.Optimizer, experts: tuple[int, ...]) -> Any:
        """A model that ranks divide cannot be divided anew in place."""
        raise _fixed(experts)


class FollowingExchange:
    """The part of any other rank: it follows, gets the same report and raises the same errors."""

    buffer_bytes = 0
    safe_round = 0

    def __init__(self, group: Group, pieces: list[Piece]) -> None:
        self._group, self._pieces = group, pieces

    def join(self, round: int = 0) -> Entry:
        """See `Exchange.join`."""
        return _entry(follow(self._group, self._pieces))

    def rejoin(self) -> Entry:
        """See `Exchange.rejoin`."""
        return _entry(follow(self._group, self._pieces))

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """See `Exchange.run_round`."""
        report = RoundReport(**follow(self._group, self._pieces))
        return replace(report, nodes_present=tuple(report.nodes_present), experts=tuple(report.experts))

    def redivide(self, decoder: Decoder, optimizer: torch.optim.Optimizer, experts: tuple[int, ...]) -> Any:
        """See `LeadingExchange.redivide`."""
        raise _fixed(experts)

    def heartbeat(self, step: int) -> None:
        """Rank 0 speaks for the node."""

    def state(self) -> dict[str, Tensor]:
        """Rank 0 keeps it."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Rank 0 keeps it."""


def _entry(fields: dict[str, Any]) -> Entry:
    return Entry(**{**fields, "experts": tuple(fields["experts"])})


def _fixed(experts: tuple[int, ...]) -> ProtocolError:
    return ProtocolError(
        f"the server dealt experts {list(experts)} to this node, whose ranks divide the model and cannot change them;"
        " set round.reassign_after to 0, or parallel.ranks_per_node to 1"
    )
