"""A node's exact copy of the global weights, and how changes leave it and enter it under every codec.

The invariant: between rounds the copy is bit for bit what the server holds. Most of it is the working copy itself
(`Weights`); only what that does not show is kept beside it, as float32 in host memory:

- *bases*: the last global value of tensors that are trained, where a codec sends differences from it, and of tensors
  whose working copy is rounded (frozen.dtype), where a round may leave them out or send a difference;
- *residuals*: of trained tensors, what earlier changes lost, where the codec feeds it back.

A round takes no further memory than one encoded tensor, because it lends these places. With w the working copy, B the
base and R the residual, a trained tensor passes through ::

    trained     w = new value      B = old global value    R = residual
    encoded     w = d              B = old global value    R = d̂           d = w − B + R; without feedback w = d̂
    adopted     w = new global     B = new global          R = d − d̂

Encoding again between the first two gives the same bytes, as a client may need after a lost connection: d still lies
in w, or d̂, which an encoder without feedback maps to itself. An exact codec leaves w alone. What was encoded cannot be
trained on before it is adopted: a round that fails ends the process or is followed by a snapshot of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from spes_core.config import RunConfig
from spes_core.model.counting import keeps_rounded
from spes_core.sync.codec import Codec, Values, decode_change, make_codec
from spes_core.train.weights import Weights


class GlobalCopy:
    """See the module. Used by one thread at a time for each tensor."""

    def __init__(
        self, config: RunConfig, weights: Weights, trained: Iterable[int], exact: Callable[[str], Values] | None = None
    ) -> None:
        """``weights`` hold the global weights; ``exact(name)`` gives those that they hold rounded."""
        self.codec: Codec = make_codec(config.wire.dtype)
        self._keeps_rounded = keeps_rounded(config)
        self._names = list(weights.shapes)
        self.sizes = [prod(shape) for shape in weights.shapes.values()]
        self._bases: dict[int, Values] = {}
        self._residuals: dict[int, Values] = {}
        self._bind(weights, trained)
        for index in self._bases:
            is_rounded = weights.is_rounded(index)
            assert exact is not None or not is_rounded, "rounded weights without their exact values"
            source = exact(self._names[index]) if exact is not None and is_rounded else weights.read(index)
            self._bases[index][:] = source

    @property
    def nbytes(self) -> int:
        """Memory beside the working copy."""
        kept = sum(values.nbytes for part in (self._bases, self._residuals) for values in part.values())
        return kept + len(self._encoded)

    @property
    def is_whole(self) -> bool:
        """Whether every tensor's exact value is known: not where a rounded one is sent anew in every round."""
        return all(index in self._bases or not self._weights.is_rounded(index) for index in range(len(self.sizes)))

    def exact(self, index: int) -> Values:
        """The global value of a tensor, flat; valid until the next one is read or written. Not inside a round."""
        return self._bases[index] if index in self._bases else self._weights.read(index)

    # Sending

    def begin_round(self) -> None:
        """The working copy is trained: from here on changes are encoded and adopted."""
        self._changes.clear()

    def encode(self, index: int) -> memoryview:
        """The bytes that tell the server of a trained tensor; valid until the next is encoded. May be repeated."""
        codec = self.codec
        values = self._weights.read(index)
        if not codec.is_delta:
            return codec.encode(values)
        if index in self._changes:
            return codec.encode(values, self._encoded)
        self._changes.add(index)
        np.subtract(values, self._bases[index], out=values)
        if (residual := self._residuals.get(index)) is not None:
            np.add(values, residual, out=values)
        payload = codec.encode(values, self._encoded)
        codec.decode(payload, values if residual is None else residual)
        self._write_back(index, values)
        return payload

    # Adopting

    def keep(self, index: int) -> Values:
        """Adopt what this node itself sent for a tensor: it alone trained it. Its new value, as `exact`."""
        if not self.codec.is_delta:
            return self._adopt_exact(index)
        base, values = self._bases[index], self._weights.read(index)
        if (decoded := self._residuals.get(index)) is not None:
            np.add(base, decoded, out=base)
            np.subtract(values, decoded, out=decoded)
        else:
            np.add(base, values, out=base)
        self._weights.write(index, 0, base)
        return base

    def decode(self, index: int, offset: int, payload: memoryview) -> Values:
        """Adopt the server's change of a tensor from byte ``offset`` on, in order from its start to its end.

        Returns the new global values that were in it, valid until the next call.
        """
        first = self.codec.format.elements(offset)
        end = min(first + self.codec.format.elements(len(payload)), self.sizes[index])
        if not self.codec.is_delta:
            return self.set(index, first, self.codec.decode(payload))
        if first == 0:
            if index in self._changes and (decoded := self._residuals.get(index)) is not None:
                np.subtract(self._weights.read(index), decoded, out=decoded)
            # Without a base the working copy is exact, and changes in place (or in the buffer that stages it).
            self._under_way = self._bases[index] if index in self._bases else self._weights.read(index)
        values = self._under_way[first:end]
        decode_change(self.codec, payload, values, values)
        if end == self.sizes[index] and (index in self._bases or not self._weights.is_plain):
            self._weights.write(index, 0, self._under_way)
        return values

    def set(self, index: int, first: int, values: Values) -> Values:
        """Adopt a tensor's exact global values from position ``first`` on, in order from its start to its end."""
        if (base := self._bases.get(index)) is not None:
            base[first : first + values.size] = values
        self._weights.write(index, first, values)
        return values

    def forget_residuals(self) -> None:
        """Start anew after a snapshot: what earlier changes lost belongs to weights that are gone."""
        for residual in self._residuals.values():
            residual.fill(0)

    # From run to run, and from one division of the experts to another

    def state(self) -> dict[str, Tensor]:
        """What must be stored beside the working copy between two rounds, by "base|name" and "residual|name"."""
        rounded = {i: base for i, base in self._bases.items() if self._weights.is_rounded(i)}
        kept = (("base", rounded), ("residual", self._residuals))
        return {f"{kind}|{self._names[i]}": torch.from_numpy(part[i]) for kind, part in kept for i in sorted(part)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave; the working copy is that of the same moment."""
        for index, base in self._bases.items():
            stored = state.get(f"base|{self._names[index]}")
            base[:] = self._weights.read(index) if stored is None else stored.numpy()
        for index, residual in self._residuals.items():
            residual[:] = state[f"residual|{self._names[index]}"].numpy()

    def rebind(self, weights: Weights, trained: Iterable[int], moved: Mapping[int, Values]) -> None:
        """Go on over other working copies, which show the old values but for the tensors ``moved``, given exactly."""
        self._bind(weights, trained)
        for index, values in moved.items():
            self.set(index, 0, values)

    def _bind(self, weights: Weights, trained: Iterable[int]) -> None:
        """Keep what the codec needs for these tensors; bases and residuals that are new are yet to be filled, or 0."""
        self._weights, self.trained = weights, tuple(trained)
        rounded = {i for i in range(len(self.sizes)) if self._keeps_rounded and weights.is_rounded(i)}
        with_base = rounded | (set(self.trained) if self.codec.is_delta else set())
        with_residual = self.trained if self.codec.has_feedback else ()
        self._bases = {i: self._place(self._bases, i) for i in sorted(with_base)}
        self._residuals = {i: self._place(self._residuals, i) for i in with_residual}
        largest = max((self.sizes[i] for i in self.trained), default=0) if self.codec.is_delta else 0
        self._encoded = bytearray(self.codec.format.encoded_bytes(largest))
        self._changes: set[int] = set()
        """Tensors whose change lies in the working copy."""
        self._under_way = np.empty(0, dtype=np.float32)

    def _place(self, old: Mapping[int, Values], index: int) -> Values:
        return old[index] if index in old else np.zeros(self.sizes[index], dtype=np.float32)

    def _adopt_exact(self, index: int) -> Values:
        values = self._weights.read(index)
        if (base := self._bases.get(index)) is not None:
            base[:] = values
        return values

    def _write_back(self, index: int, values: Values) -> None:
        if not self._weights.is_plain:
            self._weights.write(index, 0, values)
