"""RMSNorm with a backward written by hand: y = x · rsqrt(mean(x²) + ε) · weight (Zhang and Sennrich, arXiv 1910.07467).

Shape suffixes: R rows (all leading dimensions together), D width. PyTorch's own rms_norm is on CPU a chain of
elementary operations that keeps several activations; this one keeps its input and one number a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as functional_rms_norm


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of ``x`` (any leading dimensions) to root mean square 1, then by the weight.

    Computed in fp32 (or better) whatever the dtype of ``x``, which the result has.
    """
    compiling = torch.compiler.is_compiling()
    if x.is_cuda and not compiling:
        # One kernel there; in float32, since weights near one lose too much in bfloat16.
        return functional_rms_norm(x.float(), weight_D.shape, weight_D.float(), eps).to(x.dtype)
    if compiling or x.dtype not in (torch.float32, torch.float64):
        # The compiler makes one pass of the plain formula, forward and backward.
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight_D).to(x.dtype)
    output: Tensor = _RMSNorm.apply(x, weight_D, eps)  # type: ignore[no-untyped-call]
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_RD = x.reshape(-1, x.shape[-1])
        # vector_norm reads x once; a mean of squares would first write the squares
        norm_R1 = torch.linalg.vector_norm(x_RD, dim=-1, keepdim=True)
        scale_R1 = norm_R1.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale_R1)
        output_RD: Tensor = (x_RD * scale_R1).mul_(weight_D)
        return output_RD.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With g = grad·weight: dx = s·g − x·s³·mean(g·x), dweight = Σ_rows grad·x·s, where s is the row's scale."""
        x, weight_D, scale_R1 = ctx.saved_tensors
        width = x.shape[-1]
        x_RD, grad_RD = x.reshape(-1, width), grad.reshape(-1, width)
        product_RD = grad_RD * x_RD
        grad_weight_D = product_RD.t().mv(scale_R1.view(-1))
        pull_R1 = product_RD.mv(weight_D).unsqueeze_(1).mul_(scale_R1.pow(3)).div_(width)
        grad_x_RD = torch.mul(grad_RD, weight_D, out=product_RD).mul_(scale_R1)
        grad_x_RD.addcmul_(x_RD, pull_R1, value=-1)
        return grad_x_RD.view(x.shape), grad_weight_D, None
