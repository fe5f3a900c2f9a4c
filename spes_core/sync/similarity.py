"""How alike the experts of a layer are: what merging raises and training apart lowers.

Shapes: E experts of one layer, P values of one expert's matrix.
"""

from __future__ import annotations

from torch import Tensor

from spes_core.sync.merge import cosine_similarity


def mean_similarity(gate_up_EP: Tensor) -> float:
    """Mean cosine over all pairs of different experts, -1 to 1, by the gate half as merging compares them.

    Row e of ``gate_up_EP`` is expert e's flattened matrix, gate rows first; the bank may be strided and is only read.
    Needs two experts. About E²·P/2 multiply-adds in float64; no more memory than a merge.
    """
    num_experts = gate_up_EP.shape[0]
    assert num_experts > 1
    cosine_EE = cosine_similarity(gate_up_EP[:, : gate_up_EP.shape[1] // 2])
    cosine_EE.fill_diagonal_(0.0)
    return float(cosine_EE.sum()) / (num_experts * (num_experts - 1))
