"""A server core without arithmetic, for tests of the transport: keeps uploads in memory and sends prepared bytes."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from spes_core.errors import ProtocolError, Refused, RoundFailed, StaleRound
from spes_core.sync.messages import (
    DownloadManifest,
    DownloadRequest,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Receipt,
    RoundSummary,
    Schema,
    UploadManifest,
    UploadReady,
    Welcome,
)
from spes_core.sync.transfer import Transfer, WireFormat

RAW = WireFormat("float32", 1, 4)


@dataclass
class Stored:
    """What a server keeps of uploads on disk: it outlives the core."""

    uploads: dict[tuple[int, int], bytearray] = field(default_factory=dict)
    complete: set[tuple[int, int]] = field(default_factory=set)


class FakeCore:
    """Conforms to `spes_core.protocol.servicer.ServerCore`. ``results[tensor]``: encoded results of any round."""

    def __init__(self, schema: Schema, results: dict[int, bytes], stored: Stored | None = None, nodes: int = 2) -> None:
        self.schema, self.results, self.nodes = schema, results, nodes
        self.stored = stored or Stored()
        self.sessions: dict[int, bytes] = {}
        self.hellos: list[Hello] = []
        self.beats: list[Heartbeat] = []
        self.refusals: list[tuple[int | None, str]] = []
        self.delivered: list[tuple[int, int]] = []
        self.framing: list[int] = []
        self.restarts = 0
        self.closed = 0
        self.waiting = 0
        self.begun: set[tuple[int, int]] = set()
        self.is_strict = False
        """Whether a download is refused to a node that has not begun its upload."""
        self.failure: str | None = None
        self.stale_rounds: set[int] = set()
        self.condition = threading.Condition()
        self.is_released = True
        """Whether downloads go beyond their manifest."""

    def join(self, hello: Hello, is_cancelled: Callable[[], bool]) -> Welcome:
        if hello.schema != self.schema:
            raise self.refuse(hello.node, "this node belongs to another run: the schema differs")
        if not 0 <= hello.node < self.nodes:
            raise self.refuse(hello.node, f"there is no node {hello.node}: this run has {self.nodes} nodes")
        self.hellos.append(hello)
        self.sessions[hello.node] = secrets.token_bytes(16)
        return Welcome(session=self.sessions[hello.node], round=max(hello.round, 0), digest="d", experts=hello.experts)

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        self.beats.append(beat)
        return HeartbeatReply(round=3)

    def begin_upload(self, manifest: UploadManifest) -> FakeUpload:
        self.check()
        if manifest.round in self.stale_rounds:
            raise StaleRound(f"round {manifest.round} is over")
        if any(index >= len(self.schema) for index in manifest.tensors):
            raise self.refuse(manifest.node, "the announced tensors are not the ones that it trains")
        self.begun.add((manifest.round, manifest.node))
        return FakeUpload(self, manifest)

    def open_download(self, request: DownloadRequest, is_cancelled: Callable[[], bool]) -> FakeDownload:
        self.check()
        if self.is_strict and (request.round, request.node) not in self.begun:
            raise self.refuse(request.node, "it asks for a round before it has begun its own upload")
        return FakeDownload(self, request, is_cancelled)

    def refuse(self, node: int | None, reason: str) -> Refused:
        self.refusals.append((node, reason))
        return Refused(f"the server refused {'an unknown sender' if node is None else f'node {node}'}: {reason}")

    def wake(self) -> None:
        with self.condition:
            self.condition.notify_all()

    def release(self) -> None:
        with self.condition:
            self.is_released = True
            self.condition.notify_all()

    def status(self) -> dict[str, Any]:
        present = {str(node): {"state": "present", "late_s": 0.0, "uplink_bytes": 12} for node in self.sessions}
        last = None if not self.refusals else {"node": self.refusals[-1][0], "reason": self.refusals[-1][1]}
        return {"round": 3, "rounds": 8, "nodes": present, "last_refusal": last, "expert_staleness_rounds": {"0": 0}}

    def fail(self, reason: str) -> None:
        self.failure = reason

    def check(self) -> None:
        if self.failure:
            raise RoundFailed(self.failure)

    def sizes(self, tensors: tuple[int, ...]) -> list[int]:
        return [RAW.encoded_bytes(self.schema[index].num_elements) for index in tensors]


class FakeUpload:
    def __init__(self, core: FakeCore, manifest: UploadManifest) -> None:
        self.core, self.key = core, (manifest.round, manifest.node)
        self.manifest = manifest
        self.data = core.stored.uploads.setdefault(self.key, bytearray())
        self._begin()

    def _begin(self) -> None:
        sizes = self.core.sizes(self.manifest.tensors)
        self.transfer = Transfer(self.manifest.tensors, sizes, 4)
        left = len(self.data)
        for tensor, size in zip(self.manifest.tensors, sizes, strict=True):
            if take := min(left, size):
                self.transfer.accept(tensor, 0, take)
            left -= take

    @property
    def ready(self) -> UploadReady:
        digest = xxhash.xxh3_64_hexdigest(self.data)
        is_complete = self.key in self.core.stored.complete
        return UploadReady(offset_bytes=len(self.data), prefix_digest=digest, is_complete=is_complete)

    def restart(self) -> None:
        if self.key in self.core.stored.complete:
            raise self.core.refuse(self.manifest.node, "it has uploaded other bytes for that round")
        self.core.restarts += 1
        self.data.clear()
        self._begin()

    def add(self, tensor: int, offset: int, payload: memoryview) -> None:
        try:
            self.transfer.accept(tensor, offset, len(payload))
        except ProtocolError as error:
            raise self.core.refuse(self.manifest.node, str(error)) from error
        self.data += payload

    def finish(self, framing_bytes: int) -> Receipt:
        try:
            self.transfer.finish()
        except ProtocolError as error:
            raise self.core.refuse(self.manifest.node, str(error)) from error
        self.core.framing.append(framing_bytes)
        self.core.stored.complete.add(self.key)
        return Receipt(payload_bytes=len(self.data), store_s=0.0)

    def close(self) -> None:
        self.core.closed += 1


class FakeDownload:
    def __init__(self, core: FakeCore, request: DownloadRequest, is_cancelled: Callable[[], bool]) -> None:
        self.core, self.request, self.is_cancelled = core, request, is_cancelled
        tensors = tuple(range(len(core.schema))) if request.is_snapshot else tuple(core.results)
        self.manifest = DownloadManifest(
            round=request.round, step=2, codec="float32", tensors=tensors, merged=False, experts=(0,)
        )

    def chunks(self, chunk_bytes: int) -> Iterator[tuple[int, int, memoryview]]:
        with self.core.condition:
            self.core.waiting += 1
            try:
                while not self.core.is_released:
                    self.core.check()
                    if self.is_cancelled():
                        raise ProtocolError("the node went away")
                    self.core.condition.wait(5)
            finally:
                self.core.waiting -= 1
        for tensor in self.manifest.tensors:
            data = self.core.results.get(tensor, bytes(4 * self.core.schema[tensor].num_elements))
            for offset, length in RAW.chunks(len(data), chunk_bytes):
                yield tensor, offset, memoryview(data)[offset : offset + length]

    def summary(self) -> RoundSummary:
        return RoundSummary(
            round=self.request.round,
            tokens=7,
            nodes=(0, 1),
            experts=(0,),
            aggregate_s=0.0,
            merge_s=0.0,
            wait_s=0.0,
            digest=json.dumps("abc"),
        )

    def delivered(self, framing_bytes: int) -> None:
        self.core.delivered.append((self.request.node, framing_bytes))
