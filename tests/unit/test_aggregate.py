"""What the mean and the outer step do to a few values."""

from __future__ import annotations

import numpy as np
import pytest

from spes_core.config import OuterConfig
from spes_core.sync.aggregate import BLOCK_ELEMENTS, add_to_mean, make_scratch, outer_step
from spes_core.sync.codec import USABLE

SCRATCH = make_scratch()


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_one_contribution_passes_bitwise() -> None:
    values = floats(-0.0, 1e-45, 3.3, 1e30)
    mean = floats(np.nan, 1, 2, 3)
    add_to_mean(mean, values, 5, 0, SCRATCH)
    assert mean.tobytes() == values.tobytes()


def test_the_weight_is_the_number_of_tokens() -> None:
    mean = np.zeros(1, dtype=np.float32)
    add_to_mean(mean, floats(8), 1, 0, SCRATCH)
    add_to_mean(mean, floats(0), 3, 1, SCRATCH)
    assert mean.tolist() == [2.0]
    add_to_mean(mean, floats(10), 4, 4, SCRATCH)
    assert mean.tolist() == [6.0]


def test_the_largest_usable_values_keep_the_mean_finite() -> None:
    mean = floats(USABLE, -USABLE)
    for weight in range(1, 50):
        add_to_mean(mean, floats(-USABLE, USABLE) * np.float32((-1) ** weight), 10**9, weight, SCRATCH)
        assert np.isfinite(mean).all()


def test_outer_sgd_moves_by_its_learning_rate_towards_the_mean() -> None:
    values, mean = floats(1, 1, -2), floats(2, 1, -4)
    outer_step(values, mean, None, OuterConfig(kind="sgd", lr=0.5))
    assert values.tolist() == [1.5, 1.0, -3.0]


def test_outer_nesterov_equals_its_scalar_trace() -> None:
    outer = OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)
    values, momentum = floats(1.0), np.zeros(1, dtype=np.float32)
    weight, velocity = 1.0, 0.0
    for target in (2.0, 2.5, 0.0, -1.0):
        outer_step(values, floats(target), momentum, outer)
        gradient = weight - target
        velocity = 0.9 * velocity + gradient
        weight -= 0.7 * (gradient + 0.9 * velocity)
        assert values[0] == pytest.approx(weight, abs=1e-6)


def test_outer_nesterov_is_torch_sgd_with_nesterov_on_the_difference() -> None:
    import torch

    rng = np.random.default_rng(0)
    values = rng.standard_normal(BLOCK_ELEMENTS + 7).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    momentum = np.zeros_like(values)
    for _ in range(3):
        mean = rng.standard_normal(values.size).astype(np.float32)
        parameter.grad = parameter.detach() - torch.from_numpy(mean)
        optimizer.step()
        outer_step(values, mean, momentum, OuterConfig(kind="nesterov", lr=0.7, momentum=0.9))
    np.testing.assert_allclose(values, parameter.detach().numpy(), rtol=0, atol=1e-5)
