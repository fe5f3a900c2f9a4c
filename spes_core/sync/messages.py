"""What a node and the server tell each other, apart from tensor data: plain records that any transport can carry."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from spes_core import config as configuration
from spes_core.config import RunConfig

PROTOCOL_VERSION = 2
"""Raised whenever a record, a frame or the meaning of one changes."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and storage type of one tensor of the global model."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @cached_property
    def num_elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


Schema = tuple[TensorSpec, ...]
"""All tensors of the global model in canonical order; a tensor is called by its index in it."""


def schema_of(shapes: Mapping[str, tuple[int, ...]]) -> Schema:
    """The schema of a model whose tensors, in canonical order, have these shapes."""
    return tuple(TensorSpec(name, tuple(int(size) for size in shape)) for name, shape in shapes.items())


def schema_digest(schema: Schema) -> str:
    """SHA-256 (hex) of the names, shapes and dtypes, in order."""
    rows = [[spec.name, list(spec.shape), spec.dtype] for spec in schema]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a node says when it joins: enough to prove that it is part of this run, and to name what differs if not."""

    protocol_version: int = PROTOCOL_VERSION
    node: int
    num_nodes: int
    config_digest: str
    config_json: str
    """The whole RunConfig; read only to name the difference when the digests differ."""
    schema_digest: str
    schema: Schema
    experts: tuple[int, ...]
    """The experts that the node trains at the start of the run, ascending."""
    round: int = 0
    """The first round that the node is going to upload; `ANY_ROUND`: whichever is open, from a snapshot."""
    token: str = ""
    """The join token of the run, where it has one."""


ANY_ROUND = -1
"""A node that has no past in the run, or gave it up, asks for the open round."""


def make_hello(config: RunConfig, schema: Schema, node: int, round: int = 0, token: str = "") -> Hello:
    """What node ``node`` of this run must say; the server compares with its own."""
    partition = config.make_partition()
    return Hello(
        node=node,
        num_nodes=config.nodes,
        config_digest=configuration.digest(config),
        config_json=json.dumps(configuration.to_dict(config), sort_keys=True),
        schema_digest=schema_digest(schema),
        schema=schema,
        experts=partition.experts_by_node[node] if 0 <= node < partition.num_nodes else (),
        round=round,
        token=token,
    )


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The server's answer to a node that may take part."""

    session: bytes
    """Proof, in the node's later requests, that it is the process that joined last under this node id."""
    round: int
    """The round that the node goes on with: the one that it asked for, or the open one."""
    digest: str
    """Digest of the global weights with which that round begins; "" when the server no longer knows it."""
    experts: tuple[int, ...]
    """The experts that the node trains in that round, ascending."""


@dataclass(frozen=True, kw_only=True)
class UploadManifest:
    """What one upload is going to send."""

    node: int
    session: bytes
    round: int
    step: int
    """Optimizer steps after which the round closes."""
    tokens: int
    """Training tokens that this node processed in the round: its weight in the mean; at least 1."""
    codec: str
    tensors: tuple[int, ...]
    """Indices into the joined schema, ascending: the tensors that the node trains."""
    safe_round: int
    """The node's newest checkpoint begins with this round: it will never ask for the result of an earlier one."""


@dataclass(frozen=True, kw_only=True)
class UploadReady:
    """Where an upload goes on: the server may have a part of it, or all, from an earlier attempt."""

    offset_bytes: int
    """Bytes of the encoded tensors, end to end, that the server has."""
    prefix_digest: str
    """XXH3-64 (hex) of those bytes; where the node's own differ, it asks to begin again."""
    is_complete: bool
    """Whether the upload had been finished: nothing is left to send."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The server's answer to a complete upload."""

    payload_bytes: int
    """Encoded bytes of the whole upload."""
    store_s: float
    """How long the server took to check and store it."""


@dataclass(frozen=True, kw_only=True)
class DownloadRequest:
    """A node's wish for what it lacks of a round's result, or for all global weights."""

    node: int
    session: bytes
    round: int
    is_snapshot: bool = False
    """Whether all tensors are wanted, exactly, as they are at the beginning of ``round``, the open one."""
    offset_bytes: int = 0
    """Bytes of the encoded tensors, end to end, that the node has from an earlier attempt: they are not sent again."""


@dataclass(frozen=True, kw_only=True)
class DownloadManifest:
    """What one download is going to send; its end carries the `RoundSummary`."""

    round: int
    step: int
    codec: str
    tensors: tuple[int, ...]
    """Indices into the joined schema, ascending: what `partition.downloads` says the node lacks."""
    merged: bool
    experts: tuple[int, ...]
    """The experts that the node trained in this round, as the server sees it."""


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """How a round went, told when it has closed."""

    round: int
    tokens: int
    """Training tokens of all nodes in all rounds up to this one."""
    nodes: tuple[int, ...]
    """The nodes whose uploads are in the new weights, ascending."""
    experts: tuple[int, ...]
    """The experts that the node trains from the next round on, ascending."""
    aggregate_s: float
    """The server's work on the new global weights, without the merge."""
    merge_s: float
    wait_s: float
    """From the end of this node's upload to the close, without the server's work after the last upload."""
    digest: str
    """Digest of the new global weights, all tensors."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A node is alive."""

    node: int
    session: bytes
    step: int
    """Optimizer steps that it has taken."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatReply:
    """What a node may want to know between rounds."""

    round: int
    """The open round."""
