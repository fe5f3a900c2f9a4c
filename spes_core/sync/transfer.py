"""In which order the chunks of encoded tensors must arrive: arithmetic, no data. How they are cut says `wireformat`."""

from __future__ import annotations

from collections.abc import Sequence

from spes_core.errors import ProtocolError
from spes_core.wireformat import FORMATS, WireFormat

__all__ = ["FORMATS", "Transfer", "WireFormat"]


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
