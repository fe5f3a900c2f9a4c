"""Other experts for a node in the middle of a run: its two banks are filled anew, and the moments move with the rows.

Experts that stay keep weights and moments bit for bit. A new one starts with moments of zero, as at the start of the
run; where its bank goes on, it shares the bank's count of steps, so AdamW no longer corrects its moments for their cold
start: its first update is (1 − β1)/√(1 − β2) of a full one, 0.45 with the default betas. Moments of an expert that
leaves are dropped: its new owner has none to go on from either. Moments that are not stored value by value (adamw_8bit)
start anew for the whole bank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spes_core.config import OptimConfig
from spes_core.model.decoder import Decoder
from spes_core.model.moe import Experts
from spes_core.train.optimizers import make_optimizer


@torch.no_grad()
def redivide(
    decoder: Decoder, optimizer: torch.optim.Optimizer, optim: OptimConfig, experts: tuple[int, ...]
) -> torch.optim.Optimizer:
    """Let ``decoder`` train ``experts`` from now on; the optimizer to go on with. Weights that become frozen are
    rounded to their new type, those that become trained have the precision that they had.

    Not for a decoder that ranks divide. A layer's old banks are freed before the next layer is looked at.
    """
    optimizer.zero_grad(set_to_none=True)
    states: dict[str, dict[str, Any]] = {}
    for name, parameter in decoder.named_parameters():
        if parameter in optimizer.state:
            states[name] = optimizer.state.pop(parameter)
    for index, layer in enumerate(decoder.layers):
        bank = layer.get_submodule("experts")
        assert isinstance(bank, Experts)
        before = bank.plan.trained
        bank.redivide(experts)
        for matrix in ("gate_up", "down"):
            name = f"layers.{index}.experts.trained_{matrix}"
            values = bank.get_parameter(f"trained_{matrix}") if experts else None
            states[name] = _moved(states.get(name, {}), before, experts, values)
    decoder.trained_experts = tuple(sorted(experts))
    fresh = make_optimizer(decoder, optim)
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad and states.get(name):
            fresh.state[parameter] = states[name]
    return fresh


def _moved(
    state: dict[str, Any], before: tuple[int, ...], after: tuple[int, ...], parameter: nn.Parameter | None
) -> dict[str, Any]:
    """The state of a trained bank after its rows changed; empty where nothing of it remains."""
    kept = [expert for expert in after if expert in before]
    if parameter is None or not kept:
        return {}
    moved: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            moved[key] = value
            continue
        if type(value) is not Tensor or value.shape != (len(before), *parameter.shape[1:]):
            return {}
        rows = value.new_zeros(parameter.shape)
        for expert in kept:
            rows[after.index(expert)] = value[before.index(expert)]
        moved[key] = rows
    return moved
