"""Several processes that train one model together: the only user of torch.distributed.

`Group` divides a decoder over the ranks of one torchrun job with FSDP2 (each layer is one unit): weights, frozen ones
included, gradients and optimizer moments are cut into one part per rank, and gradients are averaged over ranks at every
step. Whole tensors exist one at a time: `Group.collect` and `Group.spread` move one between rank 0 and all ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from spes_core.config import RunConfig
from spes_core.errors import ConfigError, Problem, Unreachable
from spes_core.model.counting import tensor_shapes
from spes_core.model.decoder import Decoder, DecoderLayer
from spes_core.model.moe import AllRanks, Experts
from spes_core.names import parse_expert
from spes_core.runfile import Meeting

_PATIENCE = timedelta(days=365)
"""Ranks that wait for rank 0 wait as long as a round may take; a dead rank is noticed by torchrun, not by this."""
_MEETING_PATIENCE = timedelta(minutes=5)
"""How much later than the others rank 0 may come to a meeting of several hosts."""


class Group:
    """The process group of this torchrun job, or of one on each of several hosts; entered once per process."""

    def __init__(
        self,
        device: torch.device,
        config: RunConfig,
        folder: Path,
        first_rank: int = 0,
        meeting: Meeting | None = None,
    ) -> None:
        """Join the other ranks: those of this host in a file in ``folder``, those of several at the ``meeting``.

        ``first_rank`` is the lowest of this host's. Raises ConfigError when this process is not one of as many torchrun
        processes as ``config`` needs, Unreachable when rank 0 does not come to the meeting.
        """
        _check_torchrun(config, first_rank, is_whole=meeting is None)
        self.device = device
        self.rank, self.size = global_rank(first_rank), config.group_size
        # One torchrun agent is the parent of all ranks, so its process id tells this meeting from earlier ones.
        self._file = folder / f"ranks-{os.getppid()}-{os.environ['MASTER_PORT']}.store"
        store = _meet_in(self._file, self.size) if meeting is None else _meet_at(meeting, self.rank)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
        # Orders and small sums travel apart, so that a rank may wait for the next order longer than for a gradient.
        self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._mesh = _mesh(config.parallel.strategy, device, self.size)

    def shard(self, decoder: Decoder) -> None:
        """Divide the decoder in place; it may still be on the meta device, its values are then yet to be filled in."""
        rows = _rows_placement(self._mesh)
        for layer in decoder.layers:
            fully_shard(layer, mesh=self._mesh, shard_placement_fn=rows)
            assert isinstance(layer, DecoderLayer)
            layer.all_ranks = AllRanks(self.size, self._total)
        fully_shard(decoder, mesh=self._mesh, shard_placement_fn=rows)

    def pieces(self, decoder: Decoder) -> list[Piece]:
        """This rank's part of every tensor of a sharded decoder, in canonical order."""
        shapes = tensor_shapes(decoder.config)
        return [_piece(decoder, name, shape, self.size, self.rank) for name, shape in shapes.items()]

    @torch.no_grad()
    def collect(self, piece: Piece, whole: Tensor | None) -> None:
        """Bring one tensor together in ``whole`` on rank 0 (flat, of the piece's type and device; None elsewhere)."""
        local = piece.local(self.rank)
        if whole is None:
            if not piece.is_replicated and local.numel():
                dist.send(local, 0)
            return
        for rank, part in enumerate(piece.cut(whole)):
            if rank == 0:
                part.copy_(local)
            elif part.numel():
                dist.recv(part, rank)

    @torch.no_grad()
    def spread(self, piece: Piece, whole: Tensor | None) -> None:
        """Give every rank its part of ``whole``, which rank 0 has (flat, of the piece's type and device)."""
        local = piece.local(self.rank)
        if piece.is_replicated:
            if whole is not None:
                local.copy_(whole)
            dist.broadcast(local, 0)
            return
        if whole is None:
            if local.numel():
                dist.recv(local, 0)
            return
        for rank, part in enumerate(piece.cut(whole)):
            if rank == 0:
                local.copy_(part)
            elif part.numel():
                dist.send(part, rank)

    def tell(self, order: bytes) -> None:
        """Send an order from rank 0 to all other ranks, which `hear` it."""
        dist.broadcast(torch.tensor([len(order)]), 0, group=self._control)
        dist.broadcast(torch.frombuffer(bytearray(order), dtype=torch.uint8), 0, group=self._control)

    def hear(self) -> bytes:
        """Wait for what rank 0 tells."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._control)
        order = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(order, 0, group=self._control)
        return order.numpy().tobytes()

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sum of each number over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Largest of each number over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def newest_common(self, steps: Collection[int]) -> int:
        """The largest of the positive ``steps`` of this rank that all ranks name; 0 when there is none."""
        newest = max(steps, default=0)
        while True:
            lowest = -int(self.maxima([-newest])[0])
            if self.sums([lowest == 0 or lowest in steps])[0] == self.size:
                return lowest
            newest = max((step for step in steps if step <= lowest), default=0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self._control)

    def close(self) -> None:
        """Leave the group."""
        self.barrier()
        dist.destroy_process_group()
        self._file.unlink(missing_ok=True)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, operation, group=self._control)
        found: list[float] = numbers.tolist()
        return found

    def _total(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total)
        return total


@dataclass(frozen=True)
class Piece:
    """How one canonical tensor lies on the ranks: each has a run of its values, which follow one another."""

    name: str
    bounds: tuple[int, ...]
    """Rank r holds the values from bounds[r] to bounds[r + 1] of the flat tensor."""
    is_replicated: bool
    """Every rank holds all of it instead."""
    parameter: nn.Parameter
    """The parameter that it lies in."""
    select: Callable[[Tensor], Tensor]
    """From the parameter's local part to the tensor's."""

    @property
    def dtype(self) -> torch.dtype:
        """Storage type."""
        return self.parameter.dtype

    @property
    def num_elements(self) -> int:
        """Values of the whole tensor."""
        return self.bounds[-1]

    def local(self, rank: int) -> Tensor:
        """This rank's values, flat, sharing storage. Looked up at each call: FSDP moves an uneven part once."""
        part = self.select(local_part(self.parameter.detach()))
        expected = self.num_elements if self.is_replicated else self.bounds[rank + 1] - self.bounds[rank]
        assert part.numel() == expected and part.is_contiguous(), self.name
        return part.view(-1)

    def cut(self, whole: Tensor) -> list[Tensor]:
        """The parts of a whole flat tensor by rank, as views; all of it for rank 0 when it is replicated."""
        if self.is_replicated:
            return [whole]
        return [whole[start:end] for start, end in zip(self.bounds, self.bounds[1:], strict=False)]


@torch.no_grad()
def fill(piece: Piece, value: Tensor, rank: int) -> None:
    """Set this rank's part of a tensor from the whole ``value``, which every rank has."""
    local = piece.local(rank)
    whole = value.reshape(-1)
    local.copy_(whole if piece.is_replicated else whole[piece.bounds[rank] : piece.bounds[rank + 1]])


def reshard(decoder: Decoder) -> None:
    """Free gathered parameters of a sharded decoder: a forward pass without a backward leaves the root's in memory."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: its part of a divided one, else all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divided_like(local: Tensor, parameter: Tensor) -> Tensor:
    """``local`` as this rank's part of a tensor that is divided like ``parameter``; itself when that is whole."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_rank() -> int:
    """Index of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Number of processes of this one's torchrun; 1 without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def global_rank(first_rank: int = 0) -> int:
    """Index of this process in its group, of which this host's torchrun has the ranks from ``first_rank`` on."""
    return first_rank + int(os.environ.get("RANK", "0"))


def _meet_in(file: Path, ranks: int) -> Any:
    """A store for ranks of one host: one on a port would listen on every interface."""
    return dist.FileStore(str(file), ranks)  # type: ignore[attr-defined]


def _meet_at(meeting: Meeting, rank: int) -> Any:
    """A store for ranks of several hosts, at the one address that was named: torch's own would listen on them all.

    So torchrun, which would open one of those between hosts, knows of its own host only.
    """
    host, _, port = meeting.address.rpartition(":")
    host = host.strip("[]")
    try:
        listening = None if rank else _listen(host, int(port))
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=rank == 0, wait_for_workers=False, timeout=_MEETING_PATIENCE,
            master_listen_fd=listening,
        )  # fmt: skip
    except (OSError, RuntimeError) as error:
        what = (
            f"rank {rank} cannot {'call' if rank else 'listen at'} {meeting.address}, where the ranks of the group meet"
        )
        raise Unreachable(
            f"{what}: {str(error).splitlines()[0]}; see launcher.port, and address of rank 0's host"
        ) from error
    return dist.PrefixStore(meeting.key, store)  # type: ignore[attr-defined]


def _listen(host: str, port: int) -> int:
    """The descriptor of a socket that listens at one address."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family).detach()


def _check_torchrun(config: RunConfig, first_rank: int, *, is_whole: bool) -> None:
    ranks = config.parallel.ranks_per_node
    by_gradients = config.sync.exchange == "gradients"
    if "RANK" not in os.environ:
        path = "sync.exchange" if by_gradients else "parallel.ranks_per_node"
        value = '("gradients")' if by_gradients else f"({ranks})"
        message = f"{value} needs one process group; start the node with torchrun (the launcher does)"
        raise ConfigError([Problem(path, message)])
    size = int(os.environ["WORLD_SIZE"])
    if size != config.group_size if is_whole else first_rank + size > config.group_size:
        path, factor = ("nodes", "× parallel.ranks_per_node ") if by_gradients else ("parallel.ranks_per_node", "")
        message = f"{factor}({config.group_size}) must equal the torchrun processes ({size})"
        raise ConfigError([Problem(path, message)])


def _mesh(strategy: Literal["fsdp", "ddp"], device: torch.device, size: int) -> DeviceMesh:
    """One dimension to shard over; for "ddp" one to replicate over, and a single shard."""
    if strategy == "fsdp":
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (size, 1), mesh_dim_names=("replicate", "shard"))


def _rows_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Banks are cut along the rows of their matrices, so that ranks hold equal parts whatever the number of experts.

    FSDP2 cuts other dimensions than the first only evenly; a bank whose rows do not divide is cut by experts.
    """
    ranks = mesh["shard"].size()
    return lambda parameter: Shard(1) if parameter.dim() == 3 and parameter.shape[1] % ranks == 0 else None


def _piece(decoder: Decoder, name: str, shape: tuple[int, ...], ranks: int, rank: int) -> Piece:
    if (parsed := parse_expert(name)) is None:
        parameter = decoder.get_parameter(name)
        return _make_piece(name, shape, ranks, parameter, lambda local: local)
    layer, expert, matrix = parsed
    experts = decoder.get_submodule(f"layers.{layer}.experts")
    assert isinstance(experts, Experts)
    parameter, row = experts.bank_of(expert, matrix)
    placement = _shard_placement(parameter)
    if placement is None or placement.dim == 1:
        return _make_piece(name, shape, ranks, parameter, lambda local: local[row])
    experts_per_rank = ceil(parameter.shape[0] / ranks)
    owner, row_there = divmod(row, experts_per_rank)
    bounds = tuple(0 if one <= owner else prod(shape) for one in range(ranks + 1))
    # On ranks that hold nothing of the tensor the slice is empty.
    is_here = rank == owner
    return Piece(name, bounds, False, parameter, lambda local: local[row_there] if is_here else local[:0])


def _make_piece(
    name: str, shape: tuple[int, ...], ranks: int, parameter: nn.Parameter, select: Callable[[Tensor], Tensor]
) -> Piece:
    """A tensor whose rows are dealt to the ranks in equal runs, rounded up."""
    if _shard_placement(parameter) is None:
        return Piece(name, (0, prod(shape)), True, parameter, select)
    rows_per_rank, row_elements = ceil(shape[0] / ranks), prod(shape[1:])
    bounds = tuple(min(rank * rows_per_rank, shape[0]) * row_elements for rank in range(ranks + 1))
    return Piece(name, bounds, False, parameter, select)


def _shard_placement(parameter: Tensor) -> Shard | None:
    """How a parameter is cut; None when every rank holds all of it."""
    assert isinstance(parameter, DTensor)
    (placement,) = [item for item in parameter.placements if isinstance(item, Shard)]
    return placement if parameter.device_mesh["shard"].size() > 1 else None
