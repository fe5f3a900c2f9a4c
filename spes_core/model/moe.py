"""Mixture-of-Experts layer: a top-k router without token dropping, and SwiGLU experts in two stacked banks.

Shape suffixes: N tokens, D d_model, E experts, K top_k, S = N·K token slots sorted by expert, I expert_hidden,
F = 2·I (gate rows first), X experts of one bank, R slots of one expert.

The *trained* bank is a parameter; the *frozen* bank takes no gradient. For a frozen expert the backward pass computes
the gradient of its input and of its router weight, and never the product that would give its weights' gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spes_core.config import ComputeConfig, ModelConfig
from spes_core.model.expert_plan import Plan
from spes_core.model.experts import run_experts


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
    """E · Σ_e f_e·p_e / K with f_e the share of tokens sent to e, p_e the mean router probability: 1 when uniform.

    The shares are those of the node's whole batch, as far as `route` is told of other micro-batches and processes. No
    gradient flows through them, so the mean of this loss over processes, and of its gradient, is that of the whole."""
    router_z_loss: Tensor
    """Mean over tokens of logsumexp(router logits)²."""


def route(
    logits_NE: Tensor,
    top_k: int,
    normalize: bool,
    other_tokens_E: Tensor | None = None,
    all_ranks: AllRanks | None = None,
) -> Routing:
    """Softmax in fp32 (or better), then the ``top_k`` largest; ``normalize`` rescales their weights to sum to one.

    ``other_tokens_E`` (int64) are tokens sent to each expert by other micro-batches of the step, ``all_ranks`` the
    processes that divide the batch: the balance loss takes its fractions f over all of their tokens together.
    """
    if torch.compiler.is_compiling():
        return _plain_route(logits_NE.float(), top_k, normalize, other_tokens_E, all_ranks)
    return Routing(*_Route.apply(logits_NE, top_k, normalize, other_tokens_E, all_ranks))  # type: ignore[no-untyped-call]


def _plain_route(
    logits_NE: Tensor, top_k: int, normalize: bool, other_tokens_E: Tensor | None, all_ranks: AllRanks | None
) -> Routing:
    """`_Route` as plain operations, which the compiler fuses and differentiates."""
    num_tokens, num_experts = logits_NE.shape
    log_partition_N1 = logits_NE.logsumexp(-1, keepdim=True)
    probabilities_NE = (logits_NE - log_partition_N1).exp()
    weights_NK, experts_NK = probabilities_NE.topk(top_k, dim=-1)
    if normalize:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    each_E = torch.arange(num_experts, device=logits_NE.device)
    expert_tokens_E = (experts_NK.reshape(-1, 1) == each_E).sum(0)
    counts_E, counted = _counted(expert_tokens_E, num_tokens, top_k, other_tokens_E, all_ranks)
    balance_loss = (counts_E / counted * probabilities_NE.mean(0)).sum() * (num_experts / top_k)
    return Routing(weights_NK, experts_NK, expert_tokens_E, balance_loss, log_partition_N1.square().mean())


def _counted(
    expert_tokens_E: Tensor, num_tokens: int, top_k: int, other_tokens_E: Tensor | None, all_ranks: AllRanks | None
) -> tuple[Tensor, Tensor | int]:
    """Tokens sent to each expert, and tokens that they came from, of all that the balance loss counts."""
    if other_tokens_E is None and all_ranks is None:
        return expert_tokens_E, num_tokens
    counts_E = expert_tokens_E if other_tokens_E is None else expert_tokens_E + other_tokens_E
    if all_ranks is not None:
        counts_E = all_ranks.total(counts_E)
    return counts_E, counts_E.sum() / top_k


class _Route(torch.autograd.Function):
    """The router behind its logits, with one backward: a chain of small operations would cost several times more."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NE: Tensor,
        top_k: int,
        normalize: bool,
        other_tokens_E: Tensor | None,
        all_ranks: AllRanks | None,
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
        counts_E, counted = _counted(expert_tokens_E, num_tokens, top_k, other_tokens_E, all_ranks)
        fraction_E = counts_E / counted
        scale = num_experts / top_k
        balance_loss = (fraction_E * probabilities_NE.mean(0)).sum() * scale
        router_z_loss = log_partition_N1.square().mean()
        ctx.top_k, ctx.normalize, ctx.counted = top_k, normalize, counted
        ctx.save_for_backward(probabilities_NE, log_partition_N1, experts_NK, counts_E)
        ctx.mark_non_differentiable(experts_NK, expert_tokens_E)
        return weights_NK, experts_NK, expert_tokens_E, balance_loss, router_z_loss

    @staticmethod
    def backward(ctx: Any, grad_weights_NK: Tensor, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """d logit = p·(dp − Σ p·dp) + p·dz·2·z/N, where dp collects the chosen weights and the balance loss."""
        probabilities_NE, log_partition_N1, experts_NK, counts_E = ctx.saved_tensors
        _, _, grad_balance, grad_z = grads
        num_tokens, num_experts = probabilities_NE.shape
        if ctx.normalize:
            chosen_NK = probabilities_NE.gather(1, experts_NK)
            total_N1 = chosen_NK.sum(-1, keepdim=True)
            mean_N1 = (grad_weights_NK * chosen_NK).sum(-1, keepdim=True) / total_N1
            grad_weights_NK = (grad_weights_NK - mean_N1) / total_N1
        per_expert_E = grad_balance * counts_E * (num_experts / (ctx.top_k * num_tokens * ctx.counted))
        grad_NE = per_expert_E.expand(num_tokens, -1).contiguous().scatter_add_(1, experts_NK, grad_weights_NK)
        grad_NE.mul_(probabilities_NE)
        offset_N1 = log_partition_N1 * (grad_z * 2 / num_tokens) - grad_NE.sum(-1, keepdim=True)
        return grad_NE.addcmul_(probabilities_NE, offset_N1), None, None, None, None


class Experts(nn.Module):
    """The experts of one layer in two banks, ``trained_*`` and ``frozen_*``; a bank without experts is None.

    ``trained_experts`` (ascending) are the indices of the trained ones; row x of a bank is its x-th expert. Trained
    ones are fp32 masters; both banks are taken in the dtype of the input, one matrix or one bank at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        trained_experts: Sequence[int],
        *,
        compute: ComputeConfig | None = None,
        frozen_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        compute = compute or ComputeConfig()
        trained = tuple(trained_experts)
        frozen = _others(trained, config.num_experts)
        self.locations = _locations(trained, frozen)
        self._frozen_dtype = frozen_dtype
        self.plan = Plan(
            trained,
            config.num_experts,
            keep_hidden=compute.activation_checkpointing == "none",
            staged=compute.compile,
            compiled=compute.compile,
        )
        self._grouped_plan = replace(self.plan, staged=True)
        for bank, experts in (("trained", trained), ("frozen", frozen)):
            shapes = {
                "gate_up": (len(experts), 2 * config.expert_hidden, config.d_model),
                "down": (len(experts), config.d_model, config.expert_hidden),
            }
            for matrix, shape in shapes.items():
                dtype = torch.float32 if bank == "trained" else frozen_dtype
                weights = torch.empty(shape, dtype=dtype)
                parameter = nn.Parameter(weights, requires_grad=bank == "trained") if experts else None
                self.register_parameter(f"{bank}_{matrix}", parameter)

    def forward(self, x_ND: Tensor, routing: Routing) -> Tensor:
        """Σ_k weight · expert(x) for each token, (N, D)."""
        banks: list[Any] = [self.trained_gate_up, self.trained_down, self.frozen_gate_up, self.frozen_down]
        plan = self._grouped_plan if x_ND.is_cuda else self.plan
        slots_S = plan.sort_slots(routing.experts_NK)
        return run_experts(x_ND, routing.weights_NK, slots_S, routing.expert_tokens_E, banks, plan)

    def tensor(self, expert: int, matrix: str) -> Tensor:
        """A view of one matrix ("gate_up" or "down") of one expert, detached, sharing storage."""
        bank, row = self.bank_of(expert, matrix)
        return bank.detach()[row]

    @torch.no_grad()
    def redivide(self, trained_experts: Sequence[int]) -> None:
        """Train these experts (ascending) from now on. Parameters stay the same objects where a bank stays.

        Not where the banks are divided over ranks. Gradients are dropped.
        """
        trained, old = tuple(trained_experts), self.locations
        frozen = _others(trained, len(old))
        for matrix in ("gate_up", "down"):
            rows = [self.tensor(expert, matrix) for expert in range(len(old))]
            for bank, experts in (("trained", trained), ("frozen", frozen)):
                dtype = torch.float32 if bank == "trained" else self._frozen_dtype
                values = torch.empty((len(experts), *rows[0].shape), dtype=dtype, device=rows[0].device)
                for row, expert in enumerate(experts):
                    values[row] = rows[expert]
                self._replace(f"{bank}_{matrix}", values if experts else None, is_trained=bank == "trained")
        self.locations = _locations(trained, frozen)
        self.plan = replace(self.plan, trained=trained)
        self._grouped_plan = replace(self.plan, staged=True)

    def _replace(self, name: str, values: Tensor | None, *, is_trained: bool) -> None:
        parameter = getattr(self, name)
        if parameter is None or values is None:
            self.register_parameter(name, None if values is None else nn.Parameter(values, requires_grad=is_trained))
            return
        parameter.grad, parameter.data = None, values

    def bank_of(self, expert: int, matrix: str) -> tuple[nn.Parameter, int]:
        """The bank that holds one matrix of one expert, and its row there."""
        is_trained, row = self.locations[expert]
        return self.get_parameter(f"{'trained' if is_trained else 'frozen'}_{matrix}"), row


Locations = tuple[tuple[bool, int], ...]
"""For each expert: whether it is in the trained bank, and its row there."""


def _others(experts: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    return tuple(expert for expert in range(num_experts) if expert not in experts)


def _locations(trained: tuple[int, ...], frozen: tuple[int, ...]) -> Locations:
    rows = {expert: (True, row) for row, expert in enumerate(trained)}
    rows |= {expert: (False, row) for row, expert in enumerate(frozen)}
    return tuple(rows[expert] for expert in range(len(rows)))
