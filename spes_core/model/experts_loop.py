"""Experts one after another, each through all of its work, so that what lies between two products stays in the cache.

Shape suffixes: N tokens, D d_model, E experts, K top_k, S = N·K token slots sorted by expert, I expert_hidden,
F = 2·I (gate rows first), X experts of one bank, R slots of one expert.

The way of CPUs. The hidden layer h = silu(gate)·up is made again in backward: one elementwise pass against S·I numbers
kept. The router's gradient is taken through h, so that the output of the experts need not be kept:
d weight = Σ_i h_i · (grad @ down)_i.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from spes_core.model.expert_plan import Banks, Gradients, Plan, combine, mm_into, sorted_slots


def loop_forward(
    x_ND: Tensor,
    weights_NK: Tensor,
    slots_S: Tensor,
    expert_tokens_E: Tensor,
    banks: Banks,
    plan: Plan,
    keep_hidden: bool,
) -> tuple[Tensor, Tensor | None]:
    """Experts are taken in the order of their index whatever their bank, so the partition changes no bit."""
    matrices, bounds = _matrices(plan, banks, x_ND.dtype), _bounds(expert_tokens_E.tolist())
    tokens_S, _ = sorted_slots(weights_NK, slots_S)
    # Where pre-activations are not kept, all experts share the rows of the busiest one.
    rows = len(slots_S) if keep_hidden else max(end - start for start, end in pairwise(bounds))
    pre_SF = x_ND.new_empty(rows, matrices[0].gate_up_FD.shape[0])
    y_SD = x_ND.new_empty(len(slots_S), x_ND.shape[1])
    for (gate_up_FD, down_DI), (start, end) in zip(matrices, pairwise(bounds), strict=True):
        if start == end:
            continue
        tokens_R, pre_RF = tokens_S[start:end], pre_SF[start:end] if keep_hidden else pre_SF[: end - start]
        torch.mm(x_ND.index_select(0, tokens_R), gate_up_FD.t(), out=pre_RF)
        torch.mm(_hidden(pre_RF), down_DI.t(), out=y_SD[start:end])
    return combine(y_SD, slots_S, weights_NK, weights_NK.shape[1]), pre_SF if keep_hidden else None


def loop_backward(
    grad_ND: Tensor,
    x_ND: Tensor,
    weights_NK: Tensor,
    slots_S: Tensor,
    expert_tokens_E: Tensor,
    pre_SF: Tensor | None,
    banks: Banks,
    plan: Plan,
) -> Gradients:
    """`loop_forward` backwards; without ``pre_SF`` its product is taken again."""
    grad_banks = [None if bank is None else torch.empty_like(bank) for bank in banks[:2]]
    grad_rows = dict(zip(plan.trained, _rows(*grad_banks), strict=True))
    tokens_S, slot_weights_S1 = sorted_slots(weights_NK, slots_S)
    grad_slot_weights_S1 = torch.empty_like(slot_weights_S1)
    grad_x_SD = x_ND.new_empty(len(slots_S), x_ND.shape[1])
    bounds = pairwise(_bounds(expert_tokens_E.tolist()))
    for expert, ((gate_up_FD, down_DI), (start, end)) in enumerate(
        zip(_matrices(plan, banks, x_ND.dtype), bounds, strict=True)
    ):
        grads = grad_rows.get(expert)
        if start == end:
            if grads is not None:  # zeros, not None: ranks that share gradients must all have one
                grads.gate_up_FD.zero_()
                grads.down_DI.zero_()
            continue
        tokens_R = tokens_S[start:end]
        x_RD = x_ND.index_select(0, tokens_R) if grads is not None or pre_SF is None else None
        pre_RF = x_RD.mm(gate_up_FD.t()) if pre_SF is None and x_RD is not None else pre_SF[start:end]  # type: ignore[index]
        grad_RD = grad_ND.index_select(0, tokens_R)
        grad_pre_RF, hidden_RI, grad_slot_weights_S1[start:end] = _hidden_backward(
            pre_RF, grad_RD.mm(down_DI), slot_weights_S1[start:end]
        )
        if grads is not None and x_RD is not None:
            mm_into(grads.down_DI, grad_RD.t(), hidden_RI.mul_(slot_weights_S1[start:end]))
            mm_into(grads.gate_up_FD, grad_pre_RF.t(), x_RD)
        torch.mm(grad_pre_RF, gate_up_FD, out=grad_x_SD[start:end])
    grad_x_ND = combine(grad_x_SD, slots_S, None, weights_NK.shape[1])
    grad_weights_S1 = torch.empty_like(grad_slot_weights_S1).index_copy_(0, slots_S, grad_slot_weights_S1)
    return Gradients(grad_x_ND, grad_weights_S1.view(weights_NK.shape), *grad_banks)


def _hidden(pre_RF: Tensor) -> Tensor:
    """silu(gate) · up, (R, I)."""
    gate_RI, up_RI = pre_RF.chunk(2, dim=1)
    return silu(gate_RI).mul_(up_RI)


def _hidden_backward(pre_RF: Tensor, grad_hidden_RI: Tensor, slot_weights_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From g = grad @ down (overwritten): d pre (R, F), h (R, I), d weight (R, 1).

    With h = silu(gate)·up: d weight = Σ_i g·h, and for q = weight·g: d gate = q·up·silu′(gate), d up = q·silu(gate).
    """
    gate_RI, up_RI = pre_RF.chunk(2, dim=1)
    silu_RI = silu(gate_RI)
    hidden_RI = silu_RI * up_RI
    grad_slot_weights_R1 = (grad_hidden_RI * hidden_RI).sum(1, keepdim=True)
    grad_hidden_RI.mul_(slot_weights_R1)
    grad_pre_RF = torch.empty_like(pre_RF)
    grad_gate_RI, grad_up_RI = grad_pre_RF.chunk(2, dim=1)
    torch.mul(grad_hidden_RI, silu_RI, out=grad_up_RI)
    torch.ops.aten.silu_backward.grad_input(grad_hidden_RI.mul_(up_RI), gate_RI, grad_input=grad_gate_RI)
    return grad_pre_RF, hidden_RI, grad_slot_weights_R1


class _Matrices(NamedTuple):
    """The two matrices of one expert, or their gradients."""

    gate_up_FD: Tensor
    down_DI: Tensor


def _rows(gate_up_XFD: Tensor | None, down_XDI: Tensor | None) -> list[_Matrices]:
    """The experts of one bank, apart; none when there is no bank."""
    if gate_up_XFD is None or down_XDI is None:
        return []
    return [_Matrices(*pair) for pair in zip(gate_up_XFD.unbind(0), down_XDI.unbind(0), strict=True)]


def _matrices(plan: Plan, banks: Banks, dtype: torch.dtype) -> list[_Matrices]:
    """The matrices of each expert, by index, in the dtype of the computation."""
    rows = dict(zip(plan.bank_order, [*_rows(*banks[:2]), *_rows(*banks[2:])], strict=True))
    return [_Matrices(*(matrix.to(dtype) for matrix in rows[expert])) for expert in range(plan.num_experts)]


def _bounds(sizes: list[int]) -> tuple[int, ...]:
    return (0, *accumulate(sizes))
