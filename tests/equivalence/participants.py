"""Runs whole trainings in one process for the equivalence tests: N nodes as threads, or one participant alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from spes_core.config import RunConfig, from_dict
from spes_core.events import EventWriter
from spes_core.model.counting import tensor_shapes
from spes_core.model.decoder import Decoder
from spes_core.node import build_decoder, flat_initial_weights
from spes_core.sync.client import Client
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import schema_of
from spes_core.sync.parameter_server import ParameterServer
from spes_core.train.exchange import Exchange
from spes_core.train.loop import BatchSource, Place, Training
from spes_core.train.weights import LocalWeights

CPU = torch.device("cpu")


def tiny(**changes: object) -> RunConfig:
    """A configuration that trains in a second; ``changes`` are whole sections or scalars, merged one level deep."""
    settings: dict[str, object] = {
        "nodes": 2,
        "budget_tokens": 12 * 8 * 16,
        "model": {
            "num_layers": 2,
            "d_model": 32,
            "num_heads": 4,
            "num_kv_heads": 2,
            "num_experts": 4,
            "expert_hidden": 16,
            "vocab_size": 300,
        },
        "data": {"tokenizer_vocab_size": 300, "sequence_length": 16, "global_batch_sequences": 8},
        "sync": {"interval_steps": 5},
        "merge": {"interval_steps": 5, "until_step": 12},
        "validation": {"max_sequences": 8},
    }
    for name, change in changes.items():
        old = settings.get(name)
        settings[name] = {**old, **change} if isinstance(old, dict) and isinstance(change, dict) else change
    return from_dict(settings)


class RandomTokens:
    """Fixed random sequences in place of a corpus; the global batch of a step is the same for any division."""

    separator_id = None

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def _sequences(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        size = (count, self._config.data.sequence_length + 1)
        window = torch.randint(self._config.model.vocab_size, size, generator=generator)
        return window[:, :-1], window[:, 1:]

    def train_batch(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._sequences(step, self._config.data.global_batch_sequences)
        return tokens.chunk(parts)[part], targets.chunk(parts)[part]

    def validation_batches(
        self, part: int, parts: int, batch_sequences: int, max_sequences: int
    ) -> list[tuple[Tensor, Tensor, int, str]]:
        tokens, targets = self._sequences(10**6, max_sequences)
        tokens, targets = tokens.chunk(parts)[part], targets.chunk(parts)[part]
        return [(tokens, targets, targets.numel(), "")]


def train_alone(config: RunConfig, folder: Path, source: BatchSource | None = None) -> dict[str, Tensor]:
    """The final weights of one participant that takes the whole global batch and never exchanges."""
    decoder = build_decoder(config, config.make_partition().experts_by_node[0], CPU)
    events = EventWriter(folder / "alone.jsonl")
    Training(
        config, decoder, source or RandomTokens(config), events, Place(0, 1, 0, 1), exchange=None, device=CPU
    ).run()
    return decoder.tensors()


def train_in_rounds(config: RunConfig, folder: Path, source: BatchSource | None = None) -> list[dict[str, Tensor]]:
    """The final weights of every node of a run with rounds, as the nodes hold them."""
    return [training.decoder.tensors() for training in train_together(config, folder, source)[1]]


def train_together(
    config: RunConfig, folder: Path, source: BatchSource | None = None
) -> tuple[ParameterServer, list[Training]]:
    """Server and nodes of a run with rounds after its end, all having been threads of this process."""
    server = make_server(config, folder / "rounds")
    trainings: list[Training] = []
    for node in range(config.nodes):
        decoder = build_decoder(config, config.make_partition().experts_by_node[node], CPU)
        trainings.append(node_training(config, node, decoder, LocalClient(server), folder, source))
    run_together(server, [training.run for training in trainings])
    return server, trainings


def global_weights(server: ParameterServer) -> dict[str, Tensor]:
    """What the server holds."""
    values = ((spec, server.state.tensor(index)) for index, spec in enumerate(server.schema))
    return {spec.name: torch.from_numpy(flat).view(spec.shape) for spec, flat in values}


def make_server(config: RunConfig, folder: Path) -> ParameterServer:
    """A server core that keeps its rounds in ``folder``."""
    schema = schema_of(tensor_shapes(config.model))
    return ParameterServer(config, schema, flat_initial_weights(config), lambda kind, **fields: None, folder)


def node_training(
    config: RunConfig, node: int, decoder: Decoder, client: Client, folder: Path, source: BatchSource | None = None
) -> Training:
    """The training of one node, which writes its events to ``folder``."""
    exact, weights = flat_initial_weights(config), LocalWeights(decoder.tensors())
    exchange = Exchange(client, weights, config.make_partition(), node, config, exact=exact)
    place, events = Place(node, config.nodes, node, config.nodes), EventWriter(folder / f"node-{node}.jsonl")
    tokens = source or RandomTokens(config)
    return Training(config, decoder, tokens, events, place, exchange=exchange, device=CPU)


def run_together(server: ParameterServer, calls: Sequence[Callable[[], object]]) -> None:
    """Run the server and all ``calls``, each in a thread; raises what failed first."""
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)
            server.fail(f"a participant failed: {error!r}")

    threads = [threading.Thread(target=run, args=(call,)) for call in (server.run, *calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if failures:
        raise failures[0]


def assert_bitwise_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []
