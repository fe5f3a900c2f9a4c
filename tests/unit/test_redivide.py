"""A node that takes over experts starts them cleanly and keeps everything else bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spes_core.model.decoder import Decoder
from spes_core.node import build_decoder
from spes_core.train.optimizers import make_optimizer
from spes_core.train.redivide import redivide
from tests.equivalence.participants import CPU, RandomTokens, tiny


def trained(optim: dict[str, Any], frozen: str = "float32", experts: tuple[int, ...] = (0, 1)) -> tuple[Any, ...]:
    config = tiny(optim=optim, frozen={"dtype": frozen})
    decoder = build_decoder(config, experts, CPU)
    optimizer = make_optimizer(decoder, config.optim)
    take_steps(config, decoder, optimizer, 3)
    return config, decoder, optimizer


def take_steps(config: Any, decoder: Decoder, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        decoder(*RandomTokens(config).train_batch(step, 0, 1), config.loss).loss.backward()
        optimizer.step()


def moments(decoder: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """By parameter or, for the rows of banks, by expert tensor."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in decoder.named_parameters():
        state = {key: value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
        if "trained_" not in name:
            found[name] = state
            continue
        for row, expert in enumerate(decoder.trained_experts):
            rows = {key: value[row] for key, value in state.items() if value.dim() > 0}
            found[f"{name} {expert}"] = rows
    return found


@pytest.mark.parametrize("optim", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("after", [(1, 2), (0, 1, 2, 3), (0,), (2, 3)])
def test_weights_stay_and_moments_move_with_their_experts(optim: str, after: tuple[int, ...]) -> None:
    config, decoder, optimizer = trained({"name": optim})
    weights = {name: tensor.clone() for name, tensor in decoder.tensors().items()}
    before, stays = moments(decoder, optimizer), decoder.trained_experts
    optimizer = redivide(decoder, optimizer, config.optim, after)
    assert decoder.trained_experts == after
    for name, tensor in decoder.tensors().items():
        assert torch.equal(tensor, weights[name])
    found = moments(decoder, optimizer)
    for name, state in found.items():
        expert = int(name.split()[-1]) if " " in name else None
        if expert is None or expert in stays:
            assert state.keys() == before[name].keys(), name
            assert all(torch.equal(state[key], before[name][key]) for key in state), name
        else:
            assert not any(value.any() for value in state.values()), name
    take_steps(config, decoder, optimizer, 1)
    for name, tensor in decoder.tensors().items():
        is_frozen = ".experts." in name and int(name.split(".")[3]) not in after
        assert torch.equal(tensor, weights[name]) == is_frozen, name


def test_a_node_without_experts_and_back() -> None:
    config, decoder, optimizer = trained({"name": "adamw"})
    weights = {name: tensor.clone() for name, tensor in decoder.tensors().items()}
    before = moments(decoder, optimizer)
    optimizer = redivide(decoder, optimizer, config.optim, ())
    optimizer = redivide(decoder, optimizer, config.optim, (0, 1))
    for name, tensor in decoder.tensors().items():
        assert torch.equal(tensor, weights[name])
    found = moments(decoder, optimizer)
    assert all(not state for name, state in found.items() if "trained_" in name)
    shared = [name for name in found if "experts" not in name]
    assert shared and all(torch.equal(found[n]["exp_avg"], before[n]["exp_avg"]) for n in shared)


def test_what_becomes_frozen_is_rounded_to_its_type() -> None:
    config, decoder, optimizer = trained({"name": "adamw"}, frozen="bfloat16")
    weights = {name: tensor.clone() for name, tensor in decoder.tensors().items()}
    redivide(decoder, optimizer, config.optim, (1, 2))
    tensors = decoder.tensors()
    name = "layers.0.experts.{}.down".format
    assert tensors[name(0)].dtype == torch.bfloat16 and tensors[name(2)].dtype == torch.float32
    assert torch.equal(tensors[name(0)], weights[name(0)].bfloat16())
    assert torch.equal(tensors[name(2)], weights[name(2)].float())


def test_the_other_experts_compute_as_before() -> None:
    config, decoder, optimizer = trained({"name": "adamw"})
    tokens_BT, _ = RandomTokens(config).train_batch(9, 0, 1)
    before = decoder.logits(tokens_BT)
    redivide(decoder, optimizer, config.optim, (1, 3))
    assert torch.equal(decoder.logits(tokens_BT), before)
