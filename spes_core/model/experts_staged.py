"""Experts stage by stage, all slots at once: products can be grouped in one kernel, elementwise stages compiled.

Shape suffixes: N tokens, D d_model, E experts, K top_k, S = N·K token slots sorted by expert, I expert_hidden,
F = 2·I (gate rows first), X experts of one bank, R slots of one expert, A and B widths of a product.

The way of GPUs and of compiled decoders. Equal to experts_loop up to rounding, and keeps the same for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from spes_core.model.expert_plan import Banks, Gradients, Plan, combine, mm_into, sorted_slots


class _Slots:
    """The slots of a staged layer: trained experts first; products of each bank's share with its matrices.

    On CUDA in bfloat16 the experts of a bank are one grouped product, whose bounds stay on the device; the host must
    know only where one bank ends and the next begins, so only a layer that has both asks. Elsewhere it is a loop.
    """

    def __init__(self, weights_NK: Tensor, slots_S: Tensor, expert_tokens_E: Tensor, banks: Banks, plan: Plan) -> None:
        self.tokens_S, self.weights_S1 = sorted_slots(weights_NK, slots_S)
        self._slots_S, self._top_k = slots_S, weights_NK.shape[1]
        self._num_trained, self._num_frozen = len(plan.trained), plan.num_experts - len(plan.trained)
        tokens_E = expert_tokens_E
        if self._num_trained and self._num_frozen:
            tokens_E = tokens_E.index_select(0, torch.tensor(plan.bank_order, device=tokens_E.device))
        self._ends_E = tokens_E.cumsum(0).to(torch.int32)
        if self._num_trained and self._num_frozen:
            self._split = int(self._ends_E[self._num_trained - 1])
        else:
            self._split = len(slots_S) if self._num_trained else 0
        self._bounds: tuple[int, ...] | None = None

    def products(self, a_SA: Tensor, trained_XBA: Tensor | None, frozen_XBA: Tensor | None) -> Tensor:
        """Each row times the transpose of its expert's matrix, (S, B)."""
        width = (trained_XBA if trained_XBA is not None else frozen_XBA).shape[1]  # type: ignore[union-attr]
        output_SB = a_SA.new_empty(len(a_SA), width)
        first, last = self._ends_E[: self._num_trained], self._ends_E[self._num_trained :] - self._split
        for bank_XBA, part, ends_X, row in (
            (trained_XBA, slice(0, self._split), first, 0),
            (frozen_XBA, slice(self._split, len(a_SA)), last, self._num_trained),
        ):
            if bank_XBA is None:
                continue
            if _can_group(a_SA):
                right_XAB = bank_XBA.to(a_SA.dtype).transpose(1, 2)
                output_SB[part] = grouped_mm(a_SA[part], right_XAB, offs=ends_X)
                continue
            for matrix_BA, (start, end) in zip(
                bank_XBA.unbind(0), self._expert_bounds(row, len(bank_XBA)), strict=True
            ):
                if start < end:
                    torch.mm(a_SA[start:end], matrix_BA.to(a_SA.dtype).t(), out=output_SB[start:end])
        return output_SB

    def weight_gradient(self, left_SA: Tensor, right_SB: Tensor, like_XAB: Tensor | None) -> Tensor | None:
        """leftᵀ @ right over the rows of each trained expert, in the dtype of its weights; None without any."""
        if like_XAB is None:
            return None
        if _can_group(left_SA):
            rows = slice(0, self._split)
            ends_X = self._ends_E[: self._num_trained]
            return grouped_mm(left_SA[rows].t(), right_SB[rows], offs=ends_X).to(like_XAB.dtype)
        gradient_XAB = torch.empty_like(like_XAB)
        for gradient_AB, (start, end) in zip(
            gradient_XAB.unbind(0), self._expert_bounds(0, len(like_XAB)), strict=True
        ):
            if start == end:
                gradient_AB.zero_()
            else:
                mm_into(gradient_AB, left_SA[start:end].t(), right_SB[start:end])
        return gradient_XAB

    def combine(self, y_SD: Tensor) -> Tensor:
        """Sum of each token's slots in the order of its choices, (N, D): no bit depends on who trains what."""
        return combine(y_SD, self._slots_S, None, self._top_k)

    def unsort(self, values_S1: Tensor) -> Tensor:
        """Values of the slots by token and choice, (N, K)."""
        return torch.empty_like(values_S1).index_copy_(0, self._slots_S, values_S1).view(-1, self._top_k)

    def _expert_bounds(self, first: int, count: int) -> list[tuple[int, int]]:
        if self._bounds is None:
            self._bounds = (0, *self._ends_E.tolist())
        return list(pairwise(self._bounds[first : first + count + 1]))


def _can_group(a_SA: Tensor) -> bool:
    return a_SA.is_cuda and a_SA.dtype == torch.bfloat16


def staged_forward(
    x_ND: Tensor,
    weights_NK: Tensor,
    slots_S: Tensor,
    expert_tokens_E: Tensor,
    banks: Banks,
    plan: Plan,
    keep_hidden: bool,
) -> tuple[Tensor, Tensor | None]:
    """The output (N, D), and the pre-activations (S, F) when they are to be kept."""
    slots = _Slots(weights_NK, slots_S, expert_tokens_E, banks, plan)
    pre_SF = slots.products(x_ND.index_select(0, slots.tokens_S), banks[0], banks[2])
    hidden_SI = _stage(_weighted_hidden, plan)(pre_SF, slots.weights_S1)
    output_ND = slots.combine(slots.products(hidden_SI, banks[1], banks[3]))
    return output_ND, pre_SF if keep_hidden else None


def staged_backward(
    grad_ND: Tensor,
    x_ND: Tensor,
    weights_NK: Tensor,
    slots_S: Tensor,
    expert_tokens_E: Tensor,
    pre_SF: Tensor | None,
    banks: Banks,
    plan: Plan,
) -> Gradients:
    """`staged_forward` backwards; without ``pre_SF`` its product is taken again."""
    gate_up_XFD, down_XDI, frozen_gate_up_XFD, frozen_down_XDI = banks
    slots = _Slots(weights_NK, slots_S, expert_tokens_E, banks, plan)
    x_SD = x_ND.index_select(0, slots.tokens_S)
    if pre_SF is None:
        pre_SF = slots.products(x_SD, gate_up_XFD, frozen_gate_up_XFD)
    grad_SD = grad_ND.index_select(0, slots.tokens_S)
    grad_hidden_SI = slots.products(grad_SD, _turned(down_XDI), _turned(frozen_down_XDI))
    grad_pre_SF, hidden_SI, grad_weights_S1 = _stage(_hidden_backward, plan)(pre_SF, grad_hidden_SI, slots.weights_S1)
    grad_down_XDI = slots.weight_gradient(grad_SD, hidden_SI, down_XDI)
    grad_gate_up_XFD = slots.weight_gradient(grad_pre_SF, x_SD, gate_up_XFD)
    grad_x_SD = slots.products(grad_pre_SF, _turned(gate_up_XFD), _turned(frozen_gate_up_XFD))
    return Gradients(slots.combine(grad_x_SD), slots.unsort(grad_weights_S1), grad_gate_up_XFD, grad_down_XDI)


def _turned(bank_XAB: Tensor | None) -> Tensor | None:
    return None if bank_XAB is None else bank_XAB.transpose(1, 2)


def _weighted_hidden(pre_SF: Tensor, weights_S1: Tensor) -> Tensor:
    """weight · silu(gate) · up, (S, I); nothing is written in place, so that it can be compiled into one pass."""
    gate_SI, up_SI = _wide(pre_SF).chunk(2, dim=1)
    return (silu(gate_SI) * up_SI * weights_S1).to(pre_SF.dtype)


def _hidden_backward(pre_SF: Tensor, grad_hidden_SI: Tensor, weights_S1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From g = grad @ down: d pre (S, F), weight·h (S, I), d weight (S, 1); see experts_loop for the equations."""
    gate_SI, up_SI = _wide(pre_SF).chunk(2, dim=1)
    sigmoid_SI, grad_SI = gate_SI.sigmoid(), _wide(grad_hidden_SI)
    silu_SI = gate_SI * sigmoid_SI
    hidden_SI = silu_SI * up_SI
    grad_weights_S1 = (grad_SI * hidden_SI).sum(1, keepdim=True)
    grad_SI = grad_SI * weights_S1
    grad_gate_SI = grad_SI * up_SI * (sigmoid_SI * (1 + gate_SI * (1 - sigmoid_SI)))
    grad_pre_SF = torch.cat((grad_gate_SI, grad_SI * silu_SI), dim=1).to(pre_SF.dtype)
    return grad_pre_SF, (hidden_SI * weights_S1).to(pre_SF.dtype), grad_weights_S1


def _wide(values: Tensor) -> Tensor:
    """In fp32, or better where they are."""
    return values if values.dtype == torch.float64 else values.float()


def _stage(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    return _compiled(function) if plan.compiled else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
