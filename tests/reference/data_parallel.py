"""Data-parallel SGD written out: per-node gradients of one shared model, averaged by the rule of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spes_core.config import RunConfig
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initialise

Batch = tuple[Tensor, Tensor]


def data_parallel_sgd(
    config: RunConfig,
    batches_of_step: Callable[[int], Sequence[Batch]],
    nodes_of: Callable[[str], Sequence[int]],
) -> dict[str, Tensor]:
    """Final weights of w ← w − lr · mean over ``nodes_of(name)`` of that node's gradient, for every step and tensor."""
    decoder = Decoder(config.model, range(config.model.num_experts))
    initialise(decoder, config.seed)
    for step in range(1, config.total_steps + 1):
        gradients = [_gradients(decoder, config, batch) for batch in batches_of_step(step)]
        for name, weight in decoder.tensors().items():
            mean = torch.stack([gradients[node][name].double() for node in nodes_of(name)]).mean(dim=0)
            weight.copy_(weight.double() - config.optim.lr * mean)
    return decoder.tensors()


def _gradients(decoder: Decoder, config: RunConfig, batch: Batch) -> dict[str, Tensor]:
    decoder.zero_grad()
    decoder(*batch, config.loss).loss.backward()
    # A second decoder whose weights are the gradients gives them their canonical names.
    holder = Decoder(config.model, range(config.model.num_experts))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            assert parameter.grad is not None
            holder.get_parameter(name).copy_(parameter.grad)
    return holder.tensors()
