"""The token-weighted mean over the nodes that trained a tensor, all values at hand at once, in float64."""

from __future__ import annotations

import numpy as np


def weighted_mean(values_by_node: list[np.ndarray], tokens_by_node: list[int]) -> np.ndarray:
    """Σ tokens·values / Σ tokens."""
    weighted = [
        tokens * values.astype(np.float64) for values, tokens in zip(values_by_node, tokens_by_node, strict=True)
    ]
    return np.sum(weighted, axis=0) / sum(tokens_by_node)
