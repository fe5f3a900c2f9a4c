"""One optimizer step: forward and backward over the micro-batches, clipping, update.

Metrics stay on the device until the caller reads them; only the experts wait for it, once a layer, to learn their
slices (`model.moe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spes_core.config import LossConfig, OptimConfig
from spes_core.model.decoder import Decoder, ModelOutput
from spes_core.model.losses import IGNORED_TARGET


class StepMetrics(NamedTuple):
    """What one step leaves on the device: 0-dim tensors (target-weighted means over micro-batches), expert loads."""

    cross_entropy: Tensor
    z_loss: Tensor
    balance_loss: Tensor
    router_z_loss: Tensor
    grad_norm: Tensor
    """Norm of the gradient of all trained parameters together, before clipping."""
    expert_tokens_LE: Tensor
    """Tokens sent to each expert of each layer in this step, int64."""


def train_step(
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: LossConfig,
    clip_norm: float | None,
    learning_rate: float,
) -> StepMetrics:
    """Take one step on the mean loss over all targets of ``batches``, pairs (tokens_BT, targets_BT).

    Several micro-batches accumulate: each counts by its share of the targets, so the cross-entropy and z-loss are
    those of the batches put together; balance and router losses are means of the micro-batches' with the same weights.
    """
    optimizer.zero_grad(set_to_none=True)
    outputs = [_backward(decoder, batch, share, loss) for batch, share in zip(batches, _shares(batches), strict=True)]
    grad_norm = _clip([item for item in decoder.parameters() if item.requires_grad], clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    means = {name: torch.stack([item[name] for item in outputs]).sum(0) for name in outputs[0]}
    return StepMetrics(grad_norm=grad_norm, **means)


def make_optimizer(decoder: Decoder, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of all trained parameters; banks and matrices are decayed, vectors (norms) are not."""
    trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    groups = [
        {"params": [item for item in trained if item.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [item for item in trained if item.dim() == 1], "weight_decay": 0.0},
    ]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr)
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)


def _shares(batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
    """Each micro-batch's share of the targets; None when there is only one, which needs no scaling."""
    if len(batches) == 1:
        return [None]
    counts = torch.stack([(targets_BT != IGNORED_TARGET).sum() for _, targets_BT in batches]).float()
    return list(counts / counts.sum().clamp(min=1))


def _backward(
    decoder: Decoder, batch: tuple[Tensor, Tensor], share: Tensor | None, loss: LossConfig
) -> dict[str, Tensor]:
    output: ModelOutput = decoder(*batch, loss)
    (output.loss if share is None else output.loss * share).backward()  # type: ignore[no-untyped-call]
    metrics = {name: getattr(output, name) for name in ("cross_entropy", "z_loss", "balance_loss", "router_z_loss")}
    if share is not None:
        metrics = {name: value * share for name, value in metrics.items()}
    return {**metrics, "expert_tokens_LE": output.expert_tokens_LE}


def _clip(parameters: list[Tensor], clip_norm: float | None) -> Tensor:
    """Scale the gradients down to ``clip_norm`` (null: leave them) and return their norm before, whole when sharded."""
    if clip_norm is None:
        gradients = [item.grad for item in parameters if item.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
    else:
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
