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

    loss_sum_nats: float = 0.0
    """Σ −ln p(target)."""
    target_tokens: int = 0
    """Number of predicted tokens."""
    target_bytes: int = 0
    """Bytes of text behind the predicted tokens."""


@torch.no_grad()
def validate(
    decoder: Decoder, batches: Iterable[tuple[Tensor, Tensor, int, str]], loss: LossConfig, device: torch.device
) -> dict[str, ValidationSums]:
    """Sum the cross-entropy by domain over ``batches`` of (tokens_BT, targets_BT, target bytes, domain).

    Targets of −100 do not count. Batches without any target are still run: sharded participants must take the same
    number of forward passes. Every domain of the batches is in the result, in their order.
    """
    decoder.eval()
    sums: dict[str, ValidationSums] = {}
    for tokens_BT, targets_BT, batch_bytes, domain in batches:
        count = int((targets_BT != IGNORED_TARGET).sum())
        output = decoder(tokens_BT.to(device), targets_BT.to(device), loss)
        before = sums.get(domain, ValidationSums())
        sums[domain] = ValidationSums(
            before.loss_sum_nats + (float(output.cross_entropy) * count if count else 0.0),
            before.target_tokens + count,
            before.target_bytes + batch_bytes,
        )
    decoder.train()
    reshard(decoder)
    return sums
