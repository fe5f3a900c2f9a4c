"""One node's part in the rounds: send what it trained, adopt the new global weights in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from spes_core.config import RunConfig
from spes_core.errors import ProtocolError
from spes_core.partition import Partition, downloads
from spes_core.sync.client import Client
from spes_core.sync.codec import Codec, Values, make_codec
from spes_core.sync.messages import DownloadManifest, make_hello, schema_of


class HasTensors(Protocol):
    """What an exchange needs of a model."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Canonical name to a detached view of every tensor, in canonical order."""


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
    """Carries a decoder's weights through the rounds. Optimizer moments are not touched.

    Memory beside the model: one chunk, or one tensor where the decoder's is not contiguous float32 on the CPU.
    """

    def __init__(self, client: Client, decoder: HasTensors, partition: Partition, node: int, config: RunConfig) -> None:
        self._client, self._partition, self._node, self._config = client, partition, node, config
        self._tensors = list(decoder.tensors().values())
        self._schema = schema_of({name: tuple(t.shape) for name, t in decoder.tensors().items()})
        self._codec = make_codec(config.wire.dtype)
        self._trained = tuple(i for i, spec in enumerate(self._schema) if partition.trains(node, spec.name))
        # Hashing the model costs little where its memory can be read as it is; elsewhere it would mean copying it all.
        self._verifies = all(_is_plain(tensor) for tensor in self._tensors)

    @property
    def buffer_bytes(self) -> int:
        """Memory that a round takes beside the model: the largest chunk, and the largest tensor that is staged."""
        sizes_bytes = [4 * spec.num_elements for spec in self._schema]
        chunk_bytes = min(self._config.wire.chunk_bytes, max(sizes_bytes))
        pairs = zip(sizes_bytes, self._tensors, strict=True)
        return chunk_bytes + max((size for size, tensor in pairs if not _is_plain(tensor)), default=0)

    def join(self) -> int:
        """Join the run; the round that this node enters (0 for a fresh run).

        Raises Refused with the difference, and ProtocolError when the run is fresh and the initial weights differ.
        """
        welcome = self._client.join(make_hello(self._config, self._schema, self._node))
        if welcome.round == 0:
            self._verify(welcome.digest, "the initial weights")
        return welcome.round

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """Upload with weight ``tokens`` (this node's in this round), wait, and adopt the new global weights in place.

        Raises RoundFailed, Refused, Unreachable or ProtocolError; the weights may then be partly old and partly new.
        """
        up = self._client.upload(round=round, step=step, tokens=tokens, tensors=self._trained, payload_of=self._encode)
        sink = _Adoption(self._tensors, self._codec, self._expected)
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
        return self._codec.encode(_as_values(self._tensors[index]))

    def _expected(self, manifest: DownloadManifest) -> tuple[int, ...]:
        """The tensors that the server must send: the rule that it follows, applied here."""
        stepped = self._config.outer.kind != "none"
        return tuple(
            index
            for index, spec in enumerate(self._schema)
            if downloads(self._partition, self._node, spec.name, experts_changed=manifest.merged, all_changed=stepped)
        )

    def _verify(self, digest: str, what: str) -> None:
        if not self._verifies:
            return
        hasher = xxhash.xxh3_64()
        for tensor in self._tensors:
            hasher.update(_as_values(tensor).data)
        if hasher.hexdigest() != digest:
            raise ProtocolError(
                f"{what} differ between node {self._node} and the server (digest {hasher.hexdigest()}, there {digest})"
            )


class _Adoption:
    """Decodes a download into the tensors in place."""

    def __init__(
        self, tensors: list[Tensor], codec: Codec, expected: Callable[[DownloadManifest], tuple[int, ...]]
    ) -> None:
        self._tensors, self._codec, self._expected = tensors, codec, expected
        self._stage: Values | None = None

    def begin(self, manifest: DownloadManifest) -> None:
        """Refuse a download of other tensors than the rule gives this node."""
        if manifest.tensors != self._expected(manifest):
            raise ProtocolError("the server announced other tensors than this node lacks")

    def write(self, tensor: int, offset: int, payload: memoryview) -> None:
        """Decode one chunk to where it belongs."""
        target = self._tensors[tensor]
        values = self._codec.decode(payload)
        first = self._codec.format.elements(offset)
        if _is_plain(target):
            _as_values(target)[first : first + values.size] = values
            return
        if self._stage is None:
            self._stage = np.empty(target.numel(), dtype=np.float32)
        self._stage[first : first + values.size] = values
        if first + values.size == target.numel():
            target.copy_(torch.from_numpy(self._stage).view(target.shape))
            self._stage = None


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory is float32 values in order that numpy can see."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()


def _as_values(tensor: Tensor) -> Values:
    """The tensor's values, flat: its own memory where that is plain, else a copy."""
    plain = tensor if _is_plain(tensor) else tensor.to("cpu", torch.float32).contiguous()
    values: Values = plain.view(-1).numpy()
    return values
