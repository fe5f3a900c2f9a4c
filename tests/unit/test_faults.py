"""What a node that misbehaves on purpose makes of its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spes_core.config import FaultsConfig, RunConfig
from spes_core.train.faults import Fault, make_fault
from spes_core.train.weights import LocalWeights
from tests.small_rounds import PlainDecoder, small_config

NODE = 1


def faulty(**settings: Any) -> tuple[RunConfig, PlainDecoder, Fault]:
    """A node with a fault that has just joined."""
    config = small_config(faults=FaultsConfig(node=NODE, **settings))
    decoder = PlainDecoder(config)
    fault = make_fault(LocalWeights(decoder.tensors()), NODE, config)
    assert fault is not None
    fault.remember()
    return config, decoder, fault


def copies(decoder: PlainDecoder) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in decoder.weights.items()}


def round_of(config: RunConfig, decoder: PlainDecoder, fault: Fault, round: int = 0) -> dict[str, torch.Tensor]:
    """Train and spoil; the update as it was trained."""
    before = copies(decoder)
    decoder.train(config, NODE, round)
    trained = copies(decoder)
    fault.apply(round)
    return {name: trained[name] - before[name] for name in before}


@pytest.mark.parametrize(("kind", "factor"), [("sign_flip", -3.0), ("scale", 3.0)])
def test_the_update_is_multiplied(kind: str, factor: float) -> None:
    config, decoder, fault = faulty(kind=kind, scale=3.0)
    before = copies(decoder)
    for name, update in round_of(config, decoder, fault).items():
        torch.testing.assert_close(copies(decoder)[name], before[name] + factor * update, rtol=0, atol=2e-6)


def test_noise_is_as_long_as_the_update_times_the_scale_and_points_elsewhere() -> None:
    config, decoder, fault = faulty(kind="noise", scale=2.5)
    before = copies(decoder)
    updates = round_of(config, decoder, fault)
    sent = {name: after - before[name] for name, after in copies(decoder).items()}
    for name, update in updates.items():
        assert float(sent[name].norm()) == pytest.approx(2.5 * float(update.norm()), rel=1e-5)
    everything, all_sent = (torch.cat([part.flatten() for part in parts.values()]) for parts in (updates, sent))
    assert abs(float(torch.dot(everything, all_sent) / everything.norm() / all_sent.norm())) < 0.1


@pytest.mark.parametrize("kind", ["noise", "sign_flip", "scale"])
def test_what_the_node_does_not_train_stays_bitwise(kind: str) -> None:
    """Also zeros of either sign: a node that changed what it does not send would have other weights than the rest."""
    config, decoder, fault = faulty(kind=kind, scale=4.0)
    frozen = [name for name in decoder.weights if not config.make_partition().trains(NODE, name)]
    decoder.weights[frozen[0]].flatten()[:2] = torch.tensor([0.0, -0.0])
    fault.remember()
    before = {name: decoder.weights[name].numpy().tobytes() for name in frozen}
    round_of(config, decoder, fault)
    assert frozen and all(decoder.weights[name].numpy().tobytes() == before[name] for name in frozen)


def test_noise_is_a_function_of_seed_node_round_and_tensor() -> None:
    def sent(seed: int, node: int, round: int) -> bytes:
        config = small_config(seed=seed, faults=FaultsConfig(kind="noise", node=node))
        decoder = PlainDecoder(config)
        fault = Fault(LocalWeights(decoder.tensors()), node, config)
        fault.remember()
        for tensor in decoder.weights.values():
            tensor += 1.0
        fault.apply(round)
        return b"".join(tensor.numpy().tobytes() for tensor in decoder.weights.values())

    assert sent(0, 0, 0) == sent(0, 0, 0)
    assert len({sent(0, 0, 0), sent(1, 0, 0), sent(0, 1, 0), sent(0, 0, 1)}) == 4


def test_equal_updates_of_two_tensors_get_different_noise() -> None:
    config = small_config(faults=FaultsConfig(kind="noise", node=0))
    tensors = {name: torch.zeros(50) for name in ("a", "b")}
    fault = Fault(LocalWeights(tensors), 0, config)
    fault.remember()
    for tensor in tensors.values():
        tensor += 1.0
    fault.apply(0)
    assert not torch.equal(tensors["a"], tensors["b"])


def test_the_fault_begins_with_its_round_and_is_against_the_newest_global_weights() -> None:
    config, decoder, fault = faulty(kind="sign_flip", scale=1.0, from_round=2)
    for round in (0, 1):
        before = copies(decoder)
        update = round_of(config, decoder, fault, round)
        for name, after in copies(decoder).items():
            assert torch.equal(after, before[name] + update[name])
        fault.remember()
    before = copies(decoder)
    update = round_of(config, decoder, fault, 2)
    for name, after in copies(decoder).items():
        torch.testing.assert_close(after, before[name] - update[name], rtol=0, atol=2e-6)


def test_other_nodes_and_runs_without_faults_have_none() -> None:
    config = small_config(faults=FaultsConfig(kind="noise", node=NODE))
    weights = LocalWeights({"a": torch.zeros(1)})
    assert make_fault(weights, NODE, config) is not None
    assert make_fault(weights, 0, config) is None
    assert make_fault(weights, NODE, small_config()) is None


def test_the_weights_are_written_through_their_own_interface() -> None:
    """Half-precision tensors are staged, so that writing into what was read would be lost."""
    config = small_config(faults=FaultsConfig(kind="sign_flip", node=0, scale=1.0))
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    fault = Fault(LocalWeights({"a": tensor}), 0, config)
    fault.remember()
    tensor += torch.tensor([1.0, 0.0, -2.0, 0.5])
    fault.apply(0)
    np.testing.assert_array_equal(tensor.float().numpy(), [-1.0, 0.0, 2.0, -0.5])
