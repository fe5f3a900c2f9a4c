"""Merging as its definition reads, in plain Python floats: no matrix, no sharing, one expert after another."""

from __future__ import annotations

import math


def merge_loop(
    gate_up: list[list[float]], down: list[list[float]], num_neighbours: int, alpha: float
) -> tuple[list[list[float]], list[list[float]]]:
    """New (gate_up, down) of one layer; each row is one expert's flattened matrix, gate half first."""
    gates = [row[: len(row) // 2] for row in gate_up]
    neighbours = []
    for expert, gate in enumerate(gates):
        others = [other for other in range(len(gates)) if other != expert]
        others.sort(key=lambda other: (-cosine(gate, gates[other]), other))
        neighbours.append(others[:num_neighbours])
    return pull(gate_up, neighbours, alpha), pull(down, neighbours, alpha)


def cosine(left: list[float], right: list[float]) -> float:
    """Cosine of two vectors; 0 when one of them is zero."""
    norms = math.sqrt(math.fsum(x * x for x in left)) * math.sqrt(math.fsum(x * x for x in right))
    return math.fsum(x * y for x, y in zip(left, right, strict=True)) / norms if norms else 0.0


def pull(weights: list[list[float]], neighbours: list[list[int]], alpha: float) -> list[list[float]]:
    """Each expert moved by alpha towards the mean of its neighbours, all read before any is moved."""
    moved = []
    for row, nearest in zip(weights, neighbours, strict=True):
        means = [math.fsum(weights[other][i] for other in nearest) / len(nearest) for i in range(len(row))]
        moved.append([value + alpha * (mean - value) for value, mean in zip(row, means, strict=True)])
    return moved
