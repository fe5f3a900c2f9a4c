"""Measured memory of one training process, split into the parts that `model.counting` predicts.

Weights, gradients and optimizer moments are summed over the tensors that exist. Activations are what autograd
keeps for the backward pass: every storage that it saves in one forward pass, counted once, without the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def weights_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers that this process holds (its shard, when sharded)."""
    return sum(_local(tensor).nbytes for tensor in (*module.parameters(), *module.buffers()))


def gradients_bytes(module: nn.Module) -> int:
    """Bytes of the gradients that the parameters hold right now: all of them between two steps."""
    return sum(_local(weight.grad).nbytes for weight in module.parameters() if weight.grad is not None)


def moments_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's per-parameter state; scalar step counters are left out."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(_stored_bytes(_local(value)) for value in states if isinstance(value, Tensor) and value.dim() > 0)


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes behind a tensor, or behind the parts of one that is quantised."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)


class SavedActivations:
    """Counts the bytes that autograd saves inside `measure` up to the first backward pass; read `nbytes` afterwards.

    So it is what one micro-batch keeps: the next one finds the memory of the first free again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sizes: dict[int, int] = {}
        self._batch: set[int] = set()
        self._is_counting = True

    @property
    def nbytes(self) -> int:
        """Bytes of all distinct saved storages."""
        return sum(self._sizes.values())

    @contextmanager
    def measure(self, batch: Sequence[Tensor]) -> Iterator[None]:
        """Count every tensor that is saved for a backward pass in the block, but for the ``batch`` itself."""
        self._batch = {tensor.untyped_storage().data_ptr() for tensor in batch}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _unpack(self, tensor: Tensor) -> Tensor:
        self._is_counting = False
        return tensor

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self._is_counting:
            return tensor
        # The weights are looked up at each call: a sharded module swaps them in and out layer by layer.
        weights = {_local(weight).untyped_storage().data_ptr() for weight in self._weights()}
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights | self._batch:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def _weights(self) -> Iterator[Tensor]:
        yield from self._module.parameters()
        yield from self._module.buffers()


def cuda_peak_bytes() -> int | None:
    """Largest memory allocated on the current CUDA device; None without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def _local(tensor: Any) -> Tensor:
    """The part of a (possibly distributed) tensor that lies in this process."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
