"""One optimizer step: forward and backward over the micro-batches, clipping, update.

Metrics stay on the device until the caller reads them; only the experts wait for it, once a layer, to learn their
slices (`model.moe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spes_core.config import LossConfig
from spes_core.model.decoder import Decoder, ModelOutput
from spes_core.model.losses import IGNORED_TARGET
from spes_core.train.optimizers import make_optimizer as make_optimizer
from spes_core.train.optimizers import set_learning_rate


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

    Several micro-batches accumulate: each counts by its share of the targets, so that cross-entropy and z-loss are
    those of the batches put together, and so is the router z-loss where the micro-batches have equally many targets
    and tokens. The balance loss is linear in the router's probabilities once its fractions f are given, which
    ``loss.balance_fractions`` decides: over the whole step ("whole_batch"; then it too is that of one batch, to
    rounding) or over this micro-batch and those before it ("accumulated").
    """
    optimizer.zero_grad(set_to_none=True)
    others, outputs = _OtherTokens(decoder, batches, loss), []
    for index, (batch, share) in enumerate(zip(batches, _shares(batches), strict=True)):
        outputs.append(_backward(decoder, batch, share, loss, others.of(index)))
        others.add(outputs[-1]["expert_tokens_LE"])
    grad_norm = _clip([item for item in decoder.parameters() if item.requires_grad], clip_norm)
    set_learning_rate(optimizer, learning_rate)
    optimizer.step()
    means = {name: torch.stack([item[name] for item in outputs]).sum(0) for name in outputs[0]}
    return StepMetrics(grad_norm=grad_norm, **means)


def _shares(batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
    """Each micro-batch's share of the targets; None when there is only one, which needs no scaling."""
    if len(batches) == 1:
        return [None]
    counts = torch.stack([(targets_BT != IGNORED_TARGET).sum() for _, targets_BT in batches]).float()
    return list(counts / counts.sum().clamp(min=1))


class _OtherTokens:
    """Tokens that the other micro-batches of the step send to each expert, as far as the balance loss counts them."""

    def __init__(self, decoder: Decoder, batches: Sequence[tuple[Tensor, Tensor]], loss: LossConfig) -> None:
        self._all: list[Tensor] = []
        self._before: Tensor | None = None
        if len(batches) > 1 and loss.balance_fractions == "whole_batch" and loss.balance_weight != 0:
            with torch.no_grad():
                self._all = [decoder(*batch, loss).expert_tokens_LE for batch in batches]

    def of(self, index: int) -> Tensor | None:
        if self._all:
            return torch.stack(self._all).sum(0) - self._all[index]
        return self._before

    def add(self, expert_tokens_LE: Tensor) -> None:
        self._before = expert_tokens_LE if self._before is None else self._before + expert_tokens_LE


def _backward(
    decoder: Decoder,
    batch: tuple[Tensor, Tensor],
    share: Tensor | None,
    loss: LossConfig,
    other_tokens_LE: Tensor | None,
) -> dict[str, Tensor]:
    output: ModelOutput = decoder(*batch, loss, other_tokens_LE)
    (output.loss if share is None else output.loss * share).backward()  # type: ignore[no-untyped-call]
    metrics = {name: getattr(output, name) for name in ("cross_entropy", "z_loss", "balance_loss", "router_z_loss")}
    if share is not None:
        metrics = {name: value * share for name, value in metrics.items()}
    return {**metrics, "expert_tokens_LE": output.expert_tokens_LE}


def _clip(parameters: list[Tensor], clip_norm: float | None) -> Tensor:
    """Scale the gradients down to ``clip_norm`` (null: leave them) and return their norm before, whole when sharded."""
    gradients = [item.grad for item in parameters if item.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    is_known = not norm.is_cuda and not hasattr(norm, "full_tensor")
    if clip_norm is not None and not (is_known and float(norm) <= clip_norm):  # within it: no pass to multiply by one
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
