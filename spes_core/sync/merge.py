"""Merging of similar experts (design, section 7): each expert is pulled towards the mean of its nearest ones.

Shapes: E experts of one layer, P values of one expert's matrix, K neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GRAM_COLUMNS = 1 << 15
"""Columns converted to float64 at a time: the copy stays small whatever P is."""


def merge_layer(gate_up_EP: Tensor, down_EP: Tensor, num_neighbours: int, alpha: float) -> None:
    """Merge the experts of one layer in place: w_e ← w_e + α·(mean of its K nearest − w_e), for both matrices.

    Row e of ``gate_up_EP`` is expert e's flattened (2·expert_hidden, d_model) matrix, gate rows first; nearest is
    by the gate half. All experts read the weights from before the merge. α = 0 leaves every bit as it is. Needs a
    copy of one matrix of the layer at a time.
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
    num_experts = gate_EP.shape[0]
    assert 1 <= num_neighbours < num_experts
    gram_EE = torch.zeros(num_experts, num_experts, dtype=torch.float64, device=gate_EP.device)
    for columns in torch.split(gate_EP, _GRAM_COLUMNS, dim=1):
        columns = columns.double()
        gram_EE.addmm_(columns, columns.T)
    norm_E = gram_EE.diagonal().sqrt()
    norms_EE = norm_E[:, None] * norm_E[None, :]
    cosine_EE = torch.where(norms_EE > 0, gram_EE / norms_EE, 0.0)
    cosine_EE.fill_diagonal_(-torch.inf)
    return cosine_EE.argsort(dim=1, descending=True, stable=True)[:, :num_neighbours]


def _pull(weights_EP: Tensor, neighbours_EK: Tensor, alpha: float) -> None:
    before_EP = weights_EP.clone()
    for weights_P, neighbours_K in zip(weights_EP, neighbours_EK.tolist(), strict=True):
        pull_P = before_EP[neighbours_K[0]].clone()
        for neighbour in neighbours_K[1:]:
            pull_P += before_EP[neighbour]
        pull_P /= len(neighbours_K)
        pull_P -= weights_P
        weights_P.add_(pull_P, alpha=alpha)
