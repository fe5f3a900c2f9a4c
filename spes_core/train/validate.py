"""Validation of the global model: each participant sums the loss over its share of the held-out sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from spes_core.config import LossConfig
from spes_core.model.decoder import Decoder
from spes_core.model.losses import IGNORED_TARGET
from spes_core.train.parallel import reshard


@dataclass(frozen=True)
class ValidationSums:
    """Sums over one share; the loss of the whole set is Σ loss_sum_nats / Σ target_tokens over the shares."""

    loss_sum_nats: float
    """Σ −ln p(target)."""
    target_tokens: int
    """Number of predicted tokens."""
    target_bytes: int
    """Bytes of text behind the predicted tokens."""


@torch.no_grad()
def validate(
    decoder: Decoder, batches: Iterable[tuple[Tensor, Tensor, int]], loss: LossConfig, device: torch.device
) -> ValidationSums:
    """Sum the cross-entropy over ``batches`` of (tokens_BT, targets_BT, target bytes); targets of −100 do not count.

    Batches without any target are still run: sharded participants must take the same number of forward passes.
    """
    decoder.eval()
    loss_sum_nats, target_tokens, target_bytes = 0.0, 0, 0
    for tokens_BT, targets_BT, batch_bytes in batches:
        count = int((targets_BT != IGNORED_TARGET).sum())
        output = decoder(tokens_BT.to(device), targets_BT.to(device), loss)
        if count:
            loss_sum_nats += float(output.cross_entropy) * count
        target_tokens += count
        target_bytes += batch_bytes
    decoder.train()
    reshard(decoder)
    return ValidationSums(loss_sum_nats, target_tokens, target_bytes)
