"""The experts of one layer as one differentiable function: for eager autograd, and as an operator for compiled code.

Shape suffixes: N tokens, D d_model, E experts, K top_k, S = N·K token slots sorted by expert, I expert_hidden,
F = 2·I (gate rows first), X experts of one bank, R slots of one expert.

For a frozen expert the backward pass computes the gradient of its input and of its router weight, and never the
product that would give its weights' gradient. Saved for backward are the input (which the router saves as well), the
router weights, the slot order and the pre-activations of gate and up, (S, F), unless they are to be made again
(`Plan.keep_hidden`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spes_core.model.expert_plan import Banks, Gradients, Plan
from spes_core.model.experts_loop import loop_backward, loop_forward
from spes_core.model.experts_staged import staged_backward, staged_forward


def run_experts(
    x_ND: Tensor, weights_NK: Tensor, slots_S: Tensor, expert_tokens_E: Tensor, banks: Banks, plan: Plan
) -> Tensor:
    """Σ_k weight · expert(x) for each token, (N, D); differentiable in x, the router weights and the trained bank.

    ``slots_S`` comes from ``plan.sort_slots``; slot n·K + k is the k-th choice of token n.
    """
    if torch.compiler.is_compiling():
        kept = plan.keep_hidden and torch.is_grad_enabled()
        of_plan = (list(plan.trained), kept, plan.staged, plan.compiled)
        compiled_ND: Tensor = _operator(x_ND, weights_NK, slots_S, expert_tokens_E, *banks, *of_plan)[0]
        return compiled_ND
    output: Tensor = _ExpertsFunction.apply(  # type: ignore[no-untyped-call]
        x_ND, weights_NK, slots_S, expert_tokens_E, plan, torch.is_grad_enabled(), *banks
    )
    return output


class _ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weights_NK: Tensor,
        slots_S: Tensor,
        expert_tokens_E: Tensor,
        plan: Plan,
        with_gradients: bool,
        *banks: Tensor | None,
    ) -> Tensor:
        keep = with_gradients and plan.keep_hidden
        output_ND, pre_SF = _forward(x_ND, weights_NK, slots_S, expert_tokens_E, banks, plan, keep)
        ctx.plan = plan
        ctx.save_for_backward(x_ND, weights_NK, slots_S, expert_tokens_E, pre_SF, *banks)
        return output_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Any, ...]:
        x_ND, weights_NK, slots_S, expert_tokens_E, pre_SF, *banks = ctx.saved_tensors
        grads = _backward(grad_ND, x_ND, weights_NK, slots_S, expert_tokens_E, pre_SF, banks, ctx.plan)
        return grads.x_ND, grads.weights_NK, None, None, None, None, grads.gate_up_XFD, grads.down_XDI, None, None


def _forward(
    x_ND: Tensor, weights_NK: Tensor, slots_S: Tensor, tokens_E: Tensor, banks: Banks, plan: Plan, keep_hidden: bool
) -> tuple[Tensor, Tensor | None]:
    """The output, and the pre-activations (S, F) when they are to be kept."""
    run = staged_forward if plan.staged else loop_forward
    return run(x_ND, weights_NK, slots_S, tokens_E, banks, plan, keep_hidden)


def _backward(
    grad_ND: Tensor,
    x_ND: Tensor,
    weights_NK: Tensor,
    slots_S: Tensor,
    tokens_E: Tensor,
    pre_SF: Tensor | None,
    banks: Banks,
    plan: Plan,
) -> Gradients:
    run = staged_backward if plan.staged else loop_backward
    return run(grad_ND, x_ND, weights_NK, slots_S, tokens_E, pre_SF, banks, plan)


_SCHEMA = "Tensor x, Tensor weights, Tensor slots, Tensor tokens"
_SCHEMA_BANKS = "Tensor? gate_up, Tensor? down, Tensor? frozen_gate_up, Tensor? frozen_down"
_SCHEMA_PLAN = "int[] trained, bool keep_hidden, bool staged, bool compiled"


@torch.library.custom_op(
    "spes::experts",
    mutates_args=(),
    schema=f"({_SCHEMA}, {_SCHEMA_BANKS}, {_SCHEMA_PLAN}) -> (Tensor, Tensor)",
)
def _operator(
    x: Tensor,
    weights: Tensor,
    slots: Tensor,
    tokens: Tensor,
    gate_up: Tensor | None,
    down: Tensor | None,
    frozen_gate_up: Tensor | None,
    frozen_down: Tensor | None,
    trained: list[int],
    keep_hidden: bool,
    staged: bool,
    compiled: bool,
) -> tuple[Tensor, Tensor]:
    """`run_experts` as one opaque operator; the second result is what is kept (empty: nothing)."""
    plan = Plan(tuple(trained), len(tokens), keep_hidden, staged, compiled)
    banks = (gate_up, down, frozen_gate_up, frozen_down)
    output_ND, pre_SF = _forward(x, weights, slots, tokens, banks, plan, keep_hidden)
    return output_ND, x.new_empty(0) if pre_SF is None else pre_SF


@_operator.register_fake
def _(
    x: Tensor,
    weights: Tensor,
    slots: Tensor,
    tokens: Tensor,
    gate_up: Tensor | None,
    down: Tensor | None,
    frozen_gate_up: Tensor | None,
    frozen_down: Tensor | None,
    trained: list[int],
    keep_hidden: bool,
    staged: bool,
    compiled: bool,
) -> tuple[Tensor, Tensor]:
    bank = gate_up if gate_up is not None else frozen_gate_up
    assert bank is not None
    return torch.empty_like(x), x.new_empty((slots.shape[0], bank.shape[1]) if keep_hidden else 0)


@torch.library.custom_op(
    "spes::experts_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_SCHEMA}, Tensor pre, {_SCHEMA_BANKS}, {_SCHEMA_PLAN}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_operator(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    slots: Tensor,
    tokens: Tensor,
    pre: Tensor,
    gate_up: Tensor | None,
    down: Tensor | None,
    frozen_gate_up: Tensor | None,
    frozen_down: Tensor | None,
    trained: list[int],
    keep_hidden: bool,
    staged: bool,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = Plan(tuple(trained), len(tokens), keep_hidden, staged, compiled)
    banks = (gate_up, down, frozen_gate_up, frozen_down)
    grads = _backward(grad, x, weights, slots, tokens, pre if keep_hidden else None, banks, plan)
    nothing = x.new_empty(0)
    of_banks = (nothing if item is None else item for item in (grads.gate_up_XFD, grads.down_XDI))
    return grads.x_ND, grads.weights_NK, *of_banks  # type: ignore[return-value]


@_backward_operator.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    slots: Tensor,
    tokens: Tensor,
    pre: Tensor,
    gate_up: Tensor | None,
    down: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_banks = (x.new_empty(0) if bank is None else torch.empty_like(bank) for bank in (gate_up, down))
    return torch.empty_like(x), torch.empty_like(weights), *of_banks  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.plan = inputs[:8], inputs[8:]
    ctx.save_for_backward(*tensors[:4], output[1], *tensors[4:])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, slots, tokens, pre, *banks = ctx.saved_tensors
    grads = _backward_operator(grad, x, weights, slots, tokens, pre, *banks, *ctx.plan)
    of_banks = (None if bank is None else item for bank, item in zip(banks[:2], grads[2:], strict=True))
    return *grads[:2], None, None, *of_banks, *[None] * 6


_operator.register_autograd(_differentiate, setup_context=_keep)
