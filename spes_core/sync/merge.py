"""Merging of similar experts (design, section 7): each expert is pulled towards the mean of its nearest ones.

Shapes: E experts of one layer, P values of one expert's matrix, K neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GRAM_COLUMNS = 1 << 15
"""Columns converted to float64 at a time: the copy stays small whatever P is."""
_PULL_COLUMNS = 1 << 14
"""Columns merged at a time: with 16 experts 1 MiB, which stays in cache."""


def merge_layer(gate_up_EP: Tensor, down_EP: Tensor, num_neighbours: int, alpha: float) -> None:
    """Merge the experts of one layer in place: w_e ← w_e + α·(mean of its K nearest − w_e), for both matrices.

    Row e of ``gate_up_EP`` is expert e's flattened (2·expert_hidden, d_model) matrix, gate rows first; nearest is
    by the gate half. All experts read the weights from before the merge. α = 0 leaves every bit as it is.
    """
    if alpha == 0:
        return
    neighbours_EK = nearest_experts(gate_up_EP[:, : gate_up_EP.shape[1] // 2], num_neighbours)
    for weights_EP in (gate_up_EP, down_EP):
        _pull(weights_EP, neighbours_EK, alpha)


def nearest_experts(gate_EP: Tensor, num_neighbours: int) -> Tensor:
    """Indices (E, K) of the K other experts with the largest cosine, largest first, the lower index on a tie.

    An expert of norm zero has cosine 0 to every other.
    """
    assert 1 <= num_neighbours < gate_EP.shape[0]
    cosine_EE = cosine_similarity(gate_EP)
    cosine_EE.fill_diagonal_(-torch.inf)
    return cosine_EE.argsort(dim=1, descending=True, stable=True)[:, :num_neighbours]


def cosine_similarity(gate_EP: Tensor) -> Tensor:
    """Cosines (E, E) of all pairs in float64; an expert of norm zero has cosine 0 to every one."""
    num_experts = gate_EP.shape[0]
    gram_EE = torch.zeros(num_experts, num_experts, dtype=torch.float64, device=gate_EP.device)
    for columns in torch.split(gate_EP, _GRAM_COLUMNS, dim=1):
        columns = columns.double()
        gram_EE.addmm_(columns, columns.T)
    norm_E = gram_EE.diagonal().sqrt()
    norms_EE = norm_E[:, None] * norm_E[None, :]
    return torch.where(norms_EE > 0, gram_EE / norms_EE, 0.0)


def _pull(weights_EP: Tensor, neighbours_EK: Tensor, alpha: float) -> None:
    """A few columns at a time: all that a piece reads and writes stays in cache, and no copy of a matrix is needed."""
    neighbours = neighbours_EK.tolist()
    before = torch.empty_like(weights_EP[:, :_PULL_COLUMNS], memory_format=torch.contiguous_format)
    pull = torch.empty_like(before[0])
    for piece_EC in torch.split(weights_EP, _PULL_COLUMNS, dim=1):
        before_EC, pull_C = before[:, : piece_EC.shape[1]], pull[: piece_EC.shape[1]]
        before_EC.copy_(piece_EC)
        for weights_C, neighbours_K in zip(piece_EC, neighbours, strict=True):
            pull_C.copy_(before_EC[neighbours_K[0]])
            for neighbour in neighbours_K[1:]:
                pull_C += before_EC[neighbour]
            pull_C /= len(neighbours_K)
            pull_C -= weights_C
            weights_C.add_(pull_C, alpha=alpha)
