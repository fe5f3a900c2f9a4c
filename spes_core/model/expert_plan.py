"""How the experts of one layer are computed: their order, their slots, and what both ways of computing share.

Shape suffixes: N tokens, D d_model, E experts, K top_k, S = N·K token slots sorted by expert, I expert_hidden,
F = 2·I (gate rows first), X experts of one bank, R slots of one expert, A and B widths of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

Banks = Sequence[Tensor | None]
"""trained gate_up (X, F, D), trained down (X, D, I), frozen gate_up, frozen down; None where a bank has no expert."""


@dataclass(frozen=True)
class Plan:
    """How one layer's experts are computed; the same in every step."""

    trained: tuple[int, ...]
    """Indices of the trained experts, ascending; row x of the trained bank is the x-th. The others are frozen."""
    num_experts: int
    keep_hidden: bool = True
    """Whether the pre-activations are kept for the backward pass; else their product is taken again."""
    staged: bool = False
    """Whether all slots pass each stage together (experts_staged); else expert by expert (experts_loop)."""
    compiled: bool = False
    """Whether elementwise stages are compiled."""

    @property
    def bank_order(self) -> tuple[int, ...]:
        """Experts in the order of the staged slots: trained ones first, then frozen ones."""
        frozen = (expert for expert in range(self.num_experts) if expert not in self.trained)
        return (*self.trained, *frozen)

    def sort_slots(self, experts_NK: Tensor) -> Tensor:
        """Slots (S,) in the order of their expert: by index, or trained ones first when staged; stable."""
        keys_S = experts_NK.reshape(-1)
        if self.staged and self.trained not in ((), tuple(range(self.num_experts))):
            position = {expert: place for place, expert in enumerate(self.bank_order)}
            places_E = [position[expert] for expert in range(self.num_experts)]
            keys_S = torch.tensor(places_E, device=keys_S.device).index_select(0, keys_S)
        return keys_S.argsort(stable=True)


class Gradients(NamedTuple):
    """Of the input, the router weights and the trained bank (None: there is none)."""

    x_ND: Tensor
    weights_NK: Tensor
    gate_up_XFD: Tensor | None
    down_XDI: Tensor | None


def sorted_slots(weights_NK: Tensor, slots_S: Tensor) -> tuple[Tensor, Tensor]:
    """Token (S,) and router weight (S, 1) of each slot in sorted order."""
    tokens_S = slots_S.div(weights_NK.shape[1], rounding_mode="floor")
    return tokens_S, weights_NK.reshape(-1, 1).index_select(0, slots_S)


def combine(y_SD: Tensor, slots_S: Tensor, weights_NK: Tensor | None, top_k: int) -> Tensor:
    """Σ_k of each token's slots, times their weight if given, in the order of its choices, (N, D).

    That order is the same whoever trains what, so the partition changes no bit.
    """
    places_S = torch.empty_like(slots_S)
    places_S[slots_S] = torch.arange(len(slots_S), device=slots_S.device)
    if y_SD.is_cuda:  # there the sum must be a deterministic kernel
        y_NKD = y_SD.index_select(0, places_S).view(-1, top_k, y_SD.shape[1])
        return (y_NKD if weights_NK is None else y_NKD * weights_NK.unsqueeze(2).to(y_SD.dtype)).sum(1)
    weights_NK = None if weights_NK is None else weights_NK.to(y_SD.dtype)
    return embedding_bag(places_S.view(-1, top_k), y_SD, mode="sum", per_sample_weights=weights_NK)


def mm_into(output_AB: Tensor, left_AR: Tensor, right_RB: Tensor) -> None:
    """Write a product where it belongs, in the dtype of the master weights."""
    if output_AB.dtype == left_AR.dtype:
        torch.mm(left_AR, right_RB, out=output_AB)
    else:
        output_AB.copy_(left_AR.mm(right_RB))
