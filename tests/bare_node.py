"""A node without a model or an exchange: arrays that noise moves, and a client; for tests of server and transport."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from spes_core.config import RunConfig
from spes_core.sync.client import Client, DownloadReport, UploadReport
from spes_core.sync.messages import DownloadManifest, Welcome, make_hello
from tests.small_rounds import noise, small_schema


class BareNode:
    """Takes part with wire.dtype float32: what travels are the values themselves."""

    def __init__(self, client: Client, config: RunConfig, node: int, initial: Callable[[str], np.ndarray]) -> None:
        assert config.wire.dtype == "float32"
        self.client, self.config, self.node = client, config, node
        self.schema = small_schema(config)
        self.values = [np.array(initial(spec.name), dtype=np.float32).reshape(-1) for spec in self.schema]
        partition = config.make_partition()
        self.trained = tuple(i for i, spec in enumerate(self.schema) if partition.trains(node, spec.name))
        self.manifests: list[DownloadManifest] = []

    def join(self, round: int = 0) -> Welcome:
        return self.client.join(make_hello(self.config, self.schema, self.node, round))

    def train(self, round: int) -> None:
        for index in self.trained:
            step = noise("train", index, self.node, round).standard_normal(self.values[index].size)
            self.values[index] += (0.1 * step).astype(np.float32)

    def payload(self, tensor: int) -> memoryview:
        return self.values[tensor].data.cast("B")

    def upload(self, round: int) -> UploadReport:
        step = self.config.sync.interval_steps * (round + 1)
        return self.client.upload(
            round=round, step=step, tokens=100 + 7 * self.node, tensors=self.trained, payload_of=self.payload
        )

    def download(self, round: int) -> DownloadReport:
        report = self.client.download(round=round, sink=self)
        assert report.summary.digest == self.digest(), f"node {self.node} differs from the server after round {round}"
        return report

    def begin(self, manifest: DownloadManifest) -> None:
        self.manifests.append(manifest)

    def write(self, tensor: int, offset: int, payload: memoryview) -> None:
        self.values[tensor].data.cast("B")[offset : offset + len(payload)] = payload

    def digest(self) -> str:
        hasher = xxhash.xxh3_64()
        for values in self.values:
            hasher.update(values.data)
        digest: str = hasher.hexdigest()
        return digest

    def take_part(self, rounds: range = range(2)) -> list[tuple[UploadReport, DownloadReport]]:
        """Join and go through ``rounds``."""
        self.join(rounds.start)
        reports = []
        for round in rounds:
            self.train(round)
            reports.append((self.upload(round), self.download(round)))
        return reports
