"""Cross-entropy and z-loss straight from hidden states, without ever holding the logits of the whole batch.

Shape suffixes: N tokens, D d_model, V vocabulary, M tokens of one chunk. For logits l of a token with target t and
log-partition z = logsumexp(l):

    cross-entropy = mean of z − l_t        z-loss = mean of z²        (both over the targets that are not ignored)

With respect to l, cross-entropy + w · z-loss has the gradient softmax(l)·(1 + 2·w·z) − onehot(t), divided by the
number of targets. So one pass over a chunk gives losses and gradients: three matrix products, as many as plain
training needs, and the memory of one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED_TARGET = -100
"""A target with this value counts in no loss."""

CHUNK_TOKENS = 256
"""Tokens whose logits exist at one time: enough for full matrix-product speed, few enough to take little memory."""

CHUNK_TOKENS_CUDA = 2048
"""The same on a GPU, which needs more rows to be busy: 1.2 GB of logits at a vocabulary of 151,665."""


class TokenLoss(NamedTuple):
    """Losses of next-token prediction, in nats; 0-dim tensors."""

    objective: Tensor
    """cross_entropy + z_weight · z_loss: the differentiable one."""
    cross_entropy: Tensor
    z_loss: Tensor


def token_loss(x_ND: Tensor, unembedding_VD: Tensor, targets_N: Tensor, z_weight: float) -> TokenLoss:
    """Losses of predicting ``targets_N`` (int64, IGNORED_TARGET to skip) from ``x_ND`` through ``unembedding_VD``.

    Without any target all losses are zero. Gradients are made in the forward pass when grad mode is on, and can be
    taken once. The gradient of the unembedding waits outside the saved tensors: it is already the gradient buffer.
    """
    losses = _TokenLoss.apply(  # type: ignore[no-untyped-call]
        x_ND, unembedding_VD, targets_N, z_weight, torch.is_grad_enabled()
    )
    return TokenLoss(*losses)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, z_weight: float, with_gradients: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        is_target_N = targets_N != IGNORED_TARGET
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        product_VD = weight_VD.to(x_ND.dtype)
        share_N = is_target_N / is_target_N.sum().clamp_(min=1).to(wide)
        targets_N1 = targets_N.clamp(min=0).unsqueeze(1)
        target_logit_N, log_partition_N = torch.empty_like(share_N), torch.empty_like(share_N)
        grad_x_ND, grad_weight_VD = (
            (torch.empty_like(x_ND), torch.empty_like(weight_VD)) if with_gradients else (None, None)
        )
        chunk_tokens = CHUNK_TOKENS_CUDA if x_ND.is_cuda else CHUNK_TOKENS
        buffer_MV = torch.empty(min(chunk_tokens, len(x_ND)), len(weight_VD), dtype=share_N.dtype, device=x_ND.device)
        for start in range(0, len(x_ND), chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, len(x_ND)))
            logits_MV = buffer_MV[: chunk.stop - start]
            _logits(x_ND[chunk], product_VD, logits_MV)
            target_logit_N[chunk] = logits_MV.gather(1, targets_N1[chunk]).squeeze(1)
            sum_M = _exponentiate(logits_MV, log_partition_N[chunk])
            if grad_x_ND is not None and grad_weight_VD is not None:
                scale_M = share_N[chunk] * (1 + 2 * z_weight * log_partition_N[chunk]) / sum_M
                grad_MV = logits_MV.mul_(scale_M.unsqueeze(1))
                grad_MV.scatter_add_(1, targets_N1[chunk], -share_N[chunk].unsqueeze(1))
                grad_MV = grad_MV.to(x_ND.dtype)
                torch.mm(grad_MV, product_VD, out=grad_x_ND[chunk])
                _add_product(grad_weight_VD, grad_MV.t(), x_ND[chunk], is_first=start == 0)
        if grad_x_ND is not None:
            ctx.save_for_backward(grad_x_ND)
            ctx.grad_weight_VD = grad_weight_VD
        cross_entropy = torch.dot(log_partition_N - target_logit_N, share_N)
        z_loss = torch.dot(log_partition_N.square(), share_N)
        ctx.mark_non_differentiable(cross_entropy, z_loss)
        return cross_entropy + z_weight * z_loss, cross_entropy, z_loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight_VD, ctx.grad_weight_VD = ctx.grad_weight_VD, None
        assert grad_weight_VD is not None, "the gradients of token_loss were already taken"
        (grad_x_ND,) = ctx.saved_tensors
        if not grad.is_cuda and float(grad) == 1:  # the usual case, which needs no pass over both
            return grad_x_ND, grad_weight_VD, None, None, None
        return grad_x_ND.mul_(grad), grad_weight_VD.mul_(grad), None, None, None


def _logits(x_MD: Tensor, weight_VD: Tensor, output_MV: Tensor) -> None:
    if x_MD.dtype == output_MV.dtype:
        torch.mm(x_MD, weight_VD.t(), out=output_MV)
    else:
        output_MV.copy_(x_MD.mm(weight_VD.t()))


def _add_product(sum_VD: Tensor, left_VM: Tensor, right_MD: Tensor, *, is_first: bool) -> None:
    """Add a product to a sum in the dtype of the sum; the first one replaces what is there."""
    if left_VM.dtype == sum_VD.dtype:
        torch.addmm(sum_VD, left_VM, right_MD, beta=0 if is_first else 1, out=sum_VD)
    elif is_first:
        sum_VD.copy_(left_VM.mm(right_MD))
    else:
        sum_VD.add_(left_VM.mm(right_MD))


def _exponentiate(logits_MV: Tensor, log_partition_M: Tensor) -> Tensor:
    """Replace logits by exp(logits − row maximum), write the log-partition, return the row sums of the exponentials."""
    maximum_M1 = logits_MV.amax(1, keepdim=True)
    sum_M = logits_MV.sub_(maximum_M1).exp_().sum(1)
    torch.add(maximum_M1.squeeze(1), sum_M.log(), out=log_partition_M)
    return sum_M
