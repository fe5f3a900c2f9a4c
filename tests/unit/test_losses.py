"""Chunked cross-entropy and z-loss against the formulas on full logits; memory stays that of one chunk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spes_core.model import losses
from spes_core.model.losses import CHUNK_TOKENS, token_loss


def make_problem(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x_ND = torch.randn(tokens, 8, generator=generator, dtype=dtype).requires_grad_()
    weight_VD = torch.randn(31, 8, generator=generator, dtype=dtype).requires_grad_()
    targets_N = torch.randint(31, (tokens,), generator=generator)
    targets_N[::5] = -100
    return x_ND, weight_VD, targets_N


def full_losses(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    logits_NV = x_ND @ weight_VD.t()
    cross_entropy = torch.nn.functional.cross_entropy(logits_NV, targets_N)
    return cross_entropy, logits_NV.logsumexp(-1)[targets_N != -100].square().mean()


@pytest.mark.parametrize("tokens", [2, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS - 7])
@pytest.mark.parametrize("z_weight", [0.0, 0.01])
def test_losses_and_gradients_equal_those_on_full_logits(tokens: int, z_weight: float) -> None:
    x_ND, weight_VD, targets_N = make_problem(tokens)
    found = token_loss(x_ND, weight_VD, targets_N, z_weight)
    (3 * found.objective).backward()
    twin_x, twin_weight = (item.detach().clone().requires_grad_() for item in (x_ND, weight_VD))
    cross_entropy, z_loss = full_losses(twin_x, twin_weight, targets_N)
    (3 * (cross_entropy + z_weight * z_loss)).backward()
    torch.testing.assert_close(found.cross_entropy, cross_entropy.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.z_loss, z_loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(x_ND.grad, twin_x.grad, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(weight_VD.grad, twin_weight.grad, rtol=1e-11, atol=1e-14)


def test_without_gradients_the_losses_are_the_same_bits() -> None:
    x_ND, weight_VD, targets_N = make_problem(300, torch.float32)
    with torch.no_grad():
        silent = token_loss(x_ND, weight_VD, targets_N, 0.01)
    loud = token_loss(x_ND, weight_VD, targets_N, 0.01)
    assert all(torch.equal(a, b) for a, b in zip(silent, loud, strict=True))


def test_a_batch_without_targets_has_zero_loss_and_zero_gradient() -> None:
    x_ND, weight_VD, targets_N = make_problem(10)
    found = token_loss(x_ND, weight_VD, torch.full_like(targets_N, -100), 0.1)
    found.objective.backward()
    assert [float(value.detach()) for value in found] == [0, 0, 0]
    assert x_ND.grad is not None and not x_ND.grad.any()
    assert weight_VD.grad is not None and not weight_VD.grad.any()


def test_logits_of_a_thousand_do_not_overflow() -> None:
    x_ND = torch.full((4, 2), 100.0).requires_grad_()
    weight_VD = torch.tensor([[5.0, 5.0], [-5.0, -5.0], [0.0, 0.0]]).requires_grad_()
    found = token_loss(x_ND, weight_VD, torch.tensor([0, 0, 1, 2]), 0.0)
    found.objective.backward()
    assert float(found.cross_entropy) == pytest.approx((2000 + 1000) / 4, rel=1e-6)
    assert x_ND.grad is not None and torch.isfinite(x_ND.grad).all()


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_is_larger_than_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_TOKENS", 16)
    x_ND, weight_VD, targets_N = make_problem(160)
    with LargestTensor() as largest:
        token_loss(x_ND, weight_VD, targets_N, 0.01).objective.backward()
    assert largest.elements == max(16 * 31, 160 * 8)


def test_gradients_cannot_be_taken_twice() -> None:
    found = token_loss(*make_problem(10), 0.0)
    found.objective.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="already taken"):
        found.objective.backward()
