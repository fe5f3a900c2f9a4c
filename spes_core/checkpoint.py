"""Weights on disk: one safetensors file by canonical names, complete or absent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from spes_core.errors import DataError


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write all tensors to ``path``: first beside it and flushed to the disk, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(contiguous, partial, metadata=dict(metadata))
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `save_weights` wrote. Raises DataError."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except Exception as error:
        # safetensors raises several unrelated types for a missing, torn or foreign file.
        raise DataError(f"{path} cannot be read as weights: {error}") from error
    return tensors
