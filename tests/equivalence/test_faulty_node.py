"""One node of five turns its updates round: what becomes of the global model under each rule of aggregation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spes_core.config import RunConfig
from spes_core.model.counting import tensor_shapes
from spes_core.node import build_decoder, flat_initial_weights
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import schema_of
from spes_core.sync.parameter_server import ParameterServer
from spes_core.train.validate import validate
from tests.equivalence.participants import (
    CPU,
    RandomTokens,
    assert_bitwise_equal,
    node_training,
    run_together,
    tiny,
)
from tests.small_rounds import Recorder

NODES, FAULTY = 5, 4
FULL = {"kind": "full"}
FLIPPED = {"kind": "sign_flip", "node": FAULTY, "scale": 5.0}


class Sequences(RandomTokens):
    """After each token comes one that it determines, of 40 in all: a few steps learn it."""

    def _sequences(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = [torch.randint(40, (count,), generator=generator)]
        for _ in range(self._config.data.sequence_length):
            tokens.append((tokens[-1] * 7 + 3) % 40)
        window = torch.stack(tokens, dim=1)
        return window[:, :-1], window[:, 1:]


def five(**changes: object) -> RunConfig:
    """Five nodes, eight rounds of five steps."""
    settings: dict[str, object] = {
        "nodes": NODES,
        "budget_tokens": 40 * 20 * 16,
        "data": {"global_batch_sequences": 20},
        "model": {"num_experts": 5},
        "merge": {"enabled": False},
        "optim": {"lr": 1e-2},
        "validation": {"max_sequences": 10},
        "checkpoint": {"interval_rounds": 0},
    }
    return tiny(**{**settings, **changes})


def loss_of(config: RunConfig, weights: dict[str, Tensor]) -> float:
    decoder = build_decoder(config, range(config.model.num_experts), CPU)
    with torch.no_grad():
        for name, tensor in decoder.tensors().items():
            tensor.copy_(weights[name])
    sums = validate(decoder, Sequences(config).validation_batches(0, 1, 8, 16), config.loss, CPU)[""]
    return float(sums.loss_sum_nats) / sums.target_tokens


def train(config: RunConfig, folder: Path) -> tuple[float, Recorder]:
    """The loss of the global model after all rounds, with which every node ends, and the server's events."""
    folder.mkdir(exist_ok=True)
    recorder = Recorder()
    schema = schema_of(tensor_shapes(config.model))
    server = ParameterServer(config, schema, flat_initial_weights(config), recorder, folder / "rounds")
    trainings = [
        node_training(
            config,
            node,
            build_decoder(config, config.make_partition().experts_by_node[node], CPU),
            LocalClient(server),
            folder,
            Sequences(config),
        )
        for node in range(NODES)
    ]
    run_together(server, [training.run for training in trainings])
    weights = [training.decoder.tensors() for training in trainings]
    for others in weights[1:]:
        assert_bitwise_equal(weights[0], others)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights[0].values())
    return loss_of(config, weights[0]), recorder


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss without any fault."""
    return train(five(partition=FULL), tmp_path_factory.mktemp("healthy"))[0]


@pytest.fixture(scope="module")
def untrained() -> float:
    config = five(partition=FULL)
    return loss_of(config, build_decoder(config, range(5), CPU).tensors())


def test_under_the_mean_one_node_keeps_all_from_learning(tmp_path: Path, healthy: float, untrained: float) -> None:
    """So that the tests below show the rules at work, and not a fault that does no harm."""
    assert healthy < untrained - 2.0
    loss, _ = train(five(partition=FULL, faults=FLIPPED), tmp_path)
    assert loss > untrained - 0.5


@pytest.mark.parametrize("rule", ["clipped", "trimmed", "median"])
def test_under_a_robust_rule_the_loss_falls_in_spite_of_it(
    tmp_path: Path, healthy: float, untrained: float, rule: str
) -> None:
    loss, recorder = train(five(partition=FULL, faults=FLIPPED, aggregate={"rule": rule}), tmp_path)
    assert healthy - 0.1 < loss < untrained - 0.6 * (untrained - healthy)
    assert not recorder.of("quarantine")


@pytest.mark.parametrize("partition", [FULL, {"kind": "sparse"}], ids=["full", "sparse"])
@pytest.mark.parametrize("kind", ["sign_flip", "noise"])
def test_quarantine_names_the_node_and_keeps_its_nonsense_out(
    tmp_path: Path, untrained: float, partition: dict[str, str], kind: str
) -> None:
    """Also of its own experts, which keep their first values; it goes on from the global weights in each round."""
    config = five(partition=partition, faults={**FLIPPED, "kind": kind}, aggregate={"quarantine_factor": 3.0})
    loss, recorder = train(config, tmp_path)
    events = [(event["node"], event["round"]) for event in recorder.of("quarantine")]
    assert events == [(FAULTY, round) for round in range(8)]
    for event in recorder.of("round"):
        assert (event["nodes"], event["quarantined"]) == ([0, 1, 2, 3], [FAULTY])
        assert event["uplink_payload_bytes"][FAULTY] > 0, "it did send, though in vain"
    assert loss < untrained - 1.5


def test_no_rule_protects_the_experts_that_only_the_faulty_node_trains(tmp_path: Path) -> None:
    """With a sparse partition the loss stays above that of quarantine, whatever the rule."""
    sparse = {"kind": "sparse"}
    kept_out, _ = train(five(partition=sparse, faults=FLIPPED, aggregate={"quarantine_factor": 3.0}), tmp_path / "a")
    loss, _ = train(five(partition=sparse, faults=FLIPPED, aggregate={"rule": "median"}), tmp_path / "b")
    assert loss > kept_out
