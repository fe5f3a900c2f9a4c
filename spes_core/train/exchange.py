"""One node's part in the rounds: send what it trained, adopt the new global weights in place.

Of a node with several ranks only rank 0 talks to the server (`LeadingExchange`); the others give and take their parts
of one tensor after another (`FollowingExchange`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import xxhash

from spes_core.config import RunConfig
from spes_core.errors import ProtocolError
from spes_core.partition import Partition, downloads
from spes_core.sync.client import Client
from spes_core.sync.codec import Codec, make_codec
from spes_core.sync.messages import DownloadManifest, make_hello, schema_of
from spes_core.train.parallel import Group, Piece
from spes_core.train.weights import DividedWeights, Weights, follow


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What one round cost this node; the fields are those of its "round" event."""

    round: int
    step: int
    tokens: int
    """Training tokens of all nodes in all rounds so far."""
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
    """The server's work on this node's values and on the new global weights."""
    merged: bool
    digest: str
    """XXH3-64 of the new global weights."""


class Exchange:
    """Carries a model's weights through the rounds. Optimizer moments are not touched.

    Memory beside the model: one chunk, and one tensor where the weights are not contiguous float32 on the CPU.
    """

    def __init__(self, client: Client, weights: Weights, partition: Partition, node: int, config: RunConfig) -> None:
        self._client, self._partition, self._node, self._config = client, partition, node, config
        self._weights = weights
        self._schema = schema_of(weights.shapes)
        self._codec = make_codec(config.wire.dtype)
        self._trained = tuple(i for i, spec in enumerate(self._schema) if partition.trains(node, spec.name))

    @property
    def buffer_bytes(self) -> int:
        """Memory that a round takes beside the model: the largest chunk, and the largest tensor that is staged."""
        largest_bytes = max(4 * spec.num_elements for spec in self._schema)
        return min(self._config.wire.chunk_bytes, largest_bytes) + self._weights.staged_bytes

    def join(self, round: int = 0) -> None:
        """Join the run with the weights that round ``round`` begins with.

        Raises Refused with the difference when the server runs something else, and ProtocolError when it is at another
        round or begins it with other weights.
        """
        welcome = self._client.join(make_hello(self._config, self._schema, self._node))
        if welcome.round != round:
            raise ProtocolError(
                f"node {self._node} is about to enter round {round}, and the server is at round {welcome.round};"
                " stop all processes of the run and start them together, so that all continue from one checkpoint"
            )
        self._verify(welcome.digest, "the initial weights" if round == 0 else f"the weights of checkpoint {round}")

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """Upload with weight ``tokens`` (this node's in this round), wait, and adopt the new global weights in place.

        Raises RoundFailed, Refused, Unreachable or ProtocolError; the weights may then be partly old and partly new.
        """
        up = self._client.upload(round=round, step=step, tokens=tokens, tensors=self._trained, payload_of=self._encode)
        sink = _Adoption(self._weights, self._codec, self._expected)
        down = self._client.download(round=round, sink=sink)
        began_s = time.perf_counter()
        manifest = down.manifest
        self._verify(manifest.digest, f"the weights after round {round}")
        verify_s = time.perf_counter() - began_s
        return RoundReport(
            round=round,
            step=step,
            tokens=manifest.tokens,
            uplink_payload_bytes=up.payload_bytes,
            uplink_framing_bytes=up.framing_bytes,
            downlink_payload_bytes=down.payload_bytes,
            downlink_framing_bytes=down.framing_bytes,
            serialise_s=up.serialise_s + down.serialise_s + verify_s,
            transfer_s=up.transfer_s + down.transfer_s,
            wait_s=up.wait_s + down.wait_s,
            merge_s=manifest.merge_s,
            aggregate_s=up.aggregate_s + manifest.aggregate_s,
            merged=manifest.merged,
            digest=manifest.digest,
        )

    def _encode(self, index: int) -> memoryview:
        return self._codec.encode(self._weights.read(index))

    def _expected(self, manifest: DownloadManifest) -> tuple[int, ...]:
        """The tensors that the server must send: the rule that it follows, applied here."""
        stepped = self._config.outer.kind != "none"
        return tuple(
            index
            for index, spec in enumerate(self._schema)
            if downloads(self._partition, self._node, spec.name, experts_changed=manifest.merged, all_changed=stepped)
        )

    def _verify(self, digest: str, what: str) -> None:
        # Hashing the model costs little where its memory can be read as it is; elsewhere it would mean copying it all.
        if not self._weights.is_plain:
            return
        hasher = xxhash.xxh3_64()
        for index in range(len(self._schema)):
            hasher.update(self._weights.read(index).data)
        if hasher.hexdigest() != digest:
            raise ProtocolError(
                f"{what} differ between node {self._node} and the server (digest {hasher.hexdigest()}, there {digest})"
            )


class LeadingExchange:
    """An exchange on rank 0 of a group: the other ranks follow, and learn how it ended."""

    def __init__(self, exchange: Exchange, weights: DividedWeights) -> None:
        self._exchange, self._weights = exchange, weights
        self.buffer_bytes = exchange.buffer_bytes

    def join(self, round: int = 0) -> None:
        """See `Exchange.join`."""
        self._weights.lead(lambda: self._exchange.join(round))

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """See `Exchange.run_round`."""
        return self._weights.lead(lambda: self._exchange.run_round(round, step, tokens), asdict)


class FollowingExchange:
    """The part of any other rank: it follows, gets the same report and raises the same errors."""

    buffer_bytes = 0

    def __init__(self, group: Group, pieces: list[Piece]) -> None:
        self._group, self._pieces = group, pieces

    def join(self, round: int = 0) -> None:
        """See `Exchange.join`."""
        follow(self._group, self._pieces)

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """See `Exchange.run_round`."""
        return RoundReport(**follow(self._group, self._pieces))


class _Adoption:
    """Decodes a download into the weights in place."""

    def __init__(self, weights: Weights, codec: Codec, expected: Callable[[DownloadManifest], tuple[int, ...]]) -> None:
        self._weights, self._codec, self._expected = weights, codec, expected

    def begin(self, manifest: DownloadManifest) -> None:
        """Refuse a download of other tensors than the rule gives this node."""
        if manifest.tensors != self._expected(manifest):
            raise ProtocolError("the server announced other tensors than this node lacks")

    def write(self, tensor: int, offset: int, payload: memoryview) -> None:
        """Decode one chunk to where it belongs."""
        self._weights.write(tensor, self._codec.format.elements(offset), self._codec.decode(payload))
