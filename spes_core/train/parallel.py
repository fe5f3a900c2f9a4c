"""Several processes that train one model together: the only user of torch.distributed.

`Group` shards a decoder over all ranks with FSDP2 (each layer is one unit), so that parameters, gradients and
optimizer moments are divided by the number of ranks, and gradients are averaged over ranks at every step.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from spes_core.errors import ConfigError, Problem
from spes_core.model.decoder import Decoder


class Group:
    """The process group of this torchrun job; entered once per process."""

    def __init__(self, device: torch.device, expected_size: int) -> None:
        if "RANK" not in os.environ:
            message = '("gradients") needs one process group; start the node with torchrun (the launcher does)'
            raise ConfigError([Problem("sync.exchange", message)])
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size != expected_size:
            message = f"× parallel.ranks_per_node ({expected_size}) must equal the torchrun processes ({self.size})"
            raise ConfigError([Problem("nodes", message)])
        self._mesh = init_device_mesh(device.type, (self.size,))

    def shard(self, decoder: Decoder) -> None:
        """Shard the decoder in place; every rank must hold the same values before."""
        for layer in decoder.layers:
            fully_shard(layer, mesh=self._mesh)
        fully_shard(decoder, mesh=self._mesh)

    @torch.no_grad()
    def gather(self, decoder: Decoder) -> Decoder | None:
        """An unsharded copy of the decoder in the host memory of rank 0; None on other ranks. One tensor at a time."""
        whole = Decoder(decoder.config, decoder.trained_experts) if self.rank == 0 else None
        for name, parameter in decoder.named_parameters():
            assert isinstance(parameter, DTensor)
            tensor = parameter.full_tensor()
            if whole is not None:
                whole.get_parameter(name).copy_(tensor)
        return whole

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def reshard(decoder: Decoder) -> None:
    """Free gathered parameters of a sharded decoder: a forward pass without a backward leaves the root's in memory."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_rank() -> int:
    """Index of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def global_rank() -> int:
    """Index of this process in its torchrun group; 0 without one."""
    return int(os.environ.get("RANK", "0"))
