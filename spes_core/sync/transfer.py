"""How encoded tensors are cut into chunks, and in which order the chunks must arrive: arithmetic, no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spes_core.errors import ProtocolError


@dataclass(frozen=True)
class WireFormat:
    """Size of a codec's output: ``block_elements`` values become ``block_bytes`` bytes, ``header_bytes`` of them first.

    A short last block is its header and its values. A chunk holds whole blocks, so that the receiver decodes each
    chunk on its own.
    """

    name: str
    block_elements: int
    block_bytes: int
    header_bytes: int = 0

    def encoded_bytes(self, num_elements: int) -> int:
        """Bytes on the wire of so many values, without framing."""
        blocks, rest = divmod(num_elements, self.block_elements)
        last = self.header_bytes + -(-rest * self._value_bytes // self.block_elements) if rest else 0
        return blocks * self.block_bytes + last

    def elements(self, encoded_bytes: int) -> int:
        """Values in so many bytes: of whole blocks exactly, of a short last one the most that it can hold."""
        blocks, rest = divmod(encoded_bytes, self.block_bytes)
        last = max(rest - self.header_bytes, 0) * self.block_elements // self._value_bytes
        return blocks * self.block_elements + last

    def chunks(self, encoded_bytes: int, chunk_bytes: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """(offset, length) of each chunk of one encoded tensor, in bytes, from the block boundary ``start`` on."""
        whole = max(chunk_bytes // self.block_bytes, 1) * self.block_bytes
        for offset in range(start, encoded_bytes, whole):
            yield offset, min(whole, encoded_bytes - offset)

    @property
    def _value_bytes(self) -> int:
        """Bytes of a whole block's values."""
        return self.block_bytes - self.header_bytes


BLOCK_ELEMENTS = 128
"""Values that share a scale: 2 bytes of scale for 128 or 64 bytes of values."""

FORMATS = {
    wire.name: wire
    for wire in (
        WireFormat("float32", 1, 4),
        WireFormat("bfloat16", 1, 2),
        WireFormat("int8", BLOCK_ELEMENTS, 2 + BLOCK_ELEMENTS, 2),
        WireFormat("int4", BLOCK_ELEMENTS, 2 + BLOCK_ELEMENTS // 2, 2),
    )
}
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

    def skip(self, stored_bytes: int) -> int:
        """Go on after as much of ``stored_bytes``, of all tensors end to end, as makes whole blocks; returns that."""
        position = self._at = self._offset = 0
        for size in self._sizes_bytes:
            if position + size > stored_bytes:
                self._offset = (stored_bytes - position) // self._block_bytes * self._block_bytes
                break
            position, self._at = position + size, self._at + 1
        return position + self._offset

    @property
    def next_tensor(self) -> int:
        """Every announced tensor with an index below this one is whole."""
        return self._tensors[-1] + 1 if self.is_complete else self._tensors[self._at]

    @property
    def is_complete(self) -> bool:
        """Whether every announced byte has come."""
        return self._at == len(self._tensors)

    def finish(self) -> None:
        """Raises ProtocolError when something announced has not come."""
        if not self.is_complete:
            raise ProtocolError(f"the end came where tensor {self._tensors[self._at]} at byte {self._offset} was due")
