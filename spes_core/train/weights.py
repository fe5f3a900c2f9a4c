"""The tensors of a model as an exchange sees them: read and written one at a time, wherever they lie."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from spes_core import errors
from spes_core.errors import SpesError
from spes_core.sync.codec import Values
from spes_core.train.parallel import Group, Piece

T = TypeVar("T")


class Weights(Protocol):
    """All tensors of the model in canonical order, called by their index."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name, in canonical order."""

    @property
    def is_plain(self) -> bool:
        """Whether every tensor is float32 memory of this process, so that reading costs nothing."""

    @property
    def staged_bytes(self) -> int:
        """Memory that reading and writing take beside the model."""

    def is_rounded(self, index: int) -> bool:
        """Whether a tensor is stored in less than float32, so that what is written is rounded."""

    def read(self, index: int) -> Values:
        """The values of one tensor, flat float32; valid until the next one is read or written.

        They may be changed in place; that changes the tensor only where it is plain, until they are written back.
        """

    def write(self, index: int, first: int, values: Values) -> None:
        """Set values of one tensor from position ``first`` on; a tensor is written from its start to its end."""

    def first_not_finite(self, indices: Sequence[int]) -> int | None:
        """The first of these tensors that holds NaN or an infinite value; None when all are finite."""


class Stage:
    """One reusable host buffer of the largest tensor, page-locked where a GPU copies from and to it.

    Copies do not block the host: an event marks when the buffer may be touched again.
    """

    def __init__(self, num_elements: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._buffer = torch.empty(num_elements, dtype=torch.float32, pin_memory=is_cuda)
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self._buffer.nbytes

    def part(self, num_elements: int) -> Tensor:
        """The first values of the buffer, once no copy is under way."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._buffer[:num_elements]

    def fetch(self, tensor: Tensor) -> Values:
        """The values of a tensor, in the buffer."""
        part = self.part(tensor.numel())
        # The type is changed where the tensor lies, so that what crosses to the host is one plain copy.
        part.view(tensor.shape).copy_(tensor.to(torch.float32), non_blocking=True)
        self._mark(tensor)
        values: Values = self.part(tensor.numel()).numpy()
        return values

    def deliver(self, tensor: Tensor) -> None:
        """Copy what the buffer holds into a tensor; the buffer waits until that is done, the caller need not."""
        staged = self._buffer[: tensor.numel()].view(tensor.shape)
        tensor.copy_(staged.to(tensor.device, non_blocking=True))
        self._mark(tensor)

    def _mark(self, tensor: Tensor) -> None:
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(tensor.device))


class LocalWeights:
    """Tensors of this process alone. Plain ones are read and written where they are, others through a `Stage`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = list(tensors.values())
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        staged = [tensor for tensor in self._tensors if not _is_plain(tensor)]
        self.is_plain = not staged
        self._stage = Stage(max(t.numel() for t in staged), staged[0].device) if staged else None

    @property
    def staged_bytes(self) -> int:
        """See `Weights`."""
        return self._stage.nbytes if self._stage else 0

    def read(self, index: int) -> Values:
        """See `Weights`."""
        tensor = self._tensors[index]
        if _is_plain(tensor):
            values: Values = tensor.view(-1).numpy()
            return values
        assert self._stage is not None
        return self._stage.fetch(tensor)

    def is_rounded(self, index: int) -> bool:
        """See `Weights`."""
        return self._tensors[index].dtype.itemsize < torch.float32.itemsize

    def first_not_finite(self, indices: Sequence[int]) -> int | None:
        """See `Weights`."""
        return next((index for index in indices if not _is_finite(self._tensors[index])), None)

    def write(self, index: int, first: int, values: Values) -> None:
        """See `Weights`."""
        tensor, end = self._tensors[index], first + values.size
        if _is_plain(tensor):
            tensor.view(-1).numpy()[first:end] = values
            return
        assert self._stage is not None
        self._stage.part(tensor.numel()).numpy()[first:end] = values
        if end == tensor.numel():
            self._stage.deliver(tensor)


class DividedWeights:
    """Tensors that the ranks of a group divide, as rank 0 sees them; every other rank must be in `follow`.

    Each access makes one whole tensor pass through a buffer of rank 0. Used by one thread at a time; several may take
    turns, as gRPC's do.
    """

    is_plain = False

    def __init__(self, group: Group, pieces: list[Piece], shapes: dict[str, tuple[int, ...]]) -> None:
        self._group, self._pieces, self.shapes = group, pieces, shapes
        self._stage = Stage(max(piece.num_elements for piece in pieces), group.device)
        self._lock = threading.Lock()
        self._is_led = True

    @property
    def staged_bytes(self) -> int:
        """See `Weights`."""
        return self._stage.nbytes

    def read(self, index: int) -> Values:
        """See `Weights`."""
        piece = self._pieces[index]
        with self._lock:
            self._order("collect", index=index)
            if self._is_direct(piece):
                whole = self._stage.part(piece.num_elements)
                self._group.collect(piece, whole)
                values: Values = whole.numpy()
                return values
            whole = torch.empty(piece.num_elements, dtype=piece.dtype, device=self._group.device)
            self._group.collect(piece, whole)
            return self._stage.fetch(whole)

    def write(self, index: int, first: int, values: Values) -> None:
        """See `Weights`."""
        piece, end = self._pieces[index], first + values.size
        self._stage.part(piece.num_elements).numpy()[first:end] = values
        if end < piece.num_elements:
            return
        with self._lock:
            self._order("spread", index=index)
            if self._is_direct(piece):
                whole = self._stage.part(piece.num_elements)
            else:
                whole = torch.empty(piece.num_elements, dtype=piece.dtype, device=self._group.device)
                self._stage.deliver(whole)
            self._group.spread(piece, whole)

    def is_rounded(self, index: int) -> bool:
        """See `Weights`."""
        return self._pieces[index].dtype.itemsize < torch.float32.itemsize

    def first_not_finite(self, indices: Sequence[int]) -> int | None:
        """See `Weights`; each rank looks at its own part."""
        with self._lock:
            self._order("inspect", indices=list(indices))
            return _inspect(self._group, self._pieces, indices)

    def tensors(self) -> Mapping[str, Tensor]:
        """The whole tensors by name, each brought together when it is asked for: a copy in host memory."""
        return _WholeTensors(self)

    def lead(self, act: Callable[[], T], pack: Callable[[T], Any] = lambda outcome: None) -> T:
        """Do what only rank 0 can, while the other ranks `follow`; they get ``pack`` of its outcome, or its error."""
        self._is_led = True
        try:
            outcome = act()
        except SpesError as error:
            self._end("fail", kind=type(error).__name__, message=str(error))
            raise
        self._end("done", outcome=pack(outcome))
        return outcome

    def _is_direct(self, piece: Piece) -> bool:
        return piece.dtype == torch.float32 and self._group.device.type == "cpu"

    def _order(self, order: str, **details: Any) -> None:
        assert self._is_led, "an access after the other ranks were sent on"
        self._group.tell(json.dumps({"order": order, **details}).encode())

    def _end(self, order: str, **details: Any) -> None:
        # A thread of a failed call may still be at work: what it asks for after this has nobody to answer.
        with self._lock:
            self._order(order, **details)
            self._is_led = False


class _WholeTensors(Mapping[str, Tensor]):
    def __init__(self, weights: DividedWeights) -> None:
        self._weights, self._index_of = weights, {name: index for index, name in enumerate(weights.shapes)}

    def __getitem__(self, name: str) -> Tensor:
        values = self._weights.read(self._index_of[name]).copy()
        return torch.from_numpy(values).view(self._weights.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index_of)

    def __len__(self) -> int:
        return len(self._index_of)


def follow(group: Group, pieces: list[Piece]) -> Any:
    """On ranks other than 0: take part in what rank 0 does in `DividedWeights.lead`, until that ends.

    Returns its packed outcome, or raises the error that it raised.
    """
    for order in _orders(group):
        if order["order"] == "collect":
            group.collect(pieces[order["index"]], None)
        elif order["order"] == "spread":
            group.spread(pieces[order["index"]], None)
        elif order["order"] == "inspect":
            _inspect(group, pieces, order["indices"])
        elif order["order"] == "fail":
            kind = getattr(errors, order["kind"], SpesError)
            raise SpesError(order["message"]) if kind is errors.ConfigError else kind(order["message"])
        else:
            return order["outcome"]
    raise AssertionError


def _orders(group: Group) -> Iterator[dict[str, Any]]:
    while True:
        yield json.loads(group.hear())


def _inspect(group: Group, pieces: list[Piece], indices: Sequence[int]) -> int | None:
    """The first of these tensors of which any rank's part is not finite. All ranks call it together."""
    found = (index for index in indices if not _is_finite(pieces[index].local(group.rank)))
    (first,) = group.maxima([-float(next(found, len(pieces)))])
    return None if -first == len(pieces) else int(-first)


def _is_finite(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    smallest, largest = torch.aminmax(tensor)
    return bool(torch.isfinite(smallest) & torch.isfinite(largest))


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory is float32 values in order that numpy can see."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
