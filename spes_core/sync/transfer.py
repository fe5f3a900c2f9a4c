"""How encoded tensors are cut into chunks, and in which order the chunks must arrive: arithmetic, no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spes_core.errors import ProtocolError


@dataclass(frozen=True)
class WireFormat:
    """Size of a codec's output: ``block_elements`` values become ``block_bytes`` bytes; a short last block shrinks.

    A chunk holds whole blocks, so that the receiver decodes each chunk on its own.
    """

    name: str
    block_elements: int
    block_bytes: int

    def encoded_bytes(self, num_elements: int) -> int:
        """Bytes on the wire of so many values, without framing."""
        return -(-num_elements * self.block_bytes // self.block_elements)

    def elements(self, encoded_bytes: int) -> int:
        """Values in so many bytes; inverse of `encoded_bytes`."""
        return encoded_bytes * self.block_elements // self.block_bytes

    def chunks(self, encoded_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        """(offset, length) of each chunk of one encoded tensor, in bytes."""
        whole = max(chunk_bytes // self.block_bytes, 1) * self.block_bytes
        for offset in range(0, encoded_bytes, whole):
            yield offset, min(whole, encoded_bytes - offset)


FORMATS = {"float32": WireFormat("float32", 1, 4)}
"""Every wire format by the value of wire.dtype that asks for it."""


class Transfer:
    """Checks that chunks arrive whole, once, in canonical order, and none beyond what was announced."""

    def __init__(self, tensors: Sequence[int], sizes_bytes: Sequence[int], block_bytes: int) -> None:
        """``sizes_bytes[i]`` is the encoded size of the tensor with index ``tensors[i]``; all are positive."""
        self._tensors, self._sizes_bytes, self._block_bytes = tensors, sizes_bytes, block_bytes
        self._at = 0
        self._offset = 0

    def accept(self, tensor: int, offset: int, length: int) -> bool:
        """Take note of the next chunk; True when it completes its tensor. Raises ProtocolError when another is due."""
        if self.is_complete:
            raise ProtocolError(f"a chunk of tensor {tensor} came after the last announced one")
        due, size = self._tensors[self._at], self._sizes_bytes[self._at]
        if (tensor, offset) != (due, self._offset):
            raise ProtocolError(
                f"chunk of tensor {tensor} at byte {offset} came where tensor {due} at byte {self._offset} was due"
            )
        end = offset + length
        if length < 1 or end > size or (end < size and length % self._block_bytes):
            raise ProtocolError(
                f"chunk of tensor {tensor} at byte {offset} has {length} bytes; the tensor has {size - offset} more, in"
                f" blocks of {self._block_bytes}"
            )
        if end < size:
            self._offset = end
            return False
        self._at, self._offset = self._at + 1, 0
        return True

    @property
    def is_complete(self) -> bool:
        """Whether every announced byte has come."""
        return self._at == len(self._tensors)

    def finish(self) -> None:
        """Raises ProtocolError when something announced has not come."""
        if not self.is_complete:
            raise ProtocolError(f"the end came where tensor {self._tensors[self._at]} at byte {self._offset} was due")
