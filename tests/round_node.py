"""A node without training, under a test's own control: it holds and checks what a real one would hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from spes_core.config import RunConfig
from spes_core.sync.codec import decode_change, encode_change, make_codec
from spes_core.sync.messages import DownloadRequest, RoundSummary, UploadManifest, make_hello
from spes_core.sync.parameter_server import ParameterServer
from spes_core.sync.upload import Upload
from tests.small_rounds import initial_values, make_server, noise, running, small_config, small_schema

CONFIG = small_config()
SCHEMA = small_schema(CONFIG)


class Node:
    """A node under the test's own control, one call at a time; holds what a real one would hold."""

    def __init__(
        self, server: ParameterServer, node: int, config: RunConfig = CONFIG, round: int = 0, former: Node | None = None
    ) -> None:
        self.server, self.node, self.config, self.codec = server, node, config, make_codec(config.wire.dtype)
        initial = initial_values(config)
        self.base: list[np.ndarray]
        self.residual: list[np.ndarray]
        self.base = former.base if former else [initial(spec.name) for spec in SCHEMA]
        self.residual = former.residual if former else [np.zeros_like(values) for values in self.base]
        self.welcome = server.join(make_hello(config, SCHEMA, node, round))
        self.experts = self.welcome.experts
        self.sent: dict[int, bytes] = {}

    def manifest(self, round: int = 0, **changes: Any) -> UploadManifest:
        manifest = UploadManifest(
            node=self.node,
            session=self.welcome.session,
            round=round,
            step=min(2 * (round + 1), self.config.total_steps),
            tokens=90 + 7 * self.node,
            codec=self.config.wire.dtype,
            tensors=self.server.trained_by(self.node, round),
            safe_round=0,
        )
        return replace(manifest, **changes)

    def train(self, round: int) -> None:
        """Encode what training by noise of its own gives; once, since encoding again would feed back twice."""
        if self.sent:
            return
        for tensor in self.server.trained_by(self.node, round):
            step = noise("train", tensor, self.node, round).standard_normal(self.base[tensor].size)
            values = self.base[tensor] + np.float32(0.1) * step.astype(np.float32)
            residual = self.residual[tensor] if self.codec.has_feedback else None
            self.sent[tensor] = bytes(encode_change(self.codec, values, self.base[tensor], residual))

    def send(self, upload: Upload, upto: int | None = None, chunk_bytes: int = 1 << 20) -> None:
        """Send from where the server wants it."""
        skip = upload.ready.offset_bytes
        for tensor in list(self.sent)[:upto]:
            payload = memoryview(self.sent[tensor])
            start, skip = min(skip, len(payload)), max(0, skip - len(payload))
            for offset, length in self.codec.format.chunks(len(payload), chunk_bytes, start):
                upload.add(tensor, offset, payload[offset : offset + length])

    def upload(self, round: int = 0, **changes: Any) -> Upload:
        self.train(round)
        upload = self.server.begin_upload(self.manifest(round, **changes))
        if not upload.ready.is_complete:
            self.send(upload)
        upload.finish()
        upload.close()
        return upload

    def download(self, round: int = 0, *, is_snapshot: bool = False) -> RoundSummary:
        """Adopt what a round changed, or a snapshot."""
        request = DownloadRequest(node=self.node, session=self.welcome.session, round=round, is_snapshot=is_snapshot)
        download = self.server.open_download(request, lambda: False)
        received: dict[int, bytearray] = {}
        for tensor, offset, payload in download.chunks(256):
            assert offset == len(received.setdefault(tensor, bytearray()))
            received[tensor] += payload
        assert tuple(received) == download.manifest.tensors
        summary = download.summary()
        if is_snapshot:
            self.base = [np.frombuffer(received[tensor], dtype=np.float32).copy() for tensor in range(len(SCHEMA))]
        else:
            for tensor in {**self.sent, **received}:
                payload = memoryview(received.get(tensor) or self.sent[tensor])
                base = self.base[tensor]
                self.base[tensor] = decode_change(self.codec, payload, base, np.empty_like(base)).copy()
        self.sent = {}
        download.delivered()
        assert self.digest() == summary.digest
        return summary

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(np.concatenate(self.base).tobytes())


def nodes_of(server: ParameterServer, config: RunConfig = CONFIG) -> list[Node]:
    return [Node(server, node, config) for node in range(config.nodes)]


def one_round(nodes: list[Node], round: int) -> list[RoundSummary]:
    for node in nodes:
        node.upload(round)
    return [node.download(round) for node in nodes]


def whole_run(config: RunConfig, checkpoint_steps: tuple[int, ...] = ()) -> bytes:
    server = make_server(config, checkpoint_steps=checkpoint_steps)
    with running(server) as outcome:
        nodes = nodes_of(server, config)
        for round in range(2):
            one_round(nodes, round)
    assert outcome == [None]
    return server.state.values.tobytes()
