"""A model of a few thousand values and the means to take it through rounds: what the synchronization tests share."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch

from spes_core.config import (
    DataConfig,
    MergeConfig,
    ModelConfig,
    PartitionConfig,
    RoundConfig,
    RunConfig,
    SyncConfig,
    WireConfig,
    check,
)
from spes_core.model.counting import tensor_shapes
from spes_core.protocol import channel
from spes_core.protocol.servicer import SyncServicer
from spes_core.sync.client import Client
from spes_core.sync.ledger import FRESH, Standing
from spes_core.sync.messages import Schema, schema_of
from spes_core.sync.parameter_server import ParameterServer
from spes_core.train.exchange import Exchange, RoundReport
from spes_core.train.weights import LocalWeights

MODEL = ModelConfig(
    num_layers=2,
    d_model=8,
    num_heads=2,
    num_kv_heads=2,
    num_experts=4,
    top_k=1,
    expert_hidden=4,
    vocab_size=260,
)


def small_config(**changes: Any) -> RunConfig:
    """Two nodes, two rounds of two steps, a merge at the first; ``changes`` replace whole parts."""
    config = RunConfig(
        nodes=2,
        model=MODEL,
        data=DataConfig(tokenizer_vocab_size=257, sequence_length=4, global_batch_sequences=60),
        budget_tokens=4 * 240,
        sync=SyncConfig(interval_steps=2),
        merge=MergeConfig(interval_steps=2, until_step=3, num_neighbours=2, alpha=0.3),
        wire=WireConfig(chunk_bytes=1024),
        round=RoundConfig(timeout_s=30),
    )
    config = replace(config, **changes)
    assert not check(config)
    return config


def small_schema(config: RunConfig) -> Schema:
    """The schema of the run's model."""
    return schema_of(tensor_shapes(config.model))


def noise(*key: object) -> np.random.Generator:
    """A random generator that is a function of ``key``."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8]))


def initial_values(config: RunConfig) -> Callable[[str], np.ndarray]:
    """The flat initial value of each tensor by name."""
    sizes = {spec.name: spec.num_elements for spec in small_schema(config)}
    return lambda name: noise("initial", name).standard_normal(sizes[name]).astype(np.float32)


class PlainDecoder:
    """A dict of tensors where a decoder would be."""

    def __init__(self, config: RunConfig) -> None:
        initial = initial_values(config)
        self.weights = {
            spec.name: torch.from_numpy(initial(spec.name)).view(spec.shape) for spec in small_schema(config)
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.weights

    def train(self, config: RunConfig, node: int, round: int) -> None:
        """Move what the node trains by noise of its own."""
        for name, tensor in self.weights.items():
            if config.make_partition().trains(node, name):
                step = noise("train", name, node, round).standard_normal(tensor.numel()).astype(np.float32)
                tensor += 0.1 * torch.from_numpy(step).view(tensor.shape)


@dataclass
class Recorder:
    """Keeps events in memory."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


def make_server(
    config: RunConfig,
    recorder: Recorder | None = None,
    checkpoint_steps: Collection[int] = (),
    folder: Path | None = None,
    standing: Standing = FRESH,
    initial: Callable[[str], np.ndarray] | None = None,
    schema: Schema | None = None,
) -> ParameterServer:
    """A server core for the run, or for the part that ``schema`` is; its rounds lie in ``folder``, or end with it."""
    temporary = None if folder else tempfile.TemporaryDirectory()
    server = ParameterServer(
        config,
        schema or small_schema(config),
        initial or initial_values(config),
        recorder or Recorder(),
        folder or Path(temporary.name),  # type: ignore[union-attr]
        standing,
        checkpoint_steps,
    )
    server.temporary = temporary  # type: ignore[attr-defined]
    return server


@contextmanager
def running(server: ParameterServer, save: Callable[[Standing], None] = lambda standing: None) -> Iterator[list[Any]]:
    """A thread in `ParameterServer.run`; what ended it appears in the list, at the latest when the block is left.

    A run that has not come to its end then is stopped.
    """
    thread, outcome = in_thread(lambda: server.run(save))
    try:
        yield outcome
    finally:
        if not server.is_finished:
            server.fail("the test is over")
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def served(core: ParameterServer, config: RunConfig) -> Iterator[str]:
    """The core behind a real socket; its address."""
    server = grpc.server(ThreadPoolExecutor(16), options=channel.OPTIONS)
    server.add_generic_rpc_handlers((SyncServicer(core, config.wire.chunk_bytes),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def make_exchange(client: Client, config: RunConfig, node: int) -> tuple[Exchange, PlainDecoder]:
    """One node's exchange over a plain decoder."""
    decoder = PlainDecoder(config)
    return Exchange(client, LocalWeights(decoder.tensors()), config.make_partition(), node, config), decoder


def run_rounds(
    config: RunConfig,
    make_client: Callable[[int], Client],
    num_rounds: int = 2,
    delay: Callable[[int, int], None] = lambda node, round: None,
) -> tuple[list[PlainDecoder], list[list[RoundReport]]]:
    """Take all nodes through the rounds, each in a thread; node n's weight is 100 + 7·n tokens."""

    def node_main(node: int) -> tuple[PlainDecoder, list[RoundReport]]:
        exchange, decoder = make_exchange(make_client(node), config, node)
        exchange.join()
        reports = []
        for round in range(num_rounds):
            decoder.train(config, node, round)
            delay(node, round)
            step = config.sync.interval_steps * (round + 1)
            reports.append(exchange.run_round(round, step, 100 + 7 * node))
        return decoder, reports

    with ThreadPoolExecutor(config.nodes) as pool:
        results = list(pool.map(node_main, range(config.nodes)))
    return [decoder for decoder, _ in results], [reports for _, reports in results]


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start ``call``; its result, or the exception that ended it, appears in the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


FULL = PartitionConfig(kind="full")
