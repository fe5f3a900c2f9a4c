"""Mixture-of-Experts layer: a top-k router without token dropping, and SwiGLU experts in two stacked banks.

Shape suffixes: N tokens, D d_model, E experts, K top_k, S = N·K token slots sorted by expert, I expert_hidden,
F = 2·I (gate rows first), X experts of one bank, R slots of one expert.

The *trained* bank is a parameter; the *frozen* bank takes no gradient. For a frozen expert the backward pass computes
the gradient of its input and of its router weight, and never the product that would give its weights' gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from spes_core.config import ModelConfig


class AllRanks(NamedTuple):
    """The processes that divide a batch, as far as the model must know them: to count tokens over all of it."""

    size: int
    """Number of processes; each has equally many tokens."""
    total: Callable[[Tensor], Tensor]
    """Sum of a tensor over the processes."""


class Routing(NamedTuple):
    """What the router decides for N tokens."""

    weights_NK: Tensor
    """Weight of each chosen expert, descending; differentiable."""
    experts_NK: Tensor
    """Chosen experts, int64."""
    expert_tokens_E: Tensor
    """Tokens sent to each expert, int64; sums to N·K."""
    balance_loss: Tensor
    """E · Σ_e f_e·p_e / K with f_e = expert_tokens_e / N and p_e the mean router probability: 1 when uniform.

    Where several processes divide the batch, f_e counts the tokens of all: the mean of this loss over the processes,
    and of its gradient, is then that of the whole batch, however it is divided."""
    router_z_loss: Tensor
    """Mean over tokens of logsumexp(router logits)²."""


def route(logits_NE: Tensor, top_k: int, normalize: bool, all_ranks: AllRanks | None = None) -> Routing:
    """Softmax in fp32 (or better), then the ``top_k`` largest; ``normalize`` rescales their weights to sum to one."""
    return Routing(*_Route.apply(logits_NE, top_k, normalize, all_ranks))  # type: ignore[no-untyped-call]


class _Route(torch.autograd.Function):
    """The router behind its logits, with one backward: a chain of small operations would cost several times more."""

    @staticmethod
    def forward(
        ctx: Any, logits_NE: Tensor, top_k: int, normalize: bool, all_ranks: AllRanks | None
    ) -> tuple[Tensor, ...]:
        logits_NE = logits_NE if logits_NE.dtype == torch.float64 else logits_NE.float()
        num_tokens, num_experts = logits_NE.shape
        log_partition_N1 = logits_NE.logsumexp(-1, keepdim=True)
        probabilities_NE = (logits_NE - log_partition_N1).exp_()
        weights_NK, experts_NK = probabilities_NE.topk(top_k, dim=-1)
        if normalize:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        flat_S = experts_NK.reshape(-1)
        expert_tokens_E = flat_S.new_zeros(num_experts).scatter_add_(0, flat_S, torch.ones_like(flat_S))
        batch_tokens_E, batch_tokens = expert_tokens_E, num_tokens
        if all_ranks is not None:
            batch_tokens_E, batch_tokens = all_ranks.total(expert_tokens_E), num_tokens * all_ranks.size
        fraction_E = batch_tokens_E / batch_tokens
        scale = num_experts / top_k
        balance_loss = (fraction_E * probabilities_NE.mean(0)).sum() * scale
        router_z_loss = log_partition_N1.square().mean()
        ctx.top_k, ctx.normalize, ctx.batch_tokens = top_k, normalize, batch_tokens
        ctx.save_for_backward(probabilities_NE, log_partition_N1, experts_NK, batch_tokens_E)
        ctx.mark_non_differentiable(experts_NK, expert_tokens_E)
        return weights_NK, experts_NK, expert_tokens_E, balance_loss, router_z_loss

    @staticmethod
    def backward(ctx: Any, grad_weights_NK: Tensor, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """d logit = p·(dp − Σ p·dp) + p·dz·2·z/N, where dp collects the chosen weights and the balance loss."""
        probabilities_NE, log_partition_N1, experts_NK, batch_tokens_E = ctx.saved_tensors
        _, _, grad_balance, grad_z = grads
        num_tokens, num_experts = probabilities_NE.shape
        if ctx.normalize:
            chosen_NK = probabilities_NE.gather(1, experts_NK)
            total_N1 = chosen_NK.sum(-1, keepdim=True)
            mean_N1 = (grad_weights_NK * chosen_NK).sum(-1, keepdim=True) / total_N1
            grad_weights_NK = (grad_weights_NK - mean_N1) / total_N1
        scale = num_experts / (ctx.top_k * num_tokens * ctx.batch_tokens)
        per_expert_E = grad_balance * batch_tokens_E * scale
        grad_NE = per_expert_E.expand(num_tokens, -1).contiguous().scatter_add_(1, experts_NK, grad_weights_NK)
        grad_NE.mul_(probabilities_NE)
        offset_N1 = log_partition_N1 * (grad_z * 2 / num_tokens) - grad_NE.sum(-1, keepdim=True)
        return grad_NE.addcmul_(probabilities_NE, offset_N1), None, None, None


class Experts(nn.Module):
    """The experts of one layer in two banks, ``trained_*`` and ``frozen_*``; a bank without experts is None.

    ``trained_experts`` (ascending) are the indices of the trained ones; row x of a bank is its x-th expert.
    """

    def __init__(self, config: ModelConfig, trained_experts: Sequence[int]) -> None:
        super().__init__()
        trained = tuple(trained_experts)
        frozen = tuple(expert for expert in range(config.num_experts) if expert not in trained)
        self.locations = _locations(trained, frozen)
        for bank, experts in (("trained", trained), ("frozen", frozen)):
            shapes = {
                "gate_up": (len(experts), 2 * config.expert_hidden, config.d_model),
                "down": (len(experts), config.d_model, config.expert_hidden),
            }
            for matrix, shape in shapes.items():
                parameter = nn.Parameter(torch.empty(shape), requires_grad=bank == "trained") if experts else None
                self.register_parameter(f"{bank}_{matrix}", parameter)

    def forward(self, x_ND: Tensor, routing: Routing) -> Tensor:
        """Σ_k weight · expert(x) for each token, (N, D)."""
        slots_S = routing.experts_NK.reshape(-1).argsort(stable=True)
        # Slices need their bounds on the host: the one device-to-host copy of a step on a GPU.
        bounds = (0, *accumulate(routing.expert_tokens_E.tolist()))
        banks = (self.trained_gate_up, self.trained_down, self.frozen_gate_up, self.frozen_down)
        output_ND: Tensor = _ExpertsFunction.apply(  # type: ignore[no-untyped-call]
            x_ND, routing.weights_NK, slots_S, bounds, self.locations, *banks
        )
        return output_ND

    def tensor(self, expert: int, matrix: str) -> Tensor:
        """A view of one matrix ("gate_up" or "down") of one expert, detached, sharing storage."""
        bank, row = self.bank_of(expert, matrix)
        return bank.detach()[row]

    def bank_of(self, expert: int, matrix: str) -> tuple[nn.Parameter, int]:
        """The bank that holds one matrix of one expert, and its row there."""
        is_trained, row = self.locations[expert]
        return self.get_parameter(f"{'trained' if is_trained else 'frozen'}_{matrix}"), row


Locations = tuple[tuple[bool, int], ...]
"""For each expert: whether it is in the trained bank, and its row there."""


def _locations(trained: tuple[int, ...], frozen: tuple[int, ...]) -> Locations:
    rows = {expert: (True, row) for row, expert in enumerate(trained)}
    rows |= {expert: (False, row) for row, expert in enumerate(frozen)}
    return tuple(rows[expert] for expert in range(len(rows)))


class _ExpertsFunction(torch.autograd.Function):
    """Expert by expert over its slice of the sorted slots, so that what lies between two products stays in the cache.

    Saved for backward: the input (which the router saves as well), the router weights, the slot order and the
    pre-activations of gate and up, (S, F). The hidden layer h = silu(gate)·up is made again in backward: one
    elementwise pass against S·I numbers kept. Router weights scale h, not the output, so that the output of the
    experts is not needed for the router's gradient: d weight = Σ_i h_i · (grad @ down)_i.

    Experts are taken in the order of their index whatever their bank, so the partition changes no bit of what all
    nodes compute. Kernels that take all experts at once (grouped_mm) fit in place of the two loops.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weights_NK: Tensor,
        slots_S: Tensor,
        bounds: tuple[int, ...],
        locations: Locations,
        *banks: Tensor | None,
    ) -> Tensor:
        matrices = _by_expert(locations, banks, x_ND.dtype)
        tokens_S, slot_weights_S1 = _sorted_slots(weights_NK, slots_S)
        pre_SF = x_ND.new_empty(len(slots_S), matrices[0].gate_up_FD.shape[0])
        output_ND = torch.zeros_like(x_ND)
        for (gate_up_FD, down_DI), (start, end) in zip(matrices, pairwise(bounds), strict=True):
            if start == end:
                continue
            tokens_R, pre_RF = tokens_S[start:end], pre_SF[start:end]
            torch.mm(x_ND.index_select(0, tokens_R), gate_up_FD.t(), out=pre_RF)
            gate_RI, up_RI = pre_RF.chunk(2, dim=1)
            hidden_RI = silu(gate_RI).mul_(up_RI).mul_(slot_weights_S1[start:end])
            output_ND.index_add_(0, tokens_R, hidden_RI.mm(down_DI.t()))
        ctx.bounds, ctx.locations = bounds, locations
        ctx.save_for_backward(x_ND, weights_NK, slots_S, pre_SF, *banks)
        return output_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Any, ...]:
        x_ND, weights_NK, slots_S, pre_SF, *banks = ctx.saved_tensors
        grad_banks = [None if bank is None else torch.empty_like(bank) for bank in banks[:2]]
        grad_rows = _rows(*grad_banks)
        tokens_S, slot_weights_S1 = _sorted_slots(weights_NK, slots_S)
        grad_slot_weights_S, grad_x_ND = x_ND.new_empty(len(slots_S)), torch.zeros_like(x_ND)
        experts = zip(_by_expert(ctx.locations, banks, x_ND.dtype), ctx.locations, pairwise(ctx.bounds), strict=True)
        for (gate_up_FD, down_DI), (is_trained, row), (start, end) in experts:
            grads = grad_rows[row] if is_trained else None
            if start == end:
                if grads is not None:  # zeros, not None: ranks that share gradients must all have one
                    grads.gate_up_FD.zero_()
                    grads.down_DI.zero_()
                continue
            tokens_R = tokens_S[start:end]
            grad_pre_RF = _expert_backward(
                grad_ND.index_select(0, tokens_R),
                pre_SF[start:end],
                down_DI,
                slot_weights_S1[start:end],
                grad_slot_weights_S[start:end],
                None if grads is None else grads.down_DI,
            )
            if grads is not None:
                torch.mm(grad_pre_RF.t(), x_ND.index_select(0, tokens_R), out=grads.gate_up_FD)
            grad_x_ND.index_add_(0, tokens_R, grad_pre_RF.mm(gate_up_FD))
        grad_weights_S = torch.empty_like(grad_slot_weights_S).index_copy_(0, slots_S, grad_slot_weights_S)
        return grad_x_ND, grad_weights_S.view(weights_NK.shape), None, None, None, *grad_banks, None, None


def _expert_backward(
    grad_RD: Tensor,
    pre_RF: Tensor,
    down_DI: Tensor,
    slot_weights_R1: Tensor,
    grad_slot_weights_R: Tensor,
    grad_down_DI: Tensor | None,
) -> Tensor:
    """Backward of one expert down to its pre-activations: returns d pre (R, F), fills the last two (None: frozen).

    With h = silu(gate)·up and g = grad @ down: d weight = Σ_i g·h, d down = gradᵀ @ (weight·h), and for
    q = weight·g: d gate = q·up·silu′(gate), d up = q·silu(gate).
    """
    gate_RI, up_RI = pre_RF.chunk(2, dim=1)
    silu_RI = silu(gate_RI)
    hidden_RI = silu_RI * up_RI
    grad_hidden_RI = grad_RD.mm(down_DI)
    torch.sum(grad_hidden_RI * hidden_RI, 1, out=grad_slot_weights_R)
    if grad_down_DI is not None:
        torch.mm(grad_RD.t(), hidden_RI.mul_(slot_weights_R1), out=grad_down_DI)
    grad_hidden_RI.mul_(slot_weights_R1)
    grad_pre_RF = torch.empty_like(pre_RF)
    grad_gate_RI, grad_up_RI = grad_pre_RF.chunk(2, dim=1)
    torch.mul(grad_hidden_RI, silu_RI, out=grad_up_RI)
    torch.ops.aten.silu_backward.grad_input(grad_hidden_RI.mul_(up_RI), gate_RI, grad_input=grad_gate_RI)
    return grad_pre_RF


class _Matrices(NamedTuple):
    """The two matrices of one expert, or their gradients."""

    gate_up_FD: Tensor
    down_DI: Tensor


def _rows(gate_up_XFD: Tensor | None, down_XDI: Tensor | None) -> list[_Matrices]:
    """The experts of one bank, apart; none when there is no bank."""
    if gate_up_XFD is None or down_XDI is None:
        return []
    return [_Matrices(*pair) for pair in zip(gate_up_XFD.unbind(0), down_XDI.unbind(0), strict=True)]


def _by_expert(locations: Locations, banks: Sequence[Tensor | None], dtype: torch.dtype) -> list[_Matrices]:
    """The matrices of each expert in the dtype of the computation, from the banks (trained pair, frozen pair)."""
    trained, frozen = _rows(*banks[:2]), _rows(*banks[2:])
    found = [(trained if is_trained else frozen)[row] for is_trained, row in locations]
    return [_Matrices(*(matrix.to(dtype) for matrix in pair)) for pair in found]


def _sorted_slots(weights_NK: Tensor, slots_S: Tensor) -> tuple[Tensor, Tensor]:
    """Token (S,) and router weight (S, 1) of each slot in sorted order; slot n·K + k is the k-th choice of token n."""
    tokens_S = slots_S.div(weights_NK.shape[1], rounding_mode="floor")
    return tokens_S, weights_NK.reshape(-1, 1).index_select(0, slots_S)
