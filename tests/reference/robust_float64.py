"""Obvious twins of the robust means, in float64 and one value after another."""

from __future__ import annotations

import math
import statistics

import numpy as np


def trimmed_mean(values: list[np.ndarray], cut: int) -> np.ndarray:
    """Value by value the mean of what is left without the ``cut`` smallest and largest."""
    columns = [sorted(float(one[place]) for one in values) for place in range(values[0].size)]
    return np.array([statistics.fmean(column[cut : len(column) - cut]) for column in columns])


def clipped_mean(old: np.ndarray, values: list[np.ndarray], tokens: list[int], factor: float) -> np.ndarray:
    """The token-weighted mean of updates cut down to ``factor`` × the lower median of their lengths."""
    updates = [one.astype(np.float64) - old.astype(np.float64) for one in values]
    lengths = [math.sqrt(math.fsum(float(x) ** 2 for x in update)) for update in updates]
    longest = factor * statistics.median_low(lengths)
    total = np.zeros(old.size)
    for update, length, weight in zip(updates, lengths, tokens, strict=True):
        total += (update * longest / length if length > longest else update) * weight
    return old + total / sum(tokens)
