"""Initial weights: a pure function of (model, tensor name, seed), so that all processes agree whatever they train."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

from spes_core.config import ModelConfig
from spes_core.model.counting import tensor_shapes
from spes_core.model.decoder import Decoder


def initial_tensor(model: ModelConfig, name: str, seed: int) -> Tensor:
    """Initial value (fp32, CPU) of the tensor with this canonical name: ones for norms, else normal(0, init_std)."""
    shape = _shapes(model)[name]
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0, model.init_std, generator=generator)


def initialise(decoder: Decoder, seed: int) -> None:
    """Fill every tensor of the decoder, trained and frozen, with its initial value."""
    for name, tensor in decoder.tensors().items():
        tensor.copy_(initial_tensor(decoder.config, name, seed))


_shapes = cache(tensor_shapes)
