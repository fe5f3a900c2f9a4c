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

PROTOCOL_VERSION = 1
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
    """The experts that the node trains, ascending."""


def make_hello(config: RunConfig, schema: Schema, node: int) -> Hello:
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
    )


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The server's answer to a node that may take part."""

    session: bytes
    """Proof, in the node's later requests, that it is the process that joined last under this node id."""
    round: int
    """The round that is open: the first one that this node may upload."""
    digest: str
    """Digest of the global weights with which that round begins."""


@dataclass(frozen=True, kw_only=True)
class UploadManifest:
    """What one upload is going to send."""

    node: int
    session: bytes
    round: int
    step: int
    """Optimizer steps taken when the round closes."""
    tokens: int
    """Training tokens that this node processed in the round: its weight in the mean; at least 1."""
    codec: str
    tensors: tuple[int, ...]
    """Indices into the joined schema, ascending: the tensors that the node trains."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The server's answer to a complete upload."""

    payload_bytes: int
    blocked_s: float
    """How long the server let this upload wait for other nodes."""
    aggregate_s: float
    """How long the server took to add this upload to the mean."""
    close_s: float
    """How long the server took to close the round; 0 for all but the upload that completed it."""


@dataclass(frozen=True, kw_only=True)
class DownloadRequest:
    """A node's wish for what it lacks of a round's result; answered when the round has closed."""

    node: int
    session: bytes
    round: int


@dataclass(frozen=True, kw_only=True)
class DownloadManifest:
    """What one download is going to send, and how the round went."""

    round: int
    step: int
    tokens: int
    """Training tokens of all nodes in all rounds up to this one."""
    codec: str
    tensors: tuple[int, ...]
    """Indices into the joined schema, ascending: what `partition.downloads` says the node lacks."""
    merged: bool
    aggregate_s: float
    """From the last upload to the new global weights, without the merge: outer optimizer and digest."""
    merge_s: float
    digest: str
    """Digest of the new global weights, all tensors."""
