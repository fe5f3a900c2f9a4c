"""The initial weights of a run by tensor name: drawn, or read from a file; the same for every node and the server."""

from __future__ import annotations

from pathlib import Path

import torch

from spes_core.checkpoint import TensorOf, WeightsFile, check_forms
from spes_core.config import RunConfig
from spes_core.errors import ConfigError, DataError, Problem
from spes_core.filedigest import file_digest
from spes_core.model.counting import tensor_shapes
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initial_tensor


def initial_weights(config: RunConfig) -> TensorOf:
    """A function from a canonical name to the tensor's initial value (fp32, CPU), one at a time.

    Raises ConfigError when the run starts from a file that cannot be read, is not the file that the run was planned
    with, or holds other tensors than the model has.
    """
    if config.init.kind == "random":
        return lambda name: initial_tensor(config.model, name, config.seed)
    path = Path(config.init.weights or "")
    try:
        digest = file_digest(path)
        weights = WeightsFile(path)
        check_forms(path, weights.forms, tensor_shapes(config.model))
    except DataError as error:
        raise ConfigError([Problem("init.weights", f"cannot be used: {error}")]) from error
    if config.init.digest != digest:
        message = f"({config.init.digest or 'null'}) must be the SHA-256 of {path}, which is {digest}"
        raise ConfigError([Problem("init.digest", f"{message}; set it so, or give the file that was meant")])
    return lambda name: weights.tensor(name).float()


@torch.no_grad()
def fill(decoder: Decoder, initial: TensorOf) -> None:
    """Give every tensor of the decoder, trained and frozen, its initial value."""
    for name, tensor in decoder.tensors().items():
        tensor.copy_(initial(name))
